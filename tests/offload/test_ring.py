"""DescriptorRing: pushes are consumed in order; waits, threads, closing, wrong arguments."""

from __future__ import annotations

import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from pipelines import sync
from ref import refusals
from rings import Sides, memory_of, random_rows, ring_word, rows, take_next

from jitkern import unpack
from jitkern.offload import DescriptorRing

ONE = torch.tensor([[0, 0, 1]])


@pytest.mark.parametrize("columns", [3, 6])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_against_the_reference_around_the_ring(
    device: torch.device, columns: int, num_slots: int
) -> None:
    """Some pushes, then a call that takes up to `most`; each push writes to its own part."""
    generator = torch.Generator().manual_seed(columns)
    draw, part = random.Random(columns), 5003
    with DescriptorRing(num_slots, 70, device=device) as ring:
        for alignment in range(8):
            shifts = {"src_at": draw.randrange(16), "dst_at": draw.randrange(16)}
            sides = Sides(device, num_slots * part, **shifts)
            waiting: list[torch.Tensor] = []
            for _ in range(12):
                for _ in range(draw.randint(0, num_slots - len(waiting))):
                    count = draw.choice((0, 1, 2, 20, 33, 69, 70))
                    descriptors = random_rows(generator, columns, count, part)
                    descriptors[:, 0] += draw.randrange((num_slots - 1) * part + 1)
                    descriptors[:, 1] += ring.num_pushed % num_slots * part
                    ring.push(descriptors)
                    waiting.append(descriptors)
                most = draw.randint(1, num_slots)
                unpack(sides.src, sides.dst, ring, max_pushes=most)
                for descriptors in waiting[:most]:
                    sides.expect(descriptors)
                del waiting[:most]
                assert sides.are_right(), f"alignment {alignment}"
                done = [ring.is_done(ticket) for ticket in range(ring.num_pushed)]
                assert done == [True] * (len(done) - len(waiting)) + [False] * len(waiting)
            unpack(sides.src, sides.dst, ring, max_pushes=num_slots)
            sync(device)


def test_the_slot_in_memory() -> None:
    with DescriptorRing(3, 5, device="cpu") as ring:
        layout = memory_of(ring)
        assert (layout.num_slots, layout.max_descriptors, layout.descriptor_bytes) == (3, 5, 64)
        assert ring.address % 4096 == 0
        # The words that either side writes are on lines of their own.
        assert layout.head_at == 128 and layout.dones_at == 256 and layout.done_bytes == 128
        assert layout.slots_at == 256 + 3 * 128 and layout.slot_bytes == 512
        assert layout.num_bytes == layout.slots_at + 3 * layout.slot_bytes
        assert os.fstat(ring.fileno()).st_size == layout.num_bytes
        ring.push(rows((1, 2, 3)))
        ring.push(rows((1, 2, 2**32 - 1, 2**32 - 1, 2**63 - 1, 6), (7, 8, 9, 10, 11, 12)))
        assert layout.head().value == 2
        first, second = ring_word(1, 1), ring_word(1, 2)
        assert [layout.word(slot).value for slot in range(3)] == [first, second, 0]
        assert layout.descriptor(0, 0) == (1, 2, 3, 1, 0, 0, first, first)
        assert layout.descriptor(1, 0) == (1, 2, 2**32 - 1, 2**32 - 1, 2**63 - 1, 6, second, second)
        assert layout.descriptor(1, 1) == (7, 8, 9, 10, 11, 12, second, second)
        assert [layout.done(slot).value for slot in range(3)] == [0, 0, 0]
        dst = torch.zeros(5, dtype=torch.uint8)
        unpack(torch.zeros(4, dtype=torch.uint8), dst, ring)
        assert [layout.done(slot).value for slot in range(3)] == [1, 0, 0]


