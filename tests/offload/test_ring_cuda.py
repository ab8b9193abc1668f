"""jitkern.unpack of a DescriptorRing on a GPU: what it copies, and when that is there."""

from __future__ import annotations

import ctypes
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from needs import needs_cxx
from rings import (
    EXAMPLE,
    MESSAGE_BYTES,
    SEALS_AT,
    compiled,
    memory_of,
    message,
    random_rows,
    ref_unpack,
    ring_word,
    rows,
)
from torch import Tensor

import jitkern
from jitkern import unpack
from jitkern.offload import DescriptorRing

pytestmark = pytest.mark.cuda

MARGIN = 256
both_memories = pytest.mark.parametrize("memory", ["mapped", "device"])


def random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


class Sides:
    """A source and a destination, in the middle of others' bytes; and what should be there."""

    def __init__(
        self, num_bytes: int, *, src_at: int = 0, dst_at: int = 0, host: str = "", seed: int = 1
    ) -> None:
        source = random_bytes(num_bytes + src_at, seed)
        whole = random_bytes(num_bytes + dst_at + 2 * MARGIN, seed + 1)
        self._wanted_whole = whole.clone()
        self._src_on_cpu = source[src_at:]
        self._whole = whole.pin_memory() if host == "dst" else whole.cuda()
        self.src = (source.pin_memory() if host == "src" else source.cuda())[src_at:]
        inner = slice(MARGIN + dst_at, MARGIN + dst_at + num_bytes)
        self.dst, self._wanted = self._whole[inner], self._wanted_whole[inner]

    def expect(self, descriptors: Tensor) -> None:
        ref_unpack(self._wanted, self._src_on_cpu, descriptors)

    def are_right(self) -> bool:
        torch.cuda.synchronize()
        jitkern.check()
        return torch.equal(self._whole.cpu(), self._wanted_whole)


@both_memories
@pytest.mark.parametrize("columns", [3, 6])
def test_against_the_reference_around_the_ring(columns: int, memory: str) -> None:
    """Some pushes, then a call that takes up to so many; those of a call go to places of theirs."""
    generator = torch.Generator().manual_seed(columns)
    draw = random.Random(columns)
    num_slots, part = 3, 5003
    with DescriptorRing(num_slots, 70, memory) as ring:
        for alignment in range(8):
            sides = Sides(3 * part, src_at=draw.randrange(16), dst_at=draw.randrange(16))
            waiting: list[Tensor] = []
            for _ in range(12):
                for _ in range(draw.randint(0, num_slots - len(waiting))):
                    count = draw.choice((0, 1, 2, 20, 33, 69, 70))
                    descriptors = random_rows(generator, columns, count, part)
                    descriptors[:, 0] += draw.randrange(2 * part)
                    descriptors[:, 1] += ring.num_pushed % num_slots * part
                    ring.push(descriptors)
                    waiting.append(descriptors)
                most = draw.randint(1, num_slots)
                unpack(sides.dst, sides.src, ring, num_slots=most)
                for descriptors in waiting[:most]:
                    sides.expect(descriptors)
                del waiting[:most]
                assert sides.are_right(), f"alignment {alignment}"
                done = [ring.done(ticket) for ticket in range(ring.num_pushed)]
                assert done == [True] * (len(done) - len(waiting)) + [False] * len(waiting)
            unpack(sides.dst, sides.src, ring, num_slots=num_slots)
            torch.cuda.synchronize()


@both_memories
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 512, 513, 2048])
def test_counts_of_descriptors(count: int, memory: str) -> None:
    """Around those that come with the word, and those of one hand."""
    generator = torch.Generator().manual_seed(count)
    sides = Sides(64 * 2048, dst_at=3)
    with DescriptorRing(2, 2048, memory) as ring:
        for ticket in range(5):  # slots that held others
            fewer = count if ticket % 2 == 0 else max(0, count - 1)
            descriptors = random_rows(generator, (3, 6)[ticket % 2], fewer, 64 * 2048)
            assert ring.push(descriptors) == ticket
            sides.expect(descriptors)
            unpack(sides.dst, sides.src, ring)
            assert sides.are_right()
            assert ring.done(ticket)


