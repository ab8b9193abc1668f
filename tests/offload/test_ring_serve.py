"""DescriptorRing.serve: a kernel that consumes as long as it runs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from rings import random_rows, ref_unpack, rows
from torch import Tensor

import jitkern
from jitkern.offload import DescriptorRing

pytestmark = pytest.mark.cuda
PATIENT_S = 60.0


@pytest.fixture
def sides() -> tuple[Tensor, Tensor]:
    src = torch.randint(256, (4096,), dtype=torch.uint8, device="cuda")
    return src, torch.zeros_like(src)


@pytest.mark.parametrize("num_sms", [1, 2, 3, 8])
def test_what_is_pushed_is_copied(sides: tuple[Tensor, Tensor], num_sms: int) -> None:
    """Around the ring, triples and sextuples, none and more than are handed over at once."""
    src, dst = sides
    generator = torch.Generator().manual_seed(num_sms)
    wanted, source = dst.cpu(), src.cpu()
    with DescriptorRing(3, 600) as ring:
        with ring.serve(src, dst, num_sms=num_sms) as server:
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


def test_the_body_raises(sides: tuple[Tensor, Tensor]) -> None:
    with DescriptorRing() as ring:
        with pytest.raises(KeyError), ring.serve(*sides) as server:
            ring.wait(ring.push(rows((0, 0, 8))), timeout_s=PATIENT_S)
            raise KeyError
        assert not server.is_running
        with pytest.raises(RuntimeError, match="the server has ended; make another one"):
            server.__enter__()
        with ring.serve(*sides):
            ring.wait(ring.push(rows((0, 8, 8))), timeout_s=PATIENT_S)
        src, dst = sides
        assert torch.equal(dst[:16].view(2, 8), src[:8].expand(2, 8))


def test_it_ends_by_itself(sides: tuple[Tensor, Tensor]) -> None:
    """A wait for the whole device is no longer than that; another one takes what is left."""
    src, dst = sides
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


def test_who_else_wants_the_ring_is_refused(sides: tuple[Tensor, Tensor]) -> None:
    src, dst = sides
    with DescriptorRing() as ring, DescriptorRing() as other:
        with ring.serve(src, dst):
            ring.wait(ring.push(rows((0, 0, 8))), timeout_s=PATIENT_S)
            text = "DescriptorRing.serve: the ring has a server; end that one first"
            with pytest.raises(RuntimeError, match=f"^{text}$"):
                ring.serve(src, dst)
            text = "DescriptorRing.serve: cuda:0 has a server; end that one first"
            with pytest.raises(RuntimeError, match=f"^{text}$"), other.serve(src, dst):
                pass
            jitkern.unpack(src, dst, ring)
            torch.cuda.current_stream().synchronize()
            with pytest.raises(RuntimeError, match="a server, was consuming the ring; have one"):
                jitkern.check()
            ring.wait(ring.push(rows((8, 8, 8))), timeout_s=PATIENT_S)
        assert torch.equal(dst[:16], src[:16])


@pytest.mark.parametrize("num_slots", [1, 2, 16])
def test_it_ends_though_a_push_is_always_there(
    sides: tuple[Tensor, Tensor], num_slots: int
) -> None:
    src, dst = sides
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
        jitkern.unpack(src, dst, ring, num_slots=num_slots)
        ring.wait(ring.num_pushed - 1, timeout_s=PATIENT_S)
    jitkern.check()