def test_arrays_and_strided_tensors() -> None:
    with DescriptorRing(8, 4, device="cpu") as ring:
        layout = memory_of(ring)
        ring.push(numpy.arange(6).reshape(2, 3))
        assert layout.descriptor(0, 1)[:3] == (3, 4, 5)
        with pytest.raises(TypeError, match="dtype int32, expected int64"):
            ring.push(numpy.zeros((2, 3), dtype=numpy.int32))
        wide = torch.arange(24).view(4, 6)
        ring.push(wide[:, ::2])
        assert layout.descriptor(1, 3)[:3] == (18, 20, 22)
        ring.push(wide.view(6, 4).t())
        assert layout.descriptor(2, 1)[:6] == (1, 5, 9, 13, 17, 21)
        with torch.device("meta"):  # torch's default device has no effect
            ring.push([[1, 2, 3]])
        assert layout.descriptor(3, 0)[:3] == (1, 2, 3)


def test_full_and_empty() -> None:
    src, dst = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    with DescriptorRing(2, 4, device="cpu") as ring:
        assert [ring.try_push(rows((i, i, 1))) for i in range(4)] == [0, 1, None, None]
        text = (
            "DescriptorRing.push: slot 0 is still being read after 0.02 s: push 0 is not consumed; "
            "wait longer (timeout_s), consume sooner, or make a ring of more than 2 slots"
        )
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=f"^{re.escape(text)}$"):
            ring.push(rows((0, 0, 1)), timeout_s=0.02)
        assert 0.02 <= time.monotonic() - started < 5
        unpack(src, dst, ring, max_pushes=2)
        assert dst.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
        assert ring.try_push(rows((5, 5, 1))) == 2
        # Pushes are consumed up to the first missing one.
        unpack(src, dst, ring, max_pushes=2)
        assert ring.is_done(2) and dst[5] == 5
        assert ring.num_pushed == 3


def test_threads_push_one_after_the_other() -> None:
    src, dst = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    tickets: list[int] = []
    with DescriptorRing(4, 4, device="cpu") as ring:

        def push(first: int) -> None:
            for i in range(first, first + 64):
                tickets.append(ring.push(rows((i, i, 1))))

        with ThreadPoolExecutor(4) as threads:
            for first in range(0, 256, 64):
                threads.submit(push, first)
            for ticket in range(256):
                assert take_next(dst, src, ring, ticket)
    assert sorted(tickets) == list(range(256))
    assert torch.equal(dst, src)


def test_a_python_without_memfd_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as uv's Python: the C library has it."""
    monkeypatch.delattr(os, "memfd_create")
    with DescriptorRing(2, 4, device="cpu") as ring:
        assert ring.push(rows((0, 0, 1))) == 0
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fileno(), 0)


def test_a_forked_child_has_no_part_of_it() -> None:
    ring = DescriptorRing(2, 8, device="cpu")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ring.push(rows((0, 0, 1)))
        except RuntimeError as error:
            text = "DescriptorRing: a forked child has no part of its parent's ring; make one"
            status = 0 if str(error) == text else 2
        finally:
            ring.close()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ring.push(rows((0, 0, 1))) == 0
    ring.close()


test_mistakes = refusals(
    DescriptorRing,
    {},
    ({"num_slots": 0}, ValueError, "num_slots: 0, expected 1 to 65536"),
    ({"num_slots": 2.0}, TypeError, "num_slots: float, expected an int"),
    ({"max_descriptors": True}, TypeError, "max_descriptors: bool, expected an int"),
    ({"max_descriptors": 65_536}, ValueError, "max_descriptors: 65536, expected 1 to 65535"),
    ({"num_slots": 65_536, "max_descriptors": 65_535}, MemoryError,
     "num_slots, max_descriptors: 256 GiB, expected at most the "),
    ({"device": "meta"}, ValueError, "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
)  # fmt: skip


def int64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def with_value(columns: int, column: int, value: int) -> torch.Tensor:
    descriptors = int64(4, columns)
    descriptors[3, column] = value
    return descriptors


PUSHES: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "NoneType, expected a tensor or an array of int64"),
    (torch.zeros(2, 3).to_sparse(), ValueError, "layout sparse_coo, expected"),
    (torch.zeros(2, 3), TypeError, "dtype float32, expected int64"),
    (torch.zeros(2, 3, dtype=torch.int32), TypeError, "dtype int32, expected int64"),
    (int64(3), ValueError, "shape [3], expected [n, 3] or [n, 6]"),
    (int64(2, 4), ValueError, "shape [2, 4], expected [n, 3] or [n, 6]"),
    (int64(6, 3), ValueError, "6 of them, expected at most the 5 of a slot"),
    (with_value(3, 0, -1), ValueError, "src_off -1 of descriptor 3, expected 0 or more"),
    (with_value(6, 1, -(2**63)), ValueError, f"dst_off {-(2**63)} of descriptor 3, expected 0 or"),
    (with_value(3, 2, 2**32), ValueError, "len 4294967296 of descriptor 3, expected 0 to 429496"),
    (with_value(6, 3, 2**40), ValueError, f"count {2**40} of descriptor 3, expected 0 to 429496"),
    (with_value(6, 4, -5), ValueError, "src_stride -5 of descriptor 3, expected 0 or more"),
    (with_value(6, 5, -5), ValueError, "dst_stride -5 of descriptor 3, expected 0 or more"),
]


