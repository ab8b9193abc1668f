"""DescriptorRing: what is pushed is what is consumed, in turn; waits, threads and ends."""

from __future__ import annotations

import array
import gc
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from rings import memory_of, random_rows, ref_unpack, ring_word, rows, take_next

from jitkern import unpack
from jitkern.offload import DescriptorRing, RingSlot


@pytest.mark.parametrize("columns", [3, 6])
@pytest.mark.parametrize("num_slots", [1, 2, 7])
def test_against_the_reference_around_the_ring(columns: int, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    src = torch.randint(256, (4096,), dtype=torch.uint8, generator=generator)
    dst, wanted = torch.zeros(2, 4096, dtype=torch.uint8)
    with DescriptorRing(num_slots, 33, device="cpu") as ring:
        for ticket in range(5 * num_slots):
            count = (0, 1, 33, 2, 20, 32)[ticket % 6]
            descriptors = random_rows(generator, columns, count)
            assert ring.push(descriptors) == ticket
            assert not ring.done(ticket)
            unpack(dst, src, ring)
            assert ring.done(ticket)
            ref_unpack(wanted, src, descriptors)
            assert torch.equal(dst, wanted)
        assert ring.num_pushed == 5 * num_slots


def test_large_copies_by_threads() -> None:
    src = torch.randint(256, (6 << 20,), dtype=torch.uint8)
    dst, wanted = torch.zeros(2, 6 << 20, dtype=torch.uint8)
    third = 2 << 20
    descriptors = rows(
        (2 * third, 0, third, 1, 0, 0),
        (0, 5, 0, 7, 0, 0),
        (0, 5, 7, 0, 0, 0),
        (5, third, 1001, 1000, 1100, 1001),
        (0, 2 * third, third - 1, 1, 0, 0),
        (9, 0, 0, 0, 0, 0),
    )
    with DescriptorRing(2, 8, device="cpu") as ring:
        ring.push(descriptors)
        unpack(dst, src, ring)
    ref_unpack(wanted, src, descriptors)
    assert torch.equal(dst, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_dtype_is_bytes(dtype: torch.dtype) -> None:
    src, dst = torch.randn(64).to(dtype), torch.zeros(16, 4, dtype=dtype)
    size = dtype.itemsize
    with DescriptorRing(1, 1, device="cpu") as ring:
        ring.push(rows((8 * size, 0, 40 * size)))
        unpack(dst, src, ring)
    assert torch.equal(dst.flatten()[:40], src[8:48])


def test_the_slot_in_memory() -> None:
    with DescriptorRing(3, 5, device="cpu") as ring:
        memory = memory_of(ring)
        assert (memory.num_slots, memory.max_descriptors, memory.descriptor_bytes) == (3, 5, 64)
        assert ring.address % 4096 == 0
        # Each word that one side writes is on a line of its own.
        assert memory.head_at == 128 and memory.dones_at == 256 and memory.done_bytes == 128
        assert memory.slots_at == 256 + 3 * 128 and memory.slot_bytes == 512
        assert memory.num_bytes == memory.slots_at + 3 * memory.slot_bytes
        assert os.fstat(ring.fileno()).st_size == memory.num_bytes
        ring.push(rows((1, 2, 3)))
        ring.push(rows((1, 2, 2**32 - 1, 2**32 - 1, 2**63 - 1, 6), (7, 8, 9, 10, 11, 12)))
        assert memory.head().value == 2
        one, two = ring_word(1, 1), ring_word(1, 2)
        assert (memory.word(0).value, memory.word(1).value, memory.word(2).value) == (one, two, 0)
        assert memory.descriptor(0, 0) == (1, 2, 3, 1, 0, 0, one, one)
        assert memory.descriptor(1, 0) == (1, 2, 2**32 - 1, 2**32 - 1, 2**63 - 1, 6, two, two)
        assert memory.descriptor(1, 1) == (7, 8, 9, 10, 11, 12, two, two)
        assert [memory.done(slot).value for slot in range(3)] == [0, 0, 0]
        dst = torch.zeros(5, dtype=torch.uint8)
        unpack(dst, torch.zeros(4, dtype=torch.uint8), ring)
        assert [memory.done(slot).value for slot in range(3)] == [1, 0, 0]


def test_buffers_and_strided_tensors() -> None:
    with DescriptorRing(8, 4, device="cpu") as ring:
        memory = memory_of(ring)
        flat = array.array("q", range(12))
        ring.push(memoryview(flat).cast("B").cast("q", [4, 3]))
        assert memory.descriptor(0, 3)[:3] == (9, 10, 11)
        ring.push(memoryview(bytes(flat)).cast("q", [2, 6]))  # one that nobody may write
        assert memory.descriptor(1, 1)[:6] == (6, 7, 8, 9, 10, 11)
        wide = torch.arange(24).view(4, 6)
        ring.push(wide[:, ::2])
        assert memory.descriptor(2, 3)[:3] == (18, 20, 22)
        ring.push(wide.view(6, 4).t())
        assert memory.descriptor(3, 1)[:6] == (1, 5, 9, 13, 17, 21)
        ring.push(torch.empty(0, 3, dtype=torch.int64))
        ring.push(torch.nn.Parameter(wide[:1], requires_grad=False))
        assert ring.num_pushed == 6


def test_numpy_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    with DescriptorRing(8, 4, device="cpu") as ring:
        ring.push(numpy.arange(6).reshape(2, 3))
        assert memory_of(ring).descriptor(0, 1)[:3] == (3, 4, 5)
        with pytest.raises(TypeError, match="items of format 'i', expected int64"):
            ring.push(numpy.zeros((2, 3), dtype=numpy.int32))


def test_what_torch_puts_elsewhere_by_default() -> None:
    """Not the numbers of a buffer: also of one without any."""
    with DescriptorRing(8, 4, device="cpu") as ring, torch.device("meta"):
        ring.push(memoryview(array.array("q", range(3))).cast("B").cast("q", [1, 3]))
        text = re.escape("descriptors: shape [0], expected [n, 3] or [n, 6]")
        with pytest.raises(ValueError, match=text):
            ring.push(array.array("q"))


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
        with pytest.raises(TimeoutError, match=r"^DescriptorRing\.reserve: slot 0 is still being"):
            ring.reserve(1, timeout_s=0)
        unpack(dst, src, ring, num_slots=2)
        assert dst.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
        assert ring.try_push(rows((5, 5, 1))) == 2
        # Of pushes that are there, those before a missing one are consumed.
        unpack(dst, src, ring, num_slots=2)
        assert ring.done(2) and dst[5] == 5
        assert ring.num_pushed == 3


def test_tickets_and_waits() -> None:
    buffer = torch.zeros(8, dtype=torch.uint8)
    with DescriptorRing(2, 4, device="cpu") as ring:
        for ticket in range(9):
            assert ring.push(rows((0, 0, 1))) == ticket
            if ticket:
                unpack(buffer[4:], buffer[:4], ring, slot=(ticket - 1) % 2)
        # Right also of slots that have been used again.
        assert [ring.done(ticket) for ticket in range(9)] == [True] * 8 + [False]
        ring.wait(0, timeout_s=0)
        text = "DescriptorRing.wait: push 8, in slot 0, is not consumed after 0.01 s; is a consumer"
        with pytest.raises(TimeoutError, match=f"^{re.escape(text)}"):
            ring.wait(8, timeout_s=0.01)


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_waits_end_when_the_slot_is_consumed_and_sleep_meanwhile() -> None:
    src, dst = torch.zeros(2, 8, dtype=torch.uint8)
    with DescriptorRing(1, 4, device="cpu") as ring:
        ring.push(rows((0, 0, 1)))

        def consume() -> None:
            time.sleep(0.3)
            unpack(dst, src, ring)

        thread = in_thread(consume)
        used_s, started = time.thread_time(), time.monotonic()
        assert ring.push(rows((0, 0, 1))) == 1  # waits for the slot
        took_s, used_s = time.monotonic() - started, time.thread_time() - used_s
        thread.join()
        assert 0.2 < took_s < 5
        assert used_s < 0.5 * took_s
        thread = in_thread(consume)
        ring.wait(1)
        assert ring.done(1)
        thread.join()


def test_threads_push_one_after_the_other() -> None:
    src, dst = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    tickets: list[int] = []
    with DescriptorRing(4, 4, device="cpu") as ring:

        def push(first: int) -> None:
            for i in range(first, first + 64):
                tickets.append(ring.push(rows((i, i, 1))))

        threads = [in_thread(lambda first=first: push(first)) for first in range(0, 256, 64)]
        for ticket in range(256):
            assert take_next(dst, src, ring, ticket)
        for thread in threads:
            thread.join()
    assert sorted(tickets) == list(range(256))
    assert torch.equal(dst, src)


def test_a_slot_is_written_in_place() -> None:
    src, dst = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    with DescriptorRing(3, 8, device="cpu") as ring:
        ring.push(rows((9, 9, 9, 9, 9, 9)))
        memory = memory_of(ring)
        with ring.reserve(3) as slot:
            assert (slot.index, slot.ticket) == (1, 1)
            assert memory.word(1).value == 0
            slot.src_off[:] = torch.tensor([10, 50, 70])
            slot.dst_off[1] = 20
            slot.len[:] = torch.tensor([5, 7, 0])
            slot.count[1] = 2
            slot.src_stride[1] = 10
            slot.dst_stride[1] = 30
            assert repr(slot) == "RingSlot(1, ticket 1, being written)"
        seals = (ring_word(1, 3), ring_word(1, 3))
        assert memory.descriptor(1, 0) == (10, 0, 5, 1, 0, 0, *seals)
        assert memory.descriptor(1, 1) == (50, 20, 7, 2, 10, 30, *seals)
        assert memory.descriptor(1, 2) == (70, 0, 0, 1, 0, 0, *seals)
        unpack(dst, src, ring, slot=0)
        dst.zero_()
        unpack(dst, src, ring)
        wanted = torch.zeros(100, dtype=torch.uint8)
        wanted[:5], wanted[20:27], wanted[50:57] = src[10:15], src[50:57], src[60:67]
        assert torch.equal(dst, wanted)

        # Of a slot of all, the first few; and nothing where the body raises.
        slot = ring.reserve()
        assert len(slot.len) == 8
        assert slot.publish(2) == 2
        assert memory.word(2).value == ring_word(1, 2)
        with pytest.raises(KeyError), ring.reserve(1, timeout_s=0):
            raise KeyError
        assert ring.push(rows((0, 0, 1)), timeout_s=0) == 3


def test_others_wait_for_a_reserved_slot() -> None:
    with DescriptorRing(3, 8, device="cpu") as ring:
        slot = ring.reserve(1)
        found: list[Any] = []

        def use() -> None:
            found.append(ring.try_push(rows((0, 0, 1))))
            try:
                ring.push(rows((0, 0, 1)), timeout_s=0.01)
            except TimeoutError as error:
                found.append(str(error))
            found.append(ring.push(rows((0, 0, 1))))

        thread = in_thread(use)
        while len(found) < 2:
            time.sleep(0.001)
        slot.cancel()
        thread.join()
        text = "DescriptorRing.push: another thread has slot 0 reserved for longer than 0.01 s"
        assert found == [None, text, 0]


def test_a_slot_that_is_dropped_is_the_next_ones() -> None:
    with DescriptorRing(3, 8, device="cpu") as ring:

        def use() -> None:
            slot = ring.reserve(2)
            slot.len[:] = 7

        in_thread(use).join()
        with ring.reserve(1, timeout_s=0) as slot:
            assert [slot.ticket, slot.len.item(), slot.count.item()] == [0, 0, 1]
        use()
        assert ring.push(rows((0, 0, 1)), timeout_s=0) == 1


def test_an_interrupt_anywhere_leaves_no_slot_reserved() -> None:
    """In front of each instruction of Python from `reserve` to the push."""
    buffer = torch.zeros(2, 8, dtype=torch.uint8)
    files = {sys.modules[cls.__module__].__file__ for cls in (DescriptorRing, RingSlot)}
    left = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = frame.f_code.co_filename in files
        left -= event == "opcode"
        if left == 0 and event == "opcode":
            raise KeyboardInterrupt
        return trace

    with DescriptorRing(2, 2, device="cpu") as ring:

        def use() -> bool:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                with ring.reserve(1):
                    pass
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(before)
            return False

        for at in itertools.count(1):
            left = at
            was_interrupted = use()
            pushed = ring.num_pushed
            assert ring.try_push(rows((0, 0, 1))) == pushed, f"instruction {at}"
            unpack(*buffer, ring, num_slots=2)
            if not was_interrupted:
                break
        assert at > 100


def test_an_interrupted_wait_cancels_nobody_elses_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with DescriptorRing(3, 8, device="cpu") as ring:
        slots: list[RingSlot] = []
        in_thread(lambda: slots.append(ring.reserve(1))).join()

        def interrupt(_: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(time, "sleep", interrupt)
            ring.reserve(1)
        assert ring.try_push(rows((0, 0, 1))) is None
        assert slots[0].publish() == 0


def test_a_python_without_memfd_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as uv's: the C library has it all the same."""
    monkeypatch.delattr(os, "memfd_create")
    with DescriptorRing(2, 4, device="cpu") as ring:
        assert ring.push(rows((0, 0, 1))) == 0
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fileno(), 0)


def test_goes_when_nobody_has_it() -> None:
    ring = DescriptorRing(2, 8, device="cpu")
    fd, address = ring.fileno(), ring.address
    ring.push(rows((0, 0, 1)))
    del ring
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with open("/proc/self/maps") as lines:
        assert not [line for line in lines if int(line.split("-")[0], 16) == address]


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


@pytest.mark.cuda
def test_slots_on_the_gpu_are_those_of_the_host() -> None:
    """As they are at a place of the stream that pushes were made on."""
    stream = torch.cuda.Stream()
    with DescriptorRing(3, 5, memory="device") as ring, torch.cuda.stream(stream):
        memory, slots = memory_of(ring), ring._on_device
        assert slots is not None
        for ticket in range(7):
            ring.push(torch.full((ticket % 6, 3), ticket))
            begin = memory.slots_at + ticket % 3 * memory.slot_bytes
            end = begin + 128 + 64 * (ticket % 6)
            assert torch.equal(slots[begin:end].cpu(), ring._bytes[begin:end])
            memory.done(ticket % 3).value = ticket // 3 + 1
        assert torch.equal(slots[:128].cpu(), ring._bytes[:128])
