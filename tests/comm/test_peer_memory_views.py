"""Tensors of a PeerMemory: what they are, where they end, how long they live; of one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore

from jitkern.comm import PeerMemory
from jitkern.errors import CommError

PIECE = 2 << 20
DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def threads(size: int, num_bytes: int) -> list[PeerMemory]:
    """Those of ranks that are threads."""
    store = HashStore()

    def make(rank: int) -> PeerMemory:
        return PeerMemory(num_bytes, store, rank=rank, size=size, device="cpu", timeout_s=20)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


@pytest.fixture
def pair() -> Iterator[list[PeerMemory]]:
    made = threads(2, 1024)
    yield made
    for one in made:
        one.close()


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:jitkern-peers")


# -- views -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(pair: list[PeerMemory], dtype: torch.dtype) -> None:
    mine, other = pair
    item = dtype.itemsize
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(dtype)
    there = mine.remote(1, [4, 6], dtype, 5 * item)
    there.copy_(numbers)
    assert there.dtype == dtype and there.shape == (4, 6) and there.is_contiguous()
    assert there.data_ptr() == mine.addresses[1] + 5 * item
    found = other.tensor((4, 6), dtype, offset=5 * item)
    assert torch.equal(found.view(torch.uint8), numbers.view(torch.uint8))
    assert other.tensor(5 * item, torch.uint8).count_nonzero() == 0


def test_shapes(pair: list[PeerMemory]) -> None:
    mine, _ = pair
    assert mine.tensor(7, torch.int32).shape == (7,)
    assert mine.tensor((), torch.int32).shape == ()
    assert mine.tensor([0, 3], torch.int32, 1024).shape == (0, 3)
    assert mine.tensor(torch.Size([2, 1, 3]), torch.int32).shape == (2, 1, 3)
    assert mine.tensor(1024, torch.uint8)[-1] == 0
    assert mine.tensor(1, torch.uint8, 1023).item() == 0


def test_the_whole_of_several() -> None:
    made = threads(3, PIECE)
    for rank, one in enumerate(made):
        one.tensor(PIECE // 4, torch.int32).fill_(rank)
    table = made[1].whole([3, PIECE // 4], torch.int32)
    assert [row.unique().tolist() for row in table] == [[0], [1], [2]]
    assert made[2].whole(5, torch.int64).shape == (5,)  # its first rows alone
    with pytest.raises(ValueError, match=f"{3 * PIECE + 1} bytes from 0 on, expected at most"):
        made[0].whole(3 * PIECE + 1, torch.uint8)


REFUSED: list[tuple[Callable[[PeerMemory], Any], type[Exception], str]] = [
    (
        lambda m: m.tensor(257, torch.int32),
        ValueError,
        "PeerMemory.tensor: shape: 1028 bytes from 0 on, expected at most 1024 in all",
    ),
    (
        lambda m: m.tensor(1, torch.uint8, 1024),
        ValueError,
        "PeerMemory.tensor: shape: 1 bytes from 1024 on, expected at most 1024 in all",
    ),
    (
        lambda m: m.remote(1, 256, torch.float32, 4),
        ValueError,
        "PeerMemory.remote: shape: 1024 bytes from 4 on, expected at most 1024 in all",
    ),
    (
        lambda m: m.tensor(1, torch.float32, 2),
        ValueError,
        "PeerMemory.tensor: offset: 2, expected a multiple of 4 bytes, which an item takes",
    ),
    (
        lambda m: m.tensor(1, torch.uint8, -1),
        ValueError,
        "PeerMemory.tensor: offset: -1, expected a multiple of 1 bytes, which an item takes",
    ),
    (
        lambda m: m.tensor([2, -1], torch.uint8),
        ValueError,
        "PeerMemory.tensor: shape: [2, -1], expected no negative size",
    ),
    (
        lambda m: m.tensor("12", torch.uint8),
        TypeError,
        "PeerMemory.tensor: shape: str, expected an int or a sequence of ints",
    ),
    (
        lambda m: m.tensor([1.5], torch.uint8),
        TypeError,
        "PeerMemory.tensor: shape: list, expected an int or a sequence of ints",
    ),
    (
        lambda m: m.tensor(1, "int8"),
        TypeError,
        "PeerMemory.tensor: dtype: str, expected a torch.dtype",
    ),
    (
        lambda m: m.tensor(1, torch.uint8, 1.0),
        TypeError,
        "PeerMemory.tensor: offset: float, expected an int",
    ),
    (
        lambda m: m.remote(2, 1, torch.uint8),
        ValueError,
        "PeerMemory.remote: rank: 2, expected 0 to 1",
    ),
    (
        lambda m: m.remote(-1, 1, torch.uint8),
        ValueError,
        "PeerMemory.remote: rank: -1, expected 0 to 1",
    ),
    (
        lambda m: m.remote(True, 1, torch.uint8),
        TypeError,
        "PeerMemory.remote: rank: bool, expected an int",
    ),
    (
        lambda m: m.whole(1, torch.uint8),
        ValueError,
        "PeerMemory.whole: num_bytes: 1024 leaves gaps between the ranks, expected whole pages; "
        "2097152 is the next",
    ),
    (
        lambda m: m.barrier(timeout_s=0),
        ValueError,
        "PeerMemory.barrier: timeout_s: 0, expected above 0 and at most 1e+06 s",
    ),
]


@pytest.mark.parametrize(("call", "kind", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_is_refused(
    pair: list[PeerMemory], call: Callable[[PeerMemory], Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        call(pair[0])
    assert str(caught.value) == said


NEW: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_bytes": 0}, ValueError, "num_bytes: 0, expected 1 to 70368744177664"),
    ({"num_bytes": 1 << 47}, ValueError, "num_bytes: 140737488355328, expected 1 to 7036874417766"),
    ({"num_bytes": 1.5}, TypeError, "num_bytes: float, expected an int"),
    ({"num_bytes": True}, TypeError, "num_bytes: bool, expected an int"),
    ({"timeout_s": 0}, ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
    ({"timeout_s": "1"}, TypeError, "timeout_s: str, expected seconds"),
    ({"timeout_s": None}, TypeError, "timeout_s: None, expected seconds"),
    ({"rank": None}, TypeError, "rank: None, expected an int, or a group that has it"),
    ({"size": None}, TypeError, "size: None, expected an int, or a group that has it"),
    ({"rank": 1}, ValueError, "rank 1 of size 1, expected 0 <= rank < size"),
    ({"device": "gpu"}, ValueError, 'device: \'gpu\', expected "cuda" or "cpu"'),
    ({"device": 0}, TypeError, "device: int, expected a torch.device"),
    ({"device": "meta"}, ValueError, "device: meta, expected a GPU or the CPU"),
    (
        {"group": None, "rank": None},
        CommError,
        "group: torch.distributed is not initialised; call torch.distributed.init_process_group()",
    ),
    ({"group": 1}, TypeError, "group: int, expected a ProcessGroup, a Store or None"),
]


@pytest.mark.parametrize(("given", "kind", "said"), NEW, ids=[said for _, _, said in NEW])
def test_what_is_no_memory(
    tmp_path: Path, given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    store = FileStore(str(tmp_path / "meeting"), -1)
    usual = {"num_bytes": 64, "group": store, "rank": 0, "size": 1, "device": "cpu"}
    with pytest.raises(kind) as caught:
        PeerMemory(**{**usual, **given})
    assert str(caught.value).startswith(f"PeerMemory: {said}")


# -- lifetime --------------------------------------------------------------------------------------


def test_the_last_user_gives_the_memory_back() -> None:
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    made = threads(4, 64)
    assert mappings() == before + 4 * 4
    assert len(os.listdir("/proc/self/fd")) == descriptors
    last = made[3].remote(1, 8, torch.int8)[3:].view(5)
    for one in made:
        one.close()
    assert mappings() == before + 4
    last.fill_(3)
    with pytest.raises(RuntimeError, match=r"^PeerMemory.tensor: the memory is closed$"):
        made[3].tensor(1, torch.int8)
    del last
    assert mappings() == before
    del made
    assert mappings() == before


def test_memory_that_nobody_closes() -> None:
    before = mappings()
    made = threads(2, 64)
    view = made[0].tensor(4, torch.int8)
    del made
    assert mappings() == before + 2
    del view
    assert mappings() == before


def test_addresses_end_with_the_memory() -> None:
    (one,) = threads(1, 64)
    assert one.addresses == (one.tensor(1, torch.int8).data_ptr(),)
    assert one.addresses[0] % PIECE == 0
    assert repr(one) == "PeerMemory(64 bytes of each rank, rank 0 of 1 on cpu)"
    one.close()
    with pytest.raises(RuntimeError, match=r"^PeerMemory.addresses: the memory is closed$"):
        assert one.addresses
