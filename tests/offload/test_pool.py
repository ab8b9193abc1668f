"""PinnedPool on memory that nobody registers, and on a GPU."""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import pytest
import torch

import jitkern
from jitkern.offload import PinnedPool, memory

MIB = 1 << 20


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = (line.split()[0].split("-") for line in lines)
        return any(int(a, 16) <= address < int(b, 16) for a, b in ranges)


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 3 * MIB + 5, 64 * MIB])
def test_exactly_as_many_bytes(num_bytes: int) -> None:
    with PinnedPool(num_bytes) as pool:
        whole = pool.tensor()
        assert (whole.dtype, whole.shape) == (torch.uint8, (num_bytes,))
        assert whole.data_ptr() % (2 * MIB) == 0
        assert pool.stats.num_bytes == num_bytes
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
        pool = PinnedPool([4, 8], torch.float32)
        first = pool.tensor(64)
        second = PinnedPool(256).tensor()
    first.fill_(1)
    second.fill_(1)
    assert not first.is_inference() and not second.is_inference()
    pool.close()


def test_lives_as_long_as_a_tensor() -> None:
    pool = PinnedPool(5 * MIB)
    part = pool.tensor([1000], torch.int64)[10:20]
    address = part.data_ptr()
    pool.close()
    del pool
    gc.collect()
    part.fill_(3)
    assert part.sum() == 30
    del part
    assert not is_mapped(address)


def test_a_closed_one_gives_nothing() -> None:
    pool = PinnedPool(4096)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match=r"^PinnedPool\.tensor: the pool is closed$"):
        pool.tensor()
    assert "4 KiB, closed" in repr(pool)


def test_attach_to_a_descriptor() -> None:
    """As a child has one that it inherited; the pool needs it no longer."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 12_345)
    one, two = PinnedPool.attach(fd), PinnedPool.attach(fd, 12_345)
    with pytest.raises(ValueError, match="num_bytes: 12346 bytes, expected 12345, the size of the"):
        PinnedPool.attach(fd, 12_346)
    os.close(fd)
    whole = one.tensor()
    assert whole.shape == (12_345,)
    whole[7:9] = 3
    one.close()
    assert two.tensor(100)[6:10].tolist() == [0, 3, 3, 0]
    two.close()
    text = "PinnedPool.attach: handle: str, expected a PoolHandle or an int"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        PinnedPool.attach("kv")  # type: ignore[arg-type]


def test_says_what_it_is() -> None:
    with PinnedPool(64 * MIB, num_threads=1) as pool:
        text = (
            r"PinnedPool\(64 MiB, (pinned|pageable), \d+% in huge pages, (as Linux chose|node .*); "
            r"touched by 1 threads? in \d\.\d\d s(, registered in \d\.\d\d s)?\)"
        )
        assert re.fullmatch(text, repr(pool)), repr(pool)
        stats = pool.stats
        assert 0 <= stats.huge_bytes <= stats.num_bytes
        assert stats.num_threads == 1
        assert stats.is_registered == torch.cuda.is_available()


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"size": 0}, ValueError, "size: 0, expected at least 1"),
    ({"size": [4, 0], "dtype": torch.int8}, ValueError, "size: [4, 0], expected sizes of at lea"),
    ({"size": [4]}, TypeError, "dtype: None, expected a torch.dtype for a shape"),
    ({"size": 4.5}, TypeError, "size: float, expected an int"),
    ({"size": True}, TypeError, "size: bool, expected an int"),
    ({"size": 8, "dtype": "int8"}, TypeError, "dtype: str, expected a torch.dtype"),
    ({"size": 8, "numa": "remote"}, ValueError, 'numa: "remote", expected "local" or "interleave"'),
    ({"size": 8, "numa": 1.0}, TypeError, "numa: float, expected an int"),
    ({"size": 8, "numa": 77}, ValueError, "numa: 77, expected a node with memory: "),
    ({"size": 8, "num_threads": 0}, ValueError, "num_threads: 0, expected 1 to "),
    ({"size": 8, "num_threads": 100_000}, ValueError, "num_threads: 100000, expected 1 to "),
    ({"size": 8, "share": "kv"}, TypeError, "share: str, expected a Share or None"),
    ({"size": 1 << 60}, MemoryError, "size: 1.074e+09 GiB, expected at most the "),
]


@pytest.mark.parametrize(("how", "kind", "text"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes(how: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^PinnedPool: {re.escape(text)}"):
        PinnedPool(**how)


def test_a_rank_binds_what_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[tuple[int, int]]] = {"pool_bind": [], "pool_touch": []}

    def note(name: str) -> Any:
        return lambda begin, count, *_: told[name].append((begin - base, count)) or 0

    functions = {name: note(name) for name in told}
    monkeypatch.setattr(memory.host, "module", lambda: functions)
    monkeypatch.setattr(memory, "numa_nodes", lambda: (0, 1))
    monkeypatch.setattr(memory, "_node_of_gpu", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    bytes_ = torch.empty(5 * MIB + 24, dtype=torch.uint8)
    base = bytes_.data_ptr()
    for numa, where in (("local", "node 1"), ("interleave", "nodes 0 and 1"), (0, "node 0")):
        for ranks in ([(0, 5 * MIB + 24)], [(0, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, MIB + 24)]):
            for rank, part in enumerate(ranks):
                assert memory.bind(bytes_, numa, rank, len(ranks)) == where
                memory.touch(bytes_, rank, len(ranks), 1, lambda *_: None)
                assert told["pool_bind"].pop() == told["pool_touch"].pop() == part
    assert not any(told.values())


def test_memory_that_linux_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the container's limit is below what the machine has free."""
    seen: list[int] = []
    module = memory.host.module()

    class Refusing:
        def __getitem__(self, name: str) -> Any:
            def refuse(begin: int, *_: int) -> int:
                seen.append(begin)
                return 12 if len(seen) == 3 else 0

            return refuse if name == "pool_touch" else module[name]

    monkeypatch.setattr(memory.host, "module", Refusing)
    monkeypatch.setattr(memory, "_TOUCH_BYTES", MIB)
    text = (
        "PinnedPool: Cannot allocate memory after 2 MiB of 4 MiB; free memory, or raise the limit "
        "of the container"
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(text)}$"):
        PinnedPool(4 * MIB)
    gc.collect()
    assert not is_mapped(seen[0])


def test_shown_on_a_terminal_only(capfd: pytest.CaptureFixture[str]) -> None:
    PinnedPool(4 * MIB).close()
    assert capfd.readouterr().err == ""
    PinnedPool(4 * MIB, progress=True).close()
    assert "PinnedPool" in capfd.readouterr().err
    PinnedPool(4 * MIB, progress=False).close()
    assert capfd.readouterr().err == ""


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_is_pinned_and_of_use_to_the_ops() -> None:
    pool = PinnedPool([5000, 41], torch.int32)
    table = pool.tensor()
    assert table.is_pinned() and pool.stats.is_registered
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
    with pytest.raises(ValueError, match="src: memory of a PinnedPool that was closed"):
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
