"""Tensors of a PeerMemory: what they are, where they end, how long they live; of one process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_ranks import Ranks
from torch.distributed import FileStore

from jitkern.comm import PeerMemory
from jitkern.errors import CommError, CommTimeoutError

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


@pytest.fixture
def pair() -> Iterator[list[PeerMemory]]:
    made = PeerMemory.of_devices(1024, ["cpu", torch.device("cpu", 0)])
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
    made = PeerMemory.of_devices(PIECE, ["cpu"] * 3)
    for rank, one in enumerate(made):
        one.tensor(PIECE // 4, torch.int32).fill_(rank)
    table = made[1].whole([3, PIECE // 4], torch.int32)
    assert [row.unique().tolist() for row in table] == [[0], [1], [2]]
    assert made[2].whole(5, torch.int64).shape == (5,)  # its first rows alone
    for one in made:
        assert one.addresses == made[0].addresses
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


def test_devices_that_are_refused() -> None:
    expected = "expected some GPUs, or the CPU alone"
    with pytest.raises(ValueError, match=f"^PeerMemory: devices: none, {expected}$"):
        PeerMemory.of_devices(64, [])
    with pytest.raises(ValueError, match=f"^PeerMemory: devices: cpu, cuda:0, {expected}$"):
        PeerMemory.of_devices(64, ["cpu", "cuda:0"])
    with pytest.raises(TypeError, match=r"^PeerMemory: devices: int, expected a torch.device$"):
        PeerMemory.of_devices(64, [0])


# -- lifetime --------------------------------------------------------------------------------------


def test_the_last_user_gives_the_memory_back() -> None:
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    made = PeerMemory.of_devices(64, ["cpu"] * 4)
    assert mappings() == before + 4
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
    made = PeerMemory.of_devices(64, ["cpu"] * 2)
    view = made[0].tensor(4, torch.int8)
    del made
    assert mappings() == before + 2
    del view
    assert mappings() == before


def test_addresses_end_with_the_memory() -> None:
    (one,) = PeerMemory.of_devices(64, ["cpu"])
    assert one.addresses == (one.tensor(1, torch.int8).data_ptr(),)
    assert one.addresses[0] % PIECE == 0
    assert repr(one) == "PeerMemory(64 bytes of each rank, rank 0 of 1 on cpu)"
    one.close()
    with pytest.raises(RuntimeError, match=r"^PeerMemory.addresses: the memory is closed$"):
        assert one.addresses


# -- barriers of threads ---------------------------------------------------------------------------


def test_threads_meet() -> None:
    made = PeerMemory.of_devices(64, ["cpu"] * 3)
    wrong: list[str] = []

    def work(one: PeerMemory) -> None:
        for turn in range(50):
            one.tensor(1, torch.int32).fill_(turn)
            one.barrier()
            found = [one.remote(rank, 1, torch.int32).item() for rank in range(3)]
            wrong.extend([f"{turn}: {found}"] * (found != [turn] * 3))
            one.barrier()

    threads = [threading.Thread(target=work, args=(one,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_threads_that_do_not_come() -> None:
    made = PeerMemory.of_devices(64, ["cpu"] * 3, timeout_s=60)
    with pytest.raises(CommTimeoutError) as caught:
        made[1].barrier(timeout_s=0.05)
    said = "barrier: call 1 on rank 1 of 3: rank 0, rank 2 did not come within 0.05 s"
    assert str(caught.value) == f"{said}, expected a thread for each"
    error = caught.value
    assert (error.missing, error.op, error.number, error.rank) == ((0, 2), "barrier", 1, 1)
    with pytest.raises(CommError, match="rank 0, rank 2 did not come to barrier 1; make a new one"):
        made[0].barrier()


def test_a_thread_that_waits_hears_that_one_has_closed() -> None:
    made = PeerMemory.of_devices(64, ["cpu"] * 2, timeout_s=60)
    timer = threading.Timer(0.1, made[0].close)
    timer.start()
    with pytest.raises(
        CommError, match=r"^barrier: PeerMemory: rank 0 has closed its memory; make"
    ):
        made[1].barrier()
    timer.join()


def test_one_rank_in_two_threads() -> None:
    made = PeerMemory.of_devices(64, ["cpu"] * 2, timeout_s=60)
    thread = threading.Thread(target=made[0].barrier)
    thread.start()
    while not made[0]._met._here:  # type: ignore[union-attr]
        pass
    with pytest.raises(CommError, match=r"^barrier: rank 0 waits already"):
        made[0].barrier()
    made[1].barrier()
    thread.join()


# -- several GPUs of one process -------------------------------------------------------------------


def test_several_gpus_of_one_process(gpu_ranks: Ranks) -> None:
    (one,) = gpu_ranks.start(1)
    one.ask("made = PeerMemory.of_devices(2 << 20, ['cuda:0', 'cuda:2', 'cuda:2'])")
    one.ask("made[1].tensor(4, torch.uint8).fill_(6)")
    assert one.ask("made[0].remote(1, 4, torch.uint8).tolist()") == [6, 6, 6, 6]
    assert one.ask("seen_devices") == ["cuda:2", "cuda:0"]
    assert one.ask("made[2].whole(6 << 20, torch.uint8).sum().item()") == 24
    assert one.ask("[str(m.device) for m in made]") == ["cuda:0", "cuda:2", "cuda:2"]
    counts = one.ask("left()")
    assert (counts["handles"], counts["mapped"], counts["reserved"]) == (0, 3, 1)
    one.ask("kept = made[2].tensor(4, torch.uint8); [m.close() for m in made]")
    assert one.ask("left()")["mapped"] == 3
    one.ask("del kept")
    counts = one.ask("left()")
    assert (counts["handles"], counts["mapped"], counts["reserved"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("FAKE_APART='0,3'", "cuda:0 of rank 0 (GPU-66616b65-2047-5055-0000-000000000000) cannot"),
        ("FAKE_NO_VMM='1'", "cuda:0 of rank 0 (GPU-66616b65-2047-5055-0000-000000000000) has no"),
        ("FAKE_GPU_MIB='1'", "GPU 0 has no 2097152 bytes left; torch.cuda.empty_cache() gives"),
    ],
)
def test_gpus_of_one_process_that_do_not_fit(gpu_ranks: Ranks, setting: str, said: str) -> None:
    (one,) = gpu_ranks.start(1)
    one.ask(f"os.environ.update({setting})")
    text = one.refuses("PeerMemory.of_devices(64, ['cuda:0', 'cuda:3'])")
    kind = "MemoryError" if "MIB" in setting else "UnsupportedError"
    assert text.startswith(f"{kind}: PeerMemory: {said}"), text
    assert set(list(one.ask("left()").values())[1:]) == {0}
