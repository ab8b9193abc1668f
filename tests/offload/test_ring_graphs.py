"""jitkern.unpack of a DescriptorRing in CUDA graphs: a replay takes what is there by then."""

from __future__ import annotations

import pytest
import torch
from rings import random_rows, rows
from test_ring_cuda import Sides, both_memories
from torch import Tensor

import jitkern
from jitkern import unpack
from jitkern.offload import DescriptorRing

pytestmark = pytest.mark.cuda

PART = 10_007


def captured(
    *calls: dict[str, int | None], sides: Sides, ring: DescriptorRing
) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for how in calls:
            unpack(sides.dst, sides.src, ring, **how)
    return graph


class Pushes:
    """Pushes of one ring, each of which goes to a place of its slot."""

    def __init__(self, ring: DescriptorRing, sides: Sides) -> None:
        self._ring, self._sides = ring, sides
        self._generator = torch.Generator().manual_seed(1)
        self._made: list[Tensor] = []

    def push(self, count: int) -> None:
        for _ in range(count):
            descriptors = random_rows(self._generator, 6, 40, PART)
            descriptors[:, 1] += len(self._made) % self._ring.num_slots * PART
            assert self._ring.push(descriptors, timeout_s=60) == len(self._made)
            self._made.append(descriptors)

    def check(self, *taken: int) -> None:
        """Hold these to have been taken, and all pushes to be done that were."""
        for ticket in taken:
            self._sides.expect(self._made[ticket])
        assert self._sides.are_right()
        for ticket in taken:
            assert self._ring.done(ticket)


@both_memories
def test_a_graph_of_three_calls(memory: str) -> None:
    """The first call is captured as well; each replay takes other pushes, or fewer, or none."""
    sides = Sides(4 * PART, src_at=3, dst_at=5)
    with DescriptorRing(4, 64, memory) as ring:
        pushes = Pushes(ring, sides)
        graph = captured({}, {}, {}, sides=sides, ring=ring)
        pushes.check()  # capturing takes nothing
        first = 0
        for count in (3, 0, 2, 1, 3, 0, 0, 3, 1, 3):
            pushes.push(count)
            graph.replay()
            pushes.check(*range(first, first + count))
            first += count
        pushes.push(4)
        graph.replay()
        pushes.check(first, first + 1, first + 2)
        assert not ring.done(first + 3)
        graph.replay()
        pushes.check(first + 3)


def test_replays_that_nobody_waits_for() -> None:
    """The host pushes as fast as slots become free."""
    sides = Sides(4 * PART)
    with DescriptorRing(4, 64) as ring:
        pushes = Pushes(ring, sides)
        graph = captured({"num_slots": 2}, {"num_slots": 2}, sides=sides, ring=ring)
        for _ in range(100):
            pushes.push(4)
            graph.replay()
        ring.wait(399, timeout_s=60)
        pushes.check(*range(400))


@both_memories
def test_two_graphs_and_calls_of_one_ring(memory: str) -> None:
    sides = Sides(4 * PART)
    with DescriptorRing(4, 64, memory) as ring:
        pushes = Pushes(ring, sides)
        one = captured({}, sides=sides, ring=ring)
        other = captured({"num_slots": 2}, {}, sides=sides, ring=ring)
        for first in range(0, 40, 4):
            pushes.push(4)
            one.replay()
            pushes.check(first)
            if first % 8 == 0:
                other.replay()
            else:
                unpack(sides.dst, sides.src, ring, num_slots=4)
            pushes.check(first + 1, first + 2, first + 3)


@both_memories
def test_slots_by_their_index(memory: str) -> None:
    """Whatever generation they have by then; calls in turn behind them skip what they took."""
    sides = Sides(4 * PART)
    with DescriptorRing(4, 64, memory) as ring:
        pushes = Pushes(ring, sides)
        calls = [{"slot": 2}, {"slot": 0}, {"slot": 3, "num_slots": 4}]
        graph = captured(*calls, sides=sides, ring=ring)
        for first in range(0, 20, 4):
            pushes.push(4)
            graph.replay()
            # The last call takes slot 3, and ends at slot 0, which has nothing more.
            pushes.check(first, first + 2, first + 3)
            assert not ring.done(first + 1)
            unpack(sides.dst, sides.src, ring)
            pushes.check(first + 1)
            graph.replay()
            pushes.check()


@both_memories
def test_out_of_range_in_a_graph(memory: str) -> None:
    sides = Sides(1000)
    with DescriptorRing(2, 64, memory) as ring:
        graph = captured({}, {}, sides=sides, ring=ring)
        good = rows((1, 2, 30))
        for _ in range(3):
            ring.push(torch.cat([rows((990, 100, 11)), good]))
            ring.push(rows((50, 60, 70)))
            graph.replay()
            torch.cuda.synchronize()
            text = "^unpack: src: bytes up to 1001 in descriptor 0 of slot 0, expected at most 1000"
            with pytest.raises(IndexError, match=text):
                jitkern.check()
            sides.expect(good)
            sides.expect(rows((50, 60, 70)))
            assert sides.are_right()
            assert ring.done(ring.num_pushed - 1)
