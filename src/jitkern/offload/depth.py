"""How many slots a pipeline should have, decided from the times of its last iterations.

From the times of copies and bodies follows how long the same iterations would take with any number
of slots. So the depth is computed and not tried, and no slots are added if no depth helps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_HISTORY = 128  # the last iterations, which a decision is based on
_EVERY = 8  # iterations between two decisions
_GAIN = 0.03  # the share of the time that more slots must save
_LOSS = 0.01  # the share of the time that fewer slots may cost


class Iteration(NamedTuple):
    """The times of an iteration, in milliseconds."""

    load_ms: float  # how much longer the load kept the link busy
    compute_ms: float  # from when the body could begin
    store_ms: float
    stall_ms: float  # the wait of the compute stream for a copy
    follows: bool  # False: the host waited for the iterations before
    body_ms: float = 0.0  # from when the body began


def total_ms(iterations: Sequence[Iteration], depth: int) -> float:
    """Return how long the iterations would take with `depth` slots."""
    loaded = computed = stored = 0.0
    freed = deque([0.0] * depth)
    for load_ms, compute_ms, store_ms, _, follows, _ in iterations:
        if not follows:
            loaded = computed = stored = max(computed, stored)
            freed = deque([stored] * depth)
        loaded = max(loaded, freed.popleft()) + load_ms
        computed = max(computed, loaded) + compute_ms
        stored = max(stored, computed) + store_ms if store_ms else computed
        freed.append(stored)
    return max(computed, stored)


class DepthController:
    """Chooses `depth` between `least`, the initial depth, and `most`."""

    def __init__(self, least: int, most: int) -> None:
        self.depth: int = least
        self._least, self._most = least, most
        self._history: deque[Iteration] = deque(maxlen=_HISTORY)
        self._count = 0
        self._next_count = 0  # no decision before the added slots are in use
        self._keep = _HISTORY  # how long added slots are kept: longer each time
        self._keep_until = 0

    def refuse(self, depth: int) -> None:
        """Choose at most `depth` from now on."""
        self.depth = self._most = max(depth, self._least)

    def observe(self, iteration: Iteration, num_queued: int) -> None:
        """Add the times of a completed iteration.

        `num_queued` iterations have been queued so far; they do not have slots that are added now.
        """
        self._history.append(iteration)
        self._count += 1
        if self._count % _EVERY == 0 and self._count >= self._next_count:
            self._decide(num_queued)

    def _decide(self, num_queued: int) -> None:
        """Choose the smallest depth that is almost as fast as the best one."""
        iterations = list(self._history)
        best_ms = total_ms(iterations, self._most)
        enough = self._least + bisect_left(
            range(self._least, self._most),
            True,
            key=lambda depth: total_ms(iterations, depth) <= (1 + _LOSS) * best_ms,
        )
        if enough > self.depth:
            if total_ms(iterations, self.depth) <= (1 + _GAIN) * best_ms:
                return
            if len(iterations) < _HISTORY:
                enough *= 2  # few iterations do not show the worst case
            self.depth = min(enough, self._most)
            self._next_count = num_queued + 2 * _EVERY + self.depth
            self._keep_until = self._count + self._keep
            self._keep = min(4 * self._keep, 32 * _HISTORY)
        elif self._count >= self._keep_until:
            self.depth = enough
