"""One PinnedPool for several processes: all of them have it, or all raise."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from comm.ranks import Pool, Rank, all_do

from jitkern.errors import ShareError
from jitkern.offload import PinnedPool, PoolHandle, Share, memory

NUM_BYTES = (5 << 20) + 24
NUM_RANKS = 3
NAME = f"test-{os.getpid()}"


def tell_make(ranks: list[Rank], missing: int = -1, timeout_s: int = 60) -> None:
    """Have all but one make the pool, and a table of it."""
    for number, rank in enumerate(ranks):
        if number == missing:
            continue
        share = f"Share({NAME!r}, {number}, {NUM_RANKS}, {timeout_s})"
        rank.tell(f"held = PinnedPool({NUM_BYTES}, share={share}); table = words(held)")


@pytest.fixture
def three(pool: Pool) -> list[Rank]:
    """Ranks that have the pool."""
    ranks = pool.start(NUM_RANKS)
    tell_make(ranks)
    assert [rank.value() for rank in ranks] == [None] * NUM_RANKS
    return ranks


def test_all_have_the_same_memory(three: list[Rank]) -> None:
    handle = [[NAME, NUM_BYTES]] * NUM_RANKS
    assert all_do(three, "[held.handle.name, held.handle.num_bytes]") == handle
    all_do(three, "table[1000 * {rank}] = {rank} + 5")
    assert all_do(three, "table[:3000:1000].tolist()") == [[5, 6, 7]] * NUM_RANKS


def test_one_that_is_no_rank_attaches(pool: Pool, three: list[Rank]) -> None:
    """And is killed, which the others do not notice."""
    three[1].ask("table[77] = 3")
    pid, fd = three[0].ask("[held.handle.pid, held.handle.fd]")
    (other,) = pool.start(1)
    other.ask(f"table = words(PinnedPool.attach(PoolHandle({NAME!r}, {NUM_BYTES}, {pid}, {fd})))")
    assert other.ask("table[77].item()") == 3
    other.ask("table[78] = 4")
    other.kill()
    assert three[0].ask("table[78].item()") == 4


def test_what_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    share = Share(f"test-after-{os.getpid()}", 0, 1)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(memory.PinnedMemory, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PinnedPool(NUM_BYTES, share=share)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_memory_outlives_a_rank(pool: Pool, three: list[Rank]) -> None:
    """Also rank 0, by kill -9; with the last one the name is free again."""
    three[0].ask("table[9] = 1")
    three[0].kill()
    assert three[1].ask("table[9].item()") == 1
    three[1].ask("held.close()")
    assert three[2].ask("table[9].item()") == 1
    again = pool.start(NUM_RANKS)
    tell_make(again)
    assert [rank.value() for rank in again] == [None] * NUM_RANKS
    assert again[2].ask("table[9].item()") == 0


@pytest.mark.parametrize(
    ("who", "becomes", "step"),
    [
        (1, "killed", "__init__"),
        (2, "failed", "register"),
        (0, "killed", "register"),
        (0, "failed", "__init__"),
    ],
)
def test_all_raise_where_one_does_not_come(pool: Pool, becomes: str, step: str, who: int) -> None:
    ranks = pool.start(NUM_RANKS)
    ranks[who].ask(f"instead_of({step!r}, {'end' if becomes == 'killed' else 'fail'})")
    tell_make(ranks)
    start = f"ShareError: PinnedPool: share '{NAME}': "
    for number, rank in enumerate(ranks):
        if number == who and becomes == "killed":
            assert rank.wait() == -signal.SIGKILL
            continue
        said = rank.error()["error"]
        assert said.startswith(start), said
        assert ("no more of this" in said) == (becomes == "failed"), said
        if number == who:
            assert said == f"{start}no more of this"
        else:
            assert f"rank {who}{' ' if becomes == 'killed' else ':'}" in said, said


def test_a_rank_that_never_comes_is_named(pool: Pool) -> None:
    ranks = pool.start(NUM_RANKS)
    tell_make(ranks, missing=1, timeout_s=3)
    for rank in (ranks[0], ranks[2]):
        said = rank.error()["error"]
        assert said.startswith("ShareError: ") and "rank 1" in said, said


def test_attach_to_what_is_no_pool() -> None:
    made = PinnedPool(NUM_BYTES, share=Share(f"test-attach-{os.getpid()}", 0, 1))
    handle = made.handle
    with PinnedPool.attach(handle) as other:
        assert other.stats.num_bytes == NUM_BYTES
    with pytest.raises(ShareError, match="has it no more"):
        PinnedPool.attach(PoolHandle("other", NUM_BYTES, handle.pid, handle.fd))
    with pytest.raises(TypeError, match="handle: int, expected a PoolHandle"):
        PinnedPool.attach(handle.fd)  # type: ignore[arg-type]
    made.close()
    with pytest.raises(ShareError, match="has it no more"):
        PinnedPool.attach(handle)


def test_nobody_truncates_the_memory() -> None:
    with PinnedPool(NUM_BYTES, share=Share(f"test-seal-{os.getpid()}", 0, 1)) as made:
        for num_bytes in (0, NUM_BYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(made.handle.fd, num_bytes)


def test_a_folder_that_others_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitkern.offload.pool._SHARED", tmp_path)
    (tmp_path / f"jitkern-{os.geteuid()}").mkdir()
    (tmp_path / f"jitkern-{os.geteuid()}").chmod(0o777)
    with pytest.raises(ShareError, match=r"mode 777, expected a folder of uid \d+ alone, mode 700"):
        PinnedPool(NUM_BYTES, share=Share("test-folder", 0, 1))


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        ((3, 0, 1), ValueError, "name: 3, expected 1 to 200 letters"),
        (("a/b", 0, 1), ValueError, "name: 'a/b', expected 1 to 200 letters"),
        (("a", None, 1), TypeError, "rank: None, expected an int"),
        (("a", 3, 2), ValueError, "rank: 3, expected 0 to 1"),
        (("a", 0, 0), ValueError, "size: 0, expected at least 1"),
        (("a", 0, 1, 0), ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
    ],
)
def test_wrong_shares(args: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        PinnedPool(NUM_BYTES, share=Share(*args))
    assert str(caught.value).startswith("PinnedPool: share") and text in str(caught.value)
