"""jitkern.unpack of a DescriptorRing on a GPU, eagerly, in graphs, and by a server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
from ref import ref_unpack
from rings import Sides, random_rows, rows
from torch import Tensor

import jitkern
from jitkern import unpack
from jitkern.offload import DescriptorRing

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 512, 513, 2048])
def test_counts_of_descriptors(count: int) -> None:
    """Around the number read together with the word, and the number staged at once."""
    generator = torch.Generator().manual_seed(count)
    sides = Sides("cuda", 64 * 2048, dst_at=3)
    with DescriptorRing(2, 2048) as ring:
        for ticket in range(5):  # slots that held others
            fewer = count if ticket % 2 == 0 else max(0, count - 1)
            descriptors = random_rows(generator, (3, 6)[ticket % 2], fewer, 64 * 2048)
            assert ring.push(descriptors) == ticket
            sides.expect(descriptors)
            unpack(sides.src, sides.dst, ring)
            assert sides.are_right()
            assert ring.is_done(ticket)


def test_out_of_range() -> None:
    """The descriptor is skipped, all others are copied, and the next call raises."""
    sides = Sides("cuda", 60)
    wrong = [
        ((5, 0, 60), "src: bytes up to 65 in descriptor 2 of slot 1, expected at most 60"),
        ((0, 59, 2), "dst: bytes up to 61 in descriptor 2 of slot 1, expected at most 60"),
        ((61, 0, 1), "src: bytes up to 62 in descriptor 2 of slot 1, expected at most 60"),
        ((0, 20, 10, 3, 0, 16), "dst: bytes up to 62 in descriptor 2 of slot 1, expected at most"),
    ]
    end = "(found by an earlier call on cuda:0; nothing of that descriptor was copied)"
    good = rows((3, 1, 5, 1, 0, 0), (20, 30, 1, 2, 2, 3))
    with DescriptorRing(2, 5) as ring:
        for values, text in wrong:
            ring.push(rows((9, 50, 8)))  # in slot 0
            last = rows((0, 10, 3, 1, 0, 0))
            ring.push(torch.cat([good, rows((*values, 1, 0, 0)[:6]), last]))
            unpack(sides.src, sides.dst, ring, max_pushes=2)
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match=f"^unpack: {re.escape(text)}.*{re.escape(end)}$"):
                jitkern.check()
            for descriptors in (rows((9, 50, 8)), good, last):
                sides.expect(descriptors)
            assert sides.are_right()
            assert ring.is_done(ring.num_pushed - 1)


def test_the_bytes_are_there_once_it_is_completed() -> None:
    """Another stream, ordered by the host only, reads them."""
    consuming, reading = torch.cuda.Stream(), torch.cuda.Stream()
    generator = torch.Generator().manual_seed(3)
    num_bytes = 4 << 20
    sides = Sides("cuda", num_bytes)
    with DescriptorRing(2, 64) as ring:
        for ticket in range(40):
            descriptors = random_rows(generator, 3, 64, num_bytes)
            ring.push(descriptors)
            sides.expect(descriptors)
            consuming.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(consuming):
                unpack(sides.src, sides.dst, ring)
            ring.wait(ticket, timeout_s=60)
            with torch.cuda.stream(reading):
                seen = sides.dst.clone()
            reading.synchronize()
            assert torch.equal(seen.cpu(), sides._wanted)
        assert sides.are_right()


BUSY = (
    "unpack: descriptors: another call, or a server, was consuming the ring; have one follow the "
    "other on a stream, or by an event (found by an earlier call on cuda:0; nothing was copied)"
)


def refused_if_busy(call: Callable[[], None]) -> None:
    """Make a call that may find the ring busy, or raise that an earlier call did."""
    try:
        call()
    except RuntimeError as error:
        assert str(error) == BUSY


def test_two_streams_at_once() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sides = Sides("cuda", 3 * 100_000)
    with DescriptorRing(3, 64) as ring:
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
                    refused_if_busy(lambda: unpack(sides.src, sides.dst, ring))
            torch.cuda.synchronize()
            refused_if_busy(jitkern.check)
            done = [ring.is_done(ring.num_pushed - 3 + i) for i in range(3)]
            assert done in ([True, False, False], [True, True, False])
            unpack(sides.src, sides.dst, ring, max_pushes=3)
            assert sides.are_right()
            assert ring.is_done(ring.num_pushed - 1)


def test_graphs_and_calls_of_one_ring() -> None:
    """A replay takes the pushes made until then; the very first call is captured, too."""
    part = 10_007
    sides, generator = Sides("cuda", 4 * part, src_at=3, dst_at=5), torch.Generator().manual_seed(1)
    waiting: list[Tensor] = []
    with DescriptorRing(4, 64) as ring:

        def captured(*max_pushes: int) -> torch.cuda.CUDAGraph:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for most in max_pushes:
                    unpack(sides.src, sides.dst, ring, max_pushes=most)
            return graph

        def push(count: int) -> None:
            for _ in range(count):
                descriptors = random_rows(generator, 6, 40, part)
                descriptors[:, 1] += ring.num_pushed % 4 * part  # to a place of its slot
                ring.push(descriptors, timeout_s=60)
                waiting.append(descriptors)

        def check_taken(count: int) -> None:
            for descriptors in waiting[:count]:
                sides.expect(descriptors)
            del waiting[:count]
            assert sides.are_right()
            end = ring.num_pushed - len(waiting)
            assert all(ring.is_done(ticket) for ticket in range(end - count, end))

        three, two = captured(1, 1, 1), captured(2, 1)
        check_taken(0)  # capturing takes nothing
        for count in (3, 0, 2, 1, 3, 0, 3):
            push(count)
            (two if count == 2 else three).replay()
            check_taken(count)
        push(4)
        three.replay()
        check_taken(3)
        assert not ring.is_done(ring.num_pushed - 1)
        unpack(sides.src, sides.dst, ring, max_pushes=4)
        check_taken(1)


# -- serve: a kernel consumes as long as it runs --------------------------------------------------

PATIENT_S = 60.0


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    src = torch.randint(256, (4096,), dtype=torch.uint8, device="cuda")
    return src, torch.zeros_like(src)


def test_what_is_pushed_is_copied(pair: tuple[Tensor, Tensor]) -> None:
    """Around the ring, triples and sextuples, no descriptors, and more than are staged at once."""
    src, dst = pair
    generator = torch.Generator().manual_seed(1)
    wanted, source = dst.cpu(), src.cpu()
    with DescriptorRing(3, 600) as ring:
        with ring.serve(src, dst) as server:
            for round_ in range(40):
                count = (1, 0, 33, 128, 129, 256, 257, 600)[round_ % 8]
                pushed = random_rows(generator, (3, 6)[round_ % 2], count)
                ticket = ring.push(pushed)
                ref_unpack(source, wanted, pushed)
                ring.wait(ticket, timeout_s=PATIENT_S)
                assert server.is_running
        assert not server.is_running
        assert torch.equal(dst.cpu(), wanted)
        # And then calls go on.
        ticket = ring.push(rows((0, 0, 100)))
        jitkern.unpack(src, dst, ring)
        ring.wait(ticket)
        assert torch.equal(dst[:100], src[:100])
    jitkern.check()


def test_the_body_raises(pair: tuple[Tensor, Tensor]) -> None:
    with DescriptorRing() as ring:
        with pytest.raises(KeyError), ring.serve(*pair) as server:
            ring.wait(ring.push(rows((0, 0, 8))), timeout_s=PATIENT_S)
            raise KeyError
        assert not server.is_running
        with pytest.raises(RuntimeError, match="the server has ended; make another one"):
            server.__enter__()
        with ring.serve(*pair):
            ring.wait(ring.push(rows((0, 8, 8))), timeout_s=PATIENT_S)
        src, dst = pair
        assert torch.equal(dst[:16].view(2, 8), src[:8].expand(2, 8))


def test_it_ends_by_itself(pair: tuple[Tensor, Tensor]) -> None:
    """A device synchronisation ends after the idle timeout; the next server takes the rest."""
    src, dst = pair
    with DescriptorRing() as ring:
        with ring.serve(src, dst, idle_timeout_s=0.2) as server:
            ring.wait(ring.push(rows((0, 0, 8))), timeout_s=PATIENT_S)
            torch.cuda.synchronize()
            assert not server.is_running
            ticket = ring.push(rows((8, 8, 8)))
            with pytest.raises(TimeoutError, match="push 1, in slot 1, is not consumed"):
                ring.wait(ticket, timeout_s=0.1)
        with ring.serve(src, dst):
            ring.wait(ticket, timeout_s=PATIENT_S)
        assert torch.equal(dst[:16], src[:16])


def test_who_else_wants_the_ring_is_refused(pair: tuple[Tensor, Tensor]) -> None:
    src, dst = pair
    with DescriptorRing() as ring, DescriptorRing() as other:
        with ring.serve(src, dst):
            ring.wait(ring.push(rows((0, 0, 8))), timeout_s=PATIENT_S)
            text = "DescriptorRing.serve: cuda:0 has a server; end that one first"
            for candidate in (ring, other):
                with pytest.raises(RuntimeError, match=f"^{text}$"), candidate.serve(src, dst):
                    pass
            jitkern.unpack(src, dst, ring)
            torch.cuda.current_stream().synchronize()
            with pytest.raises(RuntimeError, match="a server, was consuming the ring; have one"):
                jitkern.check()
            ring.wait(ring.push(rows((8, 8, 8))), timeout_s=PATIENT_S)
        assert torch.equal(dst[:16], src[:16])


@pytest.mark.parametrize("num_slots", [1, 2, 16])
def test_it_ends_though_a_push_is_always_there(pair: tuple[Tensor, Tensor], num_slots: int) -> None:
    src, dst = pair
    is_over = threading.Event()
    with DescriptorRing(num_slots) as ring:

        def push() -> None:
            while not is_over.is_set():
                ring.try_push(rows((0, 0, 8)))

        with ring.serve(src, dst):
            thread = threading.Thread(target=push)
            thread.start()
            while ring.num_pushed < 100 * num_slots:
                time.sleep(0.001)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        is_over.set()
        thread.join()
        jitkern.unpack(src, dst, ring, max_pushes=num_slots)
        ring.wait(ring.num_pushed - 1, timeout_s=PATIENT_S)
    jitkern.check()
