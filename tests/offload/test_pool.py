"""PinnedPool on memory that nobody registers, on a GPU, and one for several processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from comm.ranks import Pool, Rank, all_do
from ref import refusals
from torch.distributed import HashStore

import jitkern
from jitkern.errors import PoolShareError
from jitkern.offload import PinnedPool, PoolShare, memory

MIB = 1 << 20


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 3 * MIB + 5, 64 * MIB])
def test_exactly_as_many_bytes(num_bytes: int) -> None:
    with PinnedPool(num_bytes) as pool:
        whole = pool.tensor()
        assert (whole.dtype, whole.shape) == (torch.uint8, (num_bytes,))
        assert whole.data_ptr() % (2 * MIB) == 0
        assert pool.stats().num_bytes == num_bytes
        assert not whole.any()
        whole.fill_(7)
        assert whole.untyped_storage().nbytes() == num_bytes


def test_tensors_lie_side_by_side_on_lines() -> None:
    with PinnedPool(1000) as pool:
        first, second = pool.tensor(100), pool.tensor([5, 9], torch.int32)
        assert second.data_ptr() == first.data_ptr() + 128
        first.fill_(1)
        second.fill_(2)
        assert first.eq(1).all() and second.eq(2).all()
        text = "PinnedPool.tensor: shape: 617 bytes, expected at most the 616 that are left of 1000"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            pool.tensor(617)
        assert pool.tensor(616).data_ptr() == first.data_ptr() + 384
        with pytest.raises(ValueError, match="1 bytes, expected at most the 0 that are left"):
            pool.tensor(1)


def test_made_in_inference_mode_and_written_outside_of_it() -> None:
    with torch.inference_mode():
        pool = PinnedPool(128)
        first = pool.tensor(64)
        second = PinnedPool(256).tensor()
    first.fill_(1)
    second.fill_(1)
    assert not first.is_inference() and not second.is_inference()
    pool.close()


def test_says_what_it_is() -> None:
    with PinnedPool(64 * MIB) as pool:
        text = (
            r"PinnedPool\(64 MiB, (pinned|pageable)( on node \d+)?; "
            r"touched in \d\.\d\d s(, registered in \d\.\d\d s)?\)"
        )
        assert re.fullmatch(text, repr(pool)), repr(pool)
        assert pool.stats().is_registered == torch.cuda.is_available()
    assert "64 MiB, closed" in repr(pool)


def shared(name: Any, rank: Any, size: int, timeout_s: float = 1.0) -> dict[str, Any]:
    ranks: Any = {"rank": rank, "world_size": size, "timeout_s": timeout_s}
    return {"num_bytes": 8, "share": PoolShare(name, HashStore(), **ranks)}


test_mistakes = refusals(
    PinnedPool,
    {},
    ({"num_bytes": 0}, ValueError, "num_bytes: 0, expected at least 1"),
    ({"num_bytes": "0G"}, ValueError, "num_bytes: 0, expected at least 1"),
    ({"num_bytes": "64 XB"}, ValueError, "num_bytes: '64 XB', expected bytes such as 1048576, '51"),
    ({"num_bytes": [4]}, TypeError, "num_bytes: list, expected an int, or a text such as '64G'"),
    ({"num_bytes": 6.4e6}, TypeError, "num_bytes: float, expected an int, or a text such as '64G'"),
    ({"num_bytes": 8, "share": "kv"}, TypeError, "share: str, expected a PoolShare or None"),
    (shared(3, 0, 1), ValueError, "share: name: 3, expected 1 to 200 letters"),
    (shared("a/b", 0, 1), ValueError, "share: name: 'a/b', expected 1 to"),
    (shared("a", None, 1), TypeError, "share 'a': rank: None, expected an"),
    (shared("a", 3, 2), ValueError, "share 'a': rank: 3, expected 0 to 1"),
    (shared("a", 0, 0), ValueError, "share 'a': world_size: 0, expected at least"),
    (shared("a", 0, 1, 0), ValueError, "share 'a': timeout_s: 0, expected above"),
    ({"num_bytes": 1 << 60}, MemoryError, "num_bytes: 1.049e+06 TiB, expected at most the "),
)


def test_mistakes_of_tensors() -> None:
    refused: Any = [
        (([4, 0], torch.int8), ValueError, "shape: [4, 0], expected sizes of at least 1"),
        (([4],), TypeError, "dtype: None, expected a torch.dtype along with a shape"),
        ((None, torch.int8), TypeError, "shape: None, expected an int"),
        ((8, "int8"), TypeError, "dtype: str, expected a torch.dtype"),
    ]
    with PinnedPool(64) as pool:
        for arguments, kind, text in refused:
            with pytest.raises(kind, match=f"^PinnedPool.tensor: {re.escape(text)}"):
                pool.tensor(*arguments)


def test_bytes_as_text() -> None:
    sizes = {"4096": 4096, "3k": 3 << 10, "2M": 2 * MIB, "1MiB": MIB, "2 MiB": 2 * MIB}
    for text, num_bytes in {**sizes, "1.5M": 3 * MIB // 2, "0.0001 M": 104}.items():
        with PinnedPool(text) as pool:
            assert pool.stats().num_bytes == len(pool.tensor()) == num_bytes


def test_a_share_without_a_group() -> None:
    text = "^PinnedPool: share 'a': group: torch.distributed is not initialised; call"
    with pytest.raises(PoolShareError, match=text):
        PinnedPool(8, share=PoolShare("a"))


def test_memory_that_linux_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a container's limit, which gives ENOMEM: the end of a file gives EFAULT."""
    fd = os.memfd_create("jitkern-too-small")
    os.ftruncate(fd, 2 * MIB)
    monkeypatch.setattr(memory, "_TOUCH_BYTES", MIB)
    text = (
        "PinnedPool: Bad address after 2 MiB of 4 MiB; free memory, or raise the limit "
        "of the container"
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(text)}$"):
        memory.PinnedMemory(4 * MIB, fd)
    os.close(fd)
    gc.collect()
    assert "jitkern-too-small" not in Path("/proc/self/maps").read_text()