@both_memories
@pytest.mark.parametrize("host", ["src", "dst"])
def test_pinned_host_memory(host: str, memory: str) -> None:
    generator = torch.Generator().manual_seed(7)
    sides = Sides(1 << 20, src_at=1, dst_at=6, host=host)
    with DescriptorRing(2, 300, memory) as ring:
        for ticket, count in enumerate((1, 300, 0, 128, 5)):
            descriptors = random_rows(generator, 6, count, 1 << 20)
            ring.push(descriptors)
            sides.expect(descriptors)
            unpack(sides.dst, sides.src, ring, num_slots=2)
            ring.wait(ticket, timeout_s=60)
            if host == "dst":  # the host waits for no stream
                assert torch.equal(sides.dst, sides._wanted)
            assert sides.are_right()


@both_memories
@pytest.mark.parametrize("where", [0, 50, 99])
def test_a_large_piece_among_small_ones(where: int, memory: str) -> None:
    large, small = 64 << 20, 999
    src = torch.randint(256, (large + 100_000,), dtype=torch.uint8, device="cuda")
    dst, wanted = torch.zeros(2, large + 200_000, dtype=torch.uint8, device="cuda")
    listed, at = [], 1
    for i in range(100):
        size = large if i == where else small
        listed.append((i, at, size))
        at += size + i % 3
    descriptors = rows(*listed)
    with DescriptorRing(2, 128, memory) as ring:
        ring.push(descriptors)
        ring.push(rows((5, large + 150_000, 7)))
        unpack(dst, src, ring, num_slots=2)
        ref_unpack(wanted, src, descriptors)
        ref_unpack(wanted, src, rows((5, large + 150_000, 7)))
        torch.cuda.synchronize()
        jitkern.check()
        assert torch.equal(dst, wanted)
        assert ring.done(0) and ring.done(1)


@both_memories
def test_out_of_range(memory: str) -> None:
    """Skipped, all others are copied, the next call says so, and the ring goes on."""
    sides = Sides(60)
    wrong = [
        ((5, 0, 60), "src: bytes up to 65 in descriptor 2 of slot 1, expected at most 60"),
        ((0, 59, 2), "dst: bytes up to 61 in descriptor 2 of slot 1, expected at most 60"),
        ((61, 0, 1), "src: bytes up to 62 in descriptor 2 of slot 1, expected at most 60"),
        (
            (0, 20, 10, 3, 0, 16),
            "dst: bytes up to 62 in descriptor 2 of slot 1, expected at most 60",
        ),
    ]
    end = " (found by an earlier call on cuda:0; nothing of that descriptor was copied)"
    good = rows((3, 1, 5, 1, 0, 0), (20, 30, 1, 2, 2, 3))
    with DescriptorRing(2, 5, memory) as ring:
        for values, text in wrong:
            ring.push(rows((9, 50, 8)))  # in slot 0
            last = rows((0, 10, 3, 1, 0, 0))
            ring.push(torch.cat([good, rows((*values, 1, 0, 0)[:6]), last]))
            unpack(sides.dst, sides.src, ring, num_slots=2)
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match=f"^unpack: {re.escape(text + end)}$"):
                jitkern.check()
            for descriptors in (rows((9, 50, 8)), good, last):
                sides.expect(descriptors)
            assert sides.are_right()
            assert ring.done(ring.num_pushed - 1)


@both_memories
def test_the_bytes_are_there_once_it_is_completed(memory: str) -> None:
    """For another stream, which waits for nothing but the host."""
    consuming, reading = torch.cuda.Stream(), torch.cuda.Stream()
    generator = torch.Generator().manual_seed(3)
    num_bytes = 4 << 20
    sides = Sides(num_bytes)
    with DescriptorRing(2, 64, memory) as ring:
        for ticket in range(40):
            descriptors = random_rows(generator, 3, 64, num_bytes)
            ring.push(descriptors)
            sides.expect(descriptors)
            consuming.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(consuming):
                unpack(sides.dst, sides.src, ring)
            ring.wait(ticket, timeout_s=60)
            with torch.cuda.stream(reading):
                seen = sides.dst.clone()
            reading.synchronize()
            assert torch.equal(seen.cpu(), sides._wanted)
        assert sides.are_right()