@pytest.mark.parametrize(("descriptors", "kind", "text"), PUSHES, ids=lambda value: str(value)[:30])
def test_mistakes_of_a_push(descriptors: Any, kind: type[Exception], text: str) -> None:
    with DescriptorRing(2, 5, device="cpu") as ring:
        for name in ("push", "try_push"):
            expected = f"^DescriptorRing.push: descriptors: {re.escape(text)}"
            with pytest.raises(kind, match=expected):
                getattr(ring, name)(descriptors)
        assert ring.num_pushed == 0
        assert ring.push(ONE) == 0


@pytest.mark.cuda
def test_descriptors_on_a_gpu() -> None:
    with DescriptorRing(2, 5) as ring:
        text = "^DescriptorRing.push: descriptors: device cuda:0, expected cpu$"
        with pytest.raises(ValueError, match=text):
            ring.push(ONE.cuda())


def test_mistakes_of_other_calls() -> None:
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(ONE)
        calls: list[tuple[str, dict[str, Any], type[Exception], str]] = [
            ("is_done", {"ticket": 1}, ValueError, "ticket: 1, expected below the 1 pushes so far"),
            ("wait", {"ticket": -1}, ValueError, "ticket: -1, expected 0 to 9223372036854775807"),
            ("wait", {"ticket": 0.0}, TypeError, "ticket: float, expected an int"),
            ("wait", {"ticket": 0, "timeout_s": -1}, ValueError, "timeout_s: -1, expected 0 or"),
            ("wait", {"ticket": 0, "timeout_s": None}, TypeError, "timeout_s: None, "),
        ]
        for name, how, kind, text in calls:
            with pytest.raises(kind, match=f"^DescriptorRing.{name}: {re.escape(text)}"):
                getattr(ring, name)(**how)
        assert ring.push(ONE) == 1


def test_a_closed_one() -> None:
    ring = DescriptorRing(2, 5, device="cpu")
    assert repr(ring) == "DescriptorRing(2 slots of 5 descriptors on cpu, 0 pushed)"
    ring.close()
    ring.close()
    assert repr(ring) == "DescriptorRing(2 slots of 5 descriptors on cpu, closed)"
    buffer = torch.zeros(8, dtype=torch.uint8)
    for use in (
        *(ring.fileno, ring.__enter__),
        *(lambda: ring.push(ONE), lambda: ring.try_push(ONE)),
        *(lambda: ring.is_done(0), lambda: ring.wait(0)),
        *(lambda: ring.address, lambda: ring.num_pushed),
        lambda: unpack(buffer[4:], buffer[:4], ring),
    ):
        with pytest.raises(RuntimeError, match=r"^DescriptorRing: the ring is closed"):
            use()


def test_a_ring_of_the_cpu_has_no_server() -> None:
    with DescriptorRing(1, 1, device="cpu") as ring:
        text = "DescriptorRing.serve: DescriptorRing(1 slots of 1 descriptors on cpu, "
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            ring.serve(torch.zeros(1), torch.zeros(1))
        none = "" if torch.cuda.is_available() else ", and PyTorch sees none"
        assert str(caught.value).endswith(f", expected a ring of a GPU{none}")
