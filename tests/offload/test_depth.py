"""DepthController against a simulated GPU and link."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from jitkern.offload.depth import DepthController, Iteration

Load = Callable[[random.Random, int], tuple[float, float, float]]
"""Milliseconds of load, compute and store of an iteration."""

LEAST, MOST = 2, 16


class Simulated:
    """A simulated pipeline whose slots are added and removed between iterations."""

    def __init__(self, depth: int, controller: DepthController | None = None) -> None:
        self.controller = controller
        self.freed = deque([0.0] * depth)
        self.loaded = self.computed = self.stored = 0.0
        self.depths: list[int] = []
        self.num_iterations = 0

    def step(self, load_ms: float, compute_ms: float, store_ms: float) -> None:
        freed = self.freed.popleft()
        self.loaded = max(self.loaded, freed) + load_ms
        could_begin = max(self.computed, self.loaded)
        stall_ms = could_begin - self.computed if self.num_iterations else 0.0
        self.computed = could_begin + compute_ms
        self.stored = max(self.stored, self.computed) + store_ms if store_ms else self.computed
        self.freed.append(self.stored)
        follows = self.num_iterations > 0
        self.num_iterations += 1
        self.depths.append(len(self.freed))
        if self.controller is None:
            return
        iteration = Iteration(load_ms, compute_ms, store_ms, stall_ms, follows)
        self.controller.observe(iteration, self.num_iterations)
        while len(self.freed) < self.controller.depth:
            self.freed.appendleft(self.computed)  # a new slot is free at once
        while len(self.freed) > self.controller.depth:
            self.freed.popleft()

    @property
    def ms(self) -> float:
        return max(self.computed, self.stored)


def controlled() -> Simulated:
    return Simulated(LEAST, DepthController(LEAST, MOST))


def run(simulated: Simulated, load: Load, count: int, seed: int = 0, ahead: int = 0) -> float:
    rng = random.Random(seed)
    begin = simulated.ms
    for number in range(ahead + count):
        if number == ahead:
            begin = simulated.ms
        simulated.step(*load(rng, number))
    return simulated.ms - begin


def steady(load_ms: float, compute_ms: float, store_ms: float = 0.0) -> Load:
    return lambda rng, number: (load_ms, compute_ms, store_ms)


def bursty(every: int, long_ms: float, ms: float, compute_ms: float) -> Load:
    return lambda rng, number: (long_ms if number % every == every - 1 else ms, compute_ms, 0.0)


def jitter(low: float, high: float, compute_ms: float, chance: float) -> Load:
    return lambda rng, number: (high if rng.random() < chance else low, compute_ms, 0.0)


LOADS = {
    "compute-bound": steady(1.0, 3.0),
    "as long as each other": steady(2.0, 2.0),
    "transfer-bound": steady(5.0, 2.0),
    "both directions": steady(2.0, 2.5, 2.0),
    "both directions, transfer-bound": steady(4.0, 2.0, 4.0),
    "stores": lambda rng, number: (0.0, 3.0, 10.0 if number % 6 == 5 else 1.0),
    "bursts of 4": bursty(4, 7.0, 1.0, 3.0),
    "bursts of 8": bursty(8, 14.0, 1.0, 3.0),
    "jitter": jitter(1.0, 8.0, 4.0, 0.25),
    "rare jitter": jitter(1.0, 10.0, 3.0, 0.12),
    "jitter of bodies": lambda rng, number: (2.0, rng.choice((0.5, 1.0, 6.0)), 0.0),
    "jitter, transfer-bound": jitter(2.0, 12.0, 2.0, 0.3),
}


@pytest.mark.parametrize("name", LOADS)
def test_as_good_as_the_best_depth_after_20_iterations(name: str) -> None:
    simulated, arguments = controlled(), (LOADS[name], 400, 0, 20)
    controlled_ms = run(simulated, *arguments)
    best_ms = min(run(Simulated(depth), *arguments) for depth in range(1, MOST + 1))
    assert controlled_ms <= 1.05 * best_ms, simulated.depths


@pytest.mark.parametrize("name", LOADS)
def test_it_settles(name: str) -> None:
    """Few changes in thousands of iterations, and fewer as time passes."""
    simulated = controlled()
    run(simulated, LOADS[name], 3000)
    depths = simulated.depths

    def changes(begin: int, end: int) -> int:
        return sum(depths[i] != depths[i - 1] for i in range(begin + 1, end))

    assert changes(0, 1000) <= 8, depths
    assert changes(1500, 3000) <= 3