@both_memories
def test_a_push_waits_until_the_gpu_has_consumed(memory: str) -> None:
    stream = torch.cuda.Stream()
    sides = Sides(1000)
    pushes = [rows((i, 100 * i, 77)) for i in range(8)]
    with DescriptorRing(2, 4, memory) as ring:
        for descriptors in pushes[:2]:
            ring.push(descriptors)
        for ticket, descriptors in enumerate(pushes[2:], 2):
            assert ring.try_push(descriptors) is None
            assert not ring.done(ticket - 2)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                unpack(sides.dst, sides.src, ring)
            assert ring.push(descriptors, timeout_s=60) == ticket
            assert ring.done(ticket - 2)
        torch.cuda.synchronize()
        unpack(sides.dst, sides.src, ring, num_slots=2)
        for descriptors in pushes:
            sides.expect(descriptors)
        assert sides.are_right()


@needs_cxx
def test_ten_thousand_rounds_of_a_producer_in_cpp(tmp_path: Path) -> None:
    """Each message by its bytes; a hundred times the ring is full, then runs empty."""
    library = compiled(EXAMPLE, tmp_path / "libproducer.so", ("-O2", "-shared", "-fPIC"))
    produce = ctypes.CDLL(str(library)).produce
    rounds, at_once = 10_000, 100
    draw = random.Random(1)
    bounce = torch.zeros(5 * MESSAGE_BYTES, dtype=torch.uint8).pin_memory()
    dst = torch.zeros(5, MESSAGE_BYTES, dtype=torch.uint8, device="cuda")
    log = torch.zeros(rounds, MESSAGE_BYTES, dtype=torch.uint8, device="cuda")
    deadline = time.monotonic() + 300
    ticket = 0
    with DescriptorRing(5, 37) as ring:
        pointers = (ctypes.c_void_p(ring.address), ctypes.c_void_p(bounce.data_ptr()))

        def take() -> None:
            """Queue a call, and keep what it has brought."""
            nonlocal ticket
            unpack(dst, bounce, ring, num_slots=draw.randint(1, 5))
            torch.cuda.synchronize()
            jitkern.check()
            while ticket < ring.num_pushed and ring.done(ticket):
                log[ticket].copy_(dst[ticket % 5])
                ticket += 1
            assert time.monotonic() < deadline

        for begin in range(0, rounds, at_once):
            thread = threading.Thread(target=produce, args=(*pointers, at_once, begin), daemon=True)
            thread.start()
            try:
                while ring.num_pushed < begin + 5:
                    assert time.monotonic() < deadline
                    time.sleep(1e-5)
                while ticket < begin + at_once:
                    take()
            finally:
                thread.join(60)
            take()
            assert ticket == ring.num_pushed == begin + at_once
        for begin in range(0, rounds, 1000):
            sent = message(torch.arange(begin, begin + 1000)[:, None])
            assert torch.equal(log[begin : begin + 1000].cpu(), sent), f"from {begin} on"


@both_memories
def test_another_device_is_refused(memory: str) -> None:
    src, dst = torch.zeros(2, 8)
    text = "^unpack: dst: device cpu, expected device cuda:0, the ring's$"
    with DescriptorRing(2, 4, memory, "cuda:0") as ring:
        ring.push(rows((0, 0, 8)))
        with pytest.raises(ValueError, match=text):
            unpack(dst.pin_memory(), src.pin_memory(), ring)
        for sides, name in (((dst, src.cuda()), "dst"), ((dst.cuda(), src), "src")):
            with pytest.raises(ValueError, match=f"^unpack: {name}: pageable host memory, expec"):
                unpack(*sides, ring)
        whole = torch.zeros(16, device="cuda")
        with pytest.raises(ValueError, match=r"^unpack: dst: overlaps src, expected memory of"):
            unpack(whole[:9], whole[8:], ring)
        torch.cuda.synchronize()
        assert not ring.done(0)


