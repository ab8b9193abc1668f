"""One PinnedPool for several processes: all of them have it, or all raise."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import forks
import pytest

from jitkern.errors import ShareError
from jitkern.host import module as host
from jitkern.offload import PinnedPool, PoolHandle, Share, memory, pool

CHILD = Path(__file__).resolve().parent / "shared_pool_child.py"
NUM_BYTES = (5 << 20) + 24
NUM_RANKS = 3


class Rank:
    """A child, and what it says."""

    def __init__(self, **told: Any) -> None:
        self.process = forks.start(CHILD, json.dumps(told), stdin=PIPE, stdout=PIPE)

    def said(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"killed": -self.process.wait(60)}

    def ask(self, **order: Any) -> Any:
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        return self.said()["value"]


class Ranks:
    """Starts children, none of which outlives the test."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started: list[Rank] = []

    def start(self, **told: Any) -> Rank:
        common = {"name": self.name, "num_ranks": NUM_RANKS, "num_bytes": NUM_BYTES}
        self.started.append(Rank(**{**common, **told}))
        return self.started[-1]

    def all(self, **told: Any) -> list[Rank]:
        return [self.start(rank=rank, **told) for rank in range(NUM_RANKS)]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    host.module()  # built here, once
    ranks = Ranks(f"test-{os.getpid()}")
    yield ranks
    for rank in ranks.started:
        rank.process.end()


def test_all_have_the_same_memory(ranks: Ranks) -> None:
    three = ranks.all()
    handles = [rank.said()["handle"] for rank in three]
    assert [handle[:2] for handle in handles] == [[ranks.name, NUM_BYTES]] * 3
    for number, rank in enumerate(three):
        rank.ask(write=1000 * number, value=number + 5)
    assert [[rank.ask(read=1000 * i) for i in range(3)] for rank in three] == [[5, 6, 7]] * 3


def test_one_that_is_no_rank_attaches(ranks: Ranks) -> None:
    three = ranks.all()
    handles = [rank.said()["handle"] for rank in three]
    three[1].ask(write=77, value=3)
    other = ranks.start(handle=handles[0])
    assert "error" not in other.said()
    assert other.ask(read=77) == 3
    other.ask(write=78, value=4)
    other.process.kill()
    assert three[0].ask(read=78) == 4


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


def test_the_memory_outlives_a_rank(ranks: Ranks) -> None:
    """Also rank 0, by kill -9; with the last one the name is free again."""
    three = ranks.all()
    for rank in three:
        rank.said()
    three[0].ask(write=9, value=1)
    three[0].process.kill()
    three[0].process.wait()
    assert three[1].ask(read=9) == 1
    three[1].ask(close=True)
    assert three[2].ask(read=9) == 1
    again = ranks.all()
    for rank in again:
        rank.said()
    assert again[2].ask(read=9) == 0


@pytest.mark.parametrize(
    ("who", "becomes", "step"),
    [
        (1, "killed", "__init__"),
        (2, "failed", "register"),
        (0, "killed", "register"),
        (0, "failed", "__init__"),
    ],
)
def test_all_raise_where_one_does_not_come(ranks: Ranks, becomes: str, step: str, who: int) -> None:
    three = [
        ranks.start(rank=rank, **({"step": step, "becomes": becomes} if rank == who else {}))
        for rank in range(NUM_RANKS)
    ]
    said = [rank.said() for rank in three]
    if becomes == "killed":
        assert said[who] == {"killed": 9}
    else:
        assert (
            said[who]["error"] == f"ShareError: PinnedPool: share '{ranks.name}': no more of this"
        )
    for number, one in enumerate(said):
        if number != who:
            start = f"ShareError: PinnedPool: share '{ranks.name}': "
            assert one["error"].startswith(start), one
            assert f"rank {who}{' ' if becomes == 'killed' else ':'}" in one["error"], one
            assert ("no more of this" in one["error"]) == (becomes == "failed"), one


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    two = [ranks.start(rank=rank, timeout_s=3) for rank in (0, 2)]
    for rank in two:
        said = rank.said()
        assert said["error"].startswith("ShareError: ") and "rank 1" in said["error"], said


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
    monkeypatch.setattr(pool, "_SHARED", tmp_path)
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