@pytest.mark.cuda
def test_is_pinned_and_of_use_to_the_ops() -> None:
    pool = PinnedPool(5000 * 41 * 4)
    table = pool.tensor([5000, 41], torch.int32)
    assert table.is_pinned() and pool.stats().is_registered
    table.random_()
    rows = torch.zeros(700, 41, dtype=torch.int32, device="cuda")
    pairs = torch.stack([torch.randperm(5000)[:700], torch.randperm(700)], dim=1).cuda()
    jitkern.h2d_gather(table, rows, pairs)
    expected = torch.zeros_like(rows)
    expected[pairs[:, 1]] = table.cuda()[pairs[:, 0]]
    assert torch.equal(rows, expected)
    assert torch.equal(jitkern.indexing(table, pairs[:, 0].contiguous()), table.cuda()[pairs[:, 0]])
    torch.cuda.synchronize()
    pool.close()
    assert not table.is_pinned()
    with pytest.raises(ValueError, match="src: pageable host memory"):
        jitkern.h2d_gather(table, rows, pairs)


@pytest.mark.cuda
def test_freed_while_a_copy_reads_it() -> None:
    """The copy gets what was there: giving the memory back waits for the GPU."""
    count = 64 * MIB
    target = torch.zeros(count, dtype=torch.uint8, device="cuda")
    for turn in range(3):
        tensor = PinnedPool(count).tensor()
        tensor.fill_(turn + 1)
        torch.cuda._sleep(20_000_000)
        target.copy_(tensor, non_blocking=True)
        del tensor
        assert target.eq(turn + 1).all()


NUM_BYTES = (5 << 20) + 24
NUM_RANKS = 3
NAME = f"test-{os.getpid()}"


def tell_make(pool: Pool, ranks: list[Rank]) -> None:
    path = pool.path()
    for number, rank in enumerate(ranks):
        where = f"dist.FileStore({path!r}, -1), rank={number}, world_size={NUM_RANKS}, timeout_s=60"
        share = f"PoolShare({NAME!r}, {where})"
        rank.tell(f"held = PinnedPool({NUM_BYTES}, share={share}); table = words(held)")


@pytest.fixture
def three(pool: Pool) -> list[Rank]:
    ranks = pool.start(NUM_RANKS)
    tell_make(pool, ranks)
    assert [rank.value() for rank in ranks] == [None] * NUM_RANKS
    return ranks