@pytest.mark.multigpu
def test_another_gpu_is_refused() -> None:
    text = "^unpack: dst: device cuda:1, expected device cuda:0, the ring's$"
    with DescriptorRing(2, 4, device="cuda:0") as ring:
        src, dst = torch.zeros(2, 8, device="cuda:1")
        with pytest.raises(ValueError, match=text):
            unpack(dst, src, ring)


def refused_if_busy(call: Callable[[], None]) -> bool:
    """Make a call that may find the ring busy, or say of an earlier one that it did."""
    try:
        call()
    except RuntimeError as error:
        text = (
            "unpack: descriptors: another call, or a server, was consuming the ring; have one "
            "follow the other on a stream, or by an event (found by an earlier call on cuda:0; "
            "nothing was copied)"
        )
        assert str(error) == text
        return True
    return False


@both_memories
def test_two_streams_at_once(memory: str) -> None:
    """What is refused takes nothing; behind it the ring goes on in turn."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sides = Sides(3 * 100_000)
    with DescriptorRing(3, 64, memory) as ring:
        generator = torch.Generator().manual_seed(5)
        for _ in range(100):
            for _ in range(3):
                descriptors = random_rows(generator, 3, 64, 100_000)
                descriptors[:, 1] += ring.num_pushed % 3 * 100_000
                ring.push(descriptors)
                sides.expect(descriptors)
            torch.cuda.synchronize()
            for stream in streams:
                with torch.cuda.stream(stream):
                    refused_if_busy(lambda: unpack(sides.dst, sides.src, ring))
            torch.cuda.synchronize()
            refused_if_busy(jitkern.check)
            done = [ring.done(ring.num_pushed - 3 + i) for i in range(3)]
            assert done in ([True, False, False], [True, True, False])
            unpack(sides.dst, sides.src, ring, num_slots=3)
            assert sides.are_right()
            assert ring.done(ring.num_pushed - 1)


@both_memories
def test_never_torn_or_stale(memory: str) -> None:
    """Words and seals that a producer cannot have written, put there by hand."""
    sides = Sides(600 * 8)
    with DescriptorRing(2, 600, memory) as ring:
        layout = memory_of(ring)
        slots = ring._bytes if ring._on_device is None else ring._on_device

        def put(at: int, value: int) -> None:
            slots[at : at + 8].view(torch.int64).fill_(value)

        for ticket, count in enumerate((3, 128, 600, 129, 1)):
            slot, generation = ticket % 2, ticket // 2 + 1
            descriptors = rows(*((8 * i, 8 * (599 - i), 7) for i in range(count)))
            assert ring.push(descriptors) == ticket
            good = ring_word(generation, count)
            word_at = layout.slots_at + slot * layout.slot_bytes
            spoilt = [
                (word_at, wrong)
                for wrong in (
                    0,
                    ring_word(generation - 1, count),
                    ring_word(generation + 1, count),
                    ring_word(generation, count - 1) if count > 1 else good & 0xFFFF,
                    ring_word(generation, count + 1),
                    ring_word(generation, 601),
                    ring_word(generation, 0xFFFF),
                    generation,
                )
            ]
            for i in {0, count // 2, count - 1, min(127, count - 1), min(128, count - 1)}:
                for seal_at in SEALS_AT:
                    at = layout.descriptor_at(slot, i) + seal_at
                    spoilt += [(at, 0), (at, good - (1 << 16)), (at, good + 1)]
            for at, wrong in spoilt:
                put(at, wrong)
                unpack(sides.dst, sides.src, ring, num_slots=2)
                unpack(sides.dst, sides.src, ring, slot=slot)
                torch.cuda.synchronize()
                assert not ring.done(ticket), (at, hex(wrong))
                put(at, good)
            assert sides.are_right()
            sides.expect(descriptors)
            unpack(sides.dst, sides.src, ring)
            assert sides.are_right()
            assert ring.done(ticket)
