"""How many slots a pipeline should have, decided from the times of its last iterations.

The times of copies and bodies tell how long these iterations would have taken with any number of
slots. So the right depth is computed and not tried, and none is taken if no depth helps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_HISTORY = 128  # last iterations that decide on giving slots back; half of them on taking some
_RECENT = 16  # iterations in which stalls are counted
_GAIN = 0.03  # of time that more slots have to save
_LOSS = 0.01  # that fewer slots may cost
_STALLED = 0.05  # of its time that an iteration has to wait to count as stalled
_STALL_SHARE = 0.1  # of iterations that have to stall
_PATIENCE = 8  # iterations before the first decision, and at least between two
_THINK_EVERY = 64  # iterations: most between decisions to take slots, least to give some back
_MAX_WAIT = 4096


class Iteration(NamedTuple):
    """Times of an iteration, in milliseconds."""

    load_ms: float  # by which it kept the link busy longer
    compute_ms: float  # from when the body could begin
    store_ms: float
    stall_ms: float  # in which it waited for a copy
    follows: bool  # false: the iterations before it were waited for

    def is_stalled(self) -> bool:
        """Tell whether it waited for a notable part of its time."""
        return self.stall_ms > _STALLED * (self.compute_ms + self.stall_ms)


def total_ms(iterations: Sequence[Iteration], depth: int) -> float:
    """Return how long iterations would take with so many slots."""
    loaded = computed = stored = 0.0
    freed = deque([0.0] * depth)
    for load_ms, compute_ms, store_ms, _, follows in iterations:
        if not follows:
            loaded = computed = stored = max(computed, stored)
            freed = deque([stored] * depth)
        loaded = max(loaded, freed.popleft()) + load_ms
        computed = max(computed, loaded) + compute_ms
        stored = max(stored, computed) + store_ms if store_ms else computed
        freed.append(stored)
    return max(computed, stored)


class DepthController:
    """Decides on a depth from `least`, with which it begins, to `most`; `depth` is the decision."""

    def __init__(self, least: int, most: int) -> None:
        self.depth: int = least
        self._least, self._most = least, most
        self._history: deque[Iteration] = deque(maxlen=_HISTORY)
        self._count = 0
        self._more_at = self._more_wait = _PATIENCE
        self._less_at = self._less_wait = _THINK_EVERY
        self._judged_at = 0  # when to look whether the last slots helped; 0: it is known
        self._before = least  # the depth without them
        self._gave_back = self._is_in_vain = False

    def refuse(self, depth: int) -> None:
        """Decide on no more than `depth` from now on."""
        self.depth = self._most = max(depth, self._least)
        self._judged_at = 0

    def observe(self, iteration: Iteration) -> None:
        """Take the times of one more iteration that is over."""
        self._history.append(iteration)
        self._count += 1
        if self._count % _PATIENCE != 0:
            return
        if self._judged_at:
            if self._count >= self._judged_at:
                self._judge()
        elif self._count >= self._more_at and self.depth < self._most and not self._is_in_vain:
            self._think_of_more()
        if not self._judged_at and self._count >= self._less_at and self.depth > self._least:
            self._think_of_less()

    def _last(self, count: int) -> list[Iteration]:
        return list(self._history)[-count:]

    def _think_of_more(self) -> None:
        """Take slots if that saves time and enough iterations wait."""
        recent = self._last(_RECENT)
        if sum(one.is_stalled() for one in recent) <= _STALL_SHARE * len(recent):
            self._more_at = self._count + _PATIENCE
            return
        known = self._last(_HISTORY // 2)
        now_ms, best_ms = (total_ms(known, depth) for depth in (self.depth, self._most))
        self._more_wait = min(2 * self._more_wait, _THINK_EVERY)
        self._more_at = self._count + self._more_wait
        if now_ms <= (1 + _GAIN) * best_ms:
            return  # no depth helps
        if self._gave_back:
            self._less_wait = min(2 * self._less_wait, _MAX_WAIT)
            self._gave_back = False
        wanted = _smallest(known, self.depth + 1, self._most, (1 + _LOSS) * best_ms)
        if not _is_steady(known):
            wanted *= 2  # a few iterations have not shown the worst case
        self._before, self.depth = self.depth, min(wanted, self._most)
        self._judged_at = self._count + _RECENT + self.depth
        self._less_at = self._count + self._less_wait

    def _judge(self) -> None:
        """Give slots back if they save less than a quarter of what was computed."""
        recent = self._last(_RECENT)
        without_ms, with_ms = (total_ms(recent, depth) for depth in (self._before, self.depth))
        if without_ms <= (1 + _GAIN) * with_ms:
            self._judged_at = self._count + _RECENT  # these do not tell
            return
        took_ms = sum(one.compute_ms + one.stall_ms for one in recent)
        self._judged_at = 0
        if without_ms - took_ms < (without_ms - with_ms) / 4:
            self.depth, self._is_in_vain = self._before, True

    def _think_of_less(self) -> None:
        """Give back what makes no difference; less often if slots were wanted again."""
        known = list(self._history)
        most_ms = (1 + _LOSS) * total_ms(known, self.depth)
        enough = _smallest(known, self._least, self.depth, most_ms)
        self._less_at = self._count + self._less_wait
        if enough > self._least and not _is_steady(known):
            enough += (enough + 1) // 2
        if enough < self.depth:
            self.depth, self._gave_back = enough, True


def _is_steady(iterations: Sequence[Iteration]) -> bool:
    """Tell whether no copy and no body takes over 1.25 times their mean."""
    copies = [one.load_ms + one.store_ms for one in iterations]
    bodies = [one.compute_ms for one in iterations]
    return all(max(times) <= 1.25 * sum(times) / len(times) for times in (copies, bodies))


def _smallest(iterations: Sequence[Iteration], low: int, high: int, most_ms: float) -> int:
    """Return the smallest depth with which iterations take at most so long, at most `high`."""
    depths = range(low, high)
    return low + bisect_left(depths, True, key=lambda one: total_ms(iterations, one) <= most_ms)