def test_all_have_the_same_memory(three: list[Rank]) -> None:
    assert all_do(three, "held.stats().num_bytes") == [NUM_BYTES] * NUM_RANKS
    all_do(three, "table[1000 * {rank}] = {rank} + 5")
    assert all_do(three, "table[:3000:1000].tolist()") == [[5, 6, 7]] * NUM_RANKS


def test_what_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    share = PoolShare("test-after", HashStore(), rank=0, world_size=1)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(memory.PinnedMemory, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PinnedPool(NUM_BYTES, share=share)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_memory_outlives_a_rank(pool: Pool, three: list[Rank]) -> None:
    """Also rank 0, by kill -9; others can take the name."""
    three[0].ask("table[9] = 1")
    three[0].kill()
    assert three[1].ask("table[9].item()") == 1
    three[1].ask("held.close()")
    assert three[2].ask("table[9].item()") == 1
    again = pool.start(NUM_RANKS)
    tell_make(pool, again)
    assert [rank.value() for rank in again] == [None] * NUM_RANKS
    assert again[2].ask("table[9].item()") == 0


@pytest.mark.parametrize(
    ("who", "becomes", "step"), [(1, "killed", "__init__"), (0, "failed", "register")]
)
def test_all_raise_where_one_does_not_come(pool: Pool, becomes: str, step: str, who: int) -> None:
    ranks = pool.start(NUM_RANKS)
    ranks[who].ask(f"instead_of({step!r}, {'end' if becomes == 'killed' else 'fail'})")
    tell_make(pool, ranks)
    start = f"PoolShareError: PinnedPool: share '{NAME}': "
    for number, rank in enumerate(ranks):
        if number == who and becomes == "killed":
            assert rank.wait(30) == -signal.SIGKILL
            continue
        said = rank.error()["error"]
        assert said.startswith(start), said
        assert ("no more of this" in said) == (becomes == "failed"), said
        if number == who:
            assert said == f"{start}no more of this"
        else:
            assert f"rank {who}{' ' if becomes == 'killed' else ':'}" in said, said


def test_two_launches_take_one_name() -> None:
    """Their ranks come in turn: each pool is of one launch alone."""
    stores, order = [HashStore(), HashStore()], [(0, 0), (1, 1), (0, 1), (1, 0)]

    def make(launch: int, rank: int) -> torch.Tensor:
        share = PoolShare("kv-host-pool", stores[launch], rank=rank, world_size=2, timeout_s=20)
        return PinnedPool(4096, share=share).tensor()

    with ThreadPoolExecutor(4) as threads:
        futures = {place: threads.submit(make, *place) for place in order}
    pools = {place: future.result() for place, future in futures.items()}
    for place, pool in pools.items():
        pool[100 * place[1]] = place[0] + 1
    assert [pools[place][:200:100].tolist() for place in order] == [[1, 1], [2, 2], [1, 1], [2, 2]]


def test_two_pools_at_once_do_not_count_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux would kill a process: what is free is asked for and taken in one turn."""
    left = [6 * MIB]

    def touch(self: Any, first: int, last: int) -> None:
        time.sleep(0.1)
        left[0] -= last - first

    monkeypatch.setattr(memory, "free_bytes", lambda: left[0])
    monkeypatch.setattr(memory.PinnedMemory, "_touch_part", touch)

    def make(number: int) -> None:
        share = None if number < 2 else PoolShare("kv", HashStore(), rank=0, world_size=1)
        PinnedPool(4 * MIB, share=share)

    with ThreadPoolExecutor(3) as threads:
        errors = [future.exception() for future in [threads.submit(make, n) for n in range(3)]]
    assert left == [2 * MIB]
    assert sum(error is None for error in errors) == 1, errors


def test_a_forked_child_does_not_have_a_private_pool(pool: Pool) -> None:
    """Copy on write would move the parent off the pages that the GPU accesses."""
    (rank,) = pool.start(1)
    rank.ask("held = PinnedPool(4096); tensor = held.tensor()")
    assert rank.ask("fork('tensor.tolist()')") == "SIGSEGV"
    text = "RuntimeError: PinnedPool.tensor: a forked child has no part of its parent's pool; make"
    assert rank.ask("fork('held.tensor()')").startswith(text)
    assert rank.ask("tensor.count_nonzero().item()") == 0
