"""How many slots a pipeline should have: a state machine that is fed with iterations.

How long the copies and bodies of the last iterations took says what any number of slots would have
made of them: their recurrence is gone through for depths between those that are allowed. So the
right depth is found in one step and not by trying, and none is taken where no depth helps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jitkern.offload.args import count_arg, number_arg

_HISTORY = 64  # iterations that a decision is made of, at most
_GAIN = 0.03  # of time that more slots have to save
_LOSS = 0.01  # that fewer slots may cost
_STALLED = 0.05  # of its time that an iteration has to wait to count as stalled
_MAX_BACKOFF = 4096
_GIVE_BACK_AFTER = 64  # iterations


@dataclass(frozen=True)
class AutoDepth:
    """Lets a ``SlotPipeline`` take slots more where they save time, and give them back.

    `num_slots` of the pipeline is the least. At least one of the limits is needed.

    Attributes
    ----------
    max_slots, max_bytes : int, optional
        Most slots, and most bytes of all slots.
    stall_share : float
        More slots are thought of where a larger part of iterations than this waits for copies.
    patience : int
        Iterations before the first decision, and at least between two.
    """

    max_slots: int | None = None
    max_bytes: int | None = None
    stall_share: float = 0.1
    patience: int = 8

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_bytes", "patience"):
            if getattr(self, name) is not None or name == "patience":
                count_arg("AutoDepth", name, getattr(self, name))
        number_arg("AutoDepth", "stall_share", self.stall_share, 1.0)
        if self.max_slots is None and self.max_bytes is None:
            raise ValueError("AutoDepth: max_slots: None, expected it or max_bytes")

    def most(self, num_slots: int, slot_bytes: int) -> int:
        """Return the most slots of a pipeline; ValueError unless it may have those it begins with.

        Parameters
        ----------
        num_slots, slot_bytes : int
            Slots that it begins with, and bytes of each.
        """
        limits = []
        if self.max_slots is not None:
            limits.append(self.max_slots)
        if self.max_bytes is not None:
            limits.append(self.max_bytes // slot_bytes)
        if min(limits) < num_slots:
            text = f"at most {min(limits)} slots of {slot_bytes} bytes"
            raise ValueError(f"SlotPipeline: auto_depth: {text}, expected at least {num_slots}")
        return min(limits)


class Iteration(NamedTuple):
    """Milliseconds of one; `follows` is false where those before it were waited for."""

    load_ms: float
    compute_ms: float
    store_ms: float
    stall_ms: float
    follows: bool


def total_ms(iterations: Sequence[Iteration], depth: int) -> float:
    """Return what iterations would take with so many slots.

    A load waits for the load before it and for its slot, a compute for its load and the compute
    before it, a store for its compute and the store before it.
    """
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
    """Decides on a depth; `depth` is what it is to be now.

    Parameters
    ----------
    config : AutoDepth
    least, most : int
        Depths between which it decides; it begins with the least.
    """

    def __init__(self, config: AutoDepth, least: int, most: int) -> None:
        self.depth = self._least = least
        self._most = most
        self._config = config
        self._history: deque[Iteration] = deque(maxlen=_HISTORY)
        self._known: list[Iteration] = []  # what the last decision was made of
        self._count = 0  # iterations since the load changed
        self._next = self._wait = config.patience  # when it is thought of more slots
        self._give_back_at = self._give_back_wait = _GIVE_BACK_AFTER
        self._trial: tuple[int, int, float, float] | None = None
        self._was_in_vain = False

    def refuse(self, depth: int) -> None:
        """No more than these can be had."""
        self.depth, self._most = depth, max(depth, self._least)
        self._trial = None

    def observe(
        self, load_ms: float, compute_ms: float, store_ms: float, stall_ms: float, follows: bool
    ) -> None:
        """Take the times of one more iteration that is over.

        Parameters
        ----------
        load_ms, store_ms : float
            By which its copies kept the link busy, 0 for none.
        compute_ms : float
            From when its body could have begun to its end.
        stall_ms : float
            That its body waited for a copy.
        follows : bool
            Whether the iteration before it was still under way.
        """
        self._history.append(Iteration(load_ms, compute_ms, store_ms, stall_ms, follows))
        self._count += 1
        if self._count % self._config.patience == 0:
            self._decide()

    def _decide(self) -> None:
        if self._has_changed():
            self._begin_again()
        if self._trial is not None:
            self._judge()
        elif self._count >= self._next and self.depth < self._most and not self._was_in_vain:
            self._think_of_more()
        if self._count >= self._give_back_at and self.depth > self._least and self._trial is None:
            self._think_of_less()

    def _has_changed(self) -> bool:
        """Tell whether the last iterations are others than those that were decided on."""
        size = 2 * self._config.patience
        if len(self._known) < self._config.patience or len(self._history) < size:
            return False
        recent = list(self._history)[-size:]
        for what in (_transfer_ms, _compute_ms):
            before, now = [what(one) for one in self._known], [what(one) for one in recent]
            if _differ(before, now):
                return True
        return False

    def _begin_again(self) -> None:
        recent = list(self._history)[-self._config.patience :]
        self._history = deque(recent, maxlen=_HISTORY)
        self._known = []
        self._count = len(recent)
        self._next = self._wait = self._config.patience
        self._give_back_at = self._give_back_wait = _GIVE_BACK_AFTER
        self._trial, self._was_in_vain = None, False

    def _think_of_more(self) -> None:
        """Take as many slots as save time, if a part of the iterations waits."""
        recent = list(self._history)[-2 * self._config.patience :]
        stalled = [one.stall_ms > _STALLED * (one.compute_ms + one.stall_ms) for one in recent]
        self._known = list(self._history)
        if sum(stalled) <= self._config.stall_share * len(stalled):
            self._next = self._count + self._config.patience
            return
        now_ms, best_ms = (total_ms(self._history, depth) for depth in (self.depth, self._most))
        self._wait = min(2 * self._wait, _MAX_BACKOFF)
        self._next = self._count + self._wait
        if now_ms <= (1 + _GAIN) * best_ms:
            return  # no depth helps
        wanted = self._smallest(self.depth + 1, self._most, (1 + _LOSS) * best_ms)
        saved = 1 - total_ms(self._history, wanted) / now_ms
        judged_at = self._count + 2 * self._config.patience + wanted
        self._trial = (judged_at, self.depth, saved, _mean_ms(recent))
        self.depth = wanted
        self._next = self._count + self._config.patience
        self._give_back_at = self._count + self._give_back_wait

    def _judge(self) -> None:
        """Give slots back that made no difference, though they should have."""
        assert_at, before, saved, before_ms = self._trial or (0, 0, 0.0, 0.0)
        if self._count < assert_at:
            return
        self._trial = None
        recent = list(self._history)[-2 * self._config.patience :]
        if before_ms - _mean_ms(recent) < saved / 4 * before_ms:
            self.depth, self._was_in_vain = before, True
            self._known = list(self._history)

    def _think_of_less(self) -> None:
        """Give back what makes no difference; less often each time that it did."""
        now_ms = total_ms(self._history, self.depth)
        wanted = self._smallest(self._least, self.depth, (1 + _LOSS) * now_ms)
        self._give_back_wait = min(2 * self._give_back_wait, _MAX_BACKOFF)
        self._give_back_at = self._count + self._give_back_wait
        self._known = list(self._history)
        self.depth = wanted

    def _smallest(self, low: int, high: int, most_ms: float) -> int:
        """Return the smallest depth that takes at most so long; `high` does."""
        while low < high:
            middle = (low + high) // 2
            if total_ms(self._history, middle) <= most_ms:
                high = middle
            else:
                low = middle + 1
        return high


def _transfer_ms(one: Iteration) -> float:
    return one.load_ms + one.store_ms


def _compute_ms(one: Iteration) -> float:
    return one.compute_ms


def _mean_ms(iterations: Sequence[Iteration]) -> float:
    return statistics.fmean(one.compute_ms + one.stall_ms for one in iterations)


def _differ(before: Sequence[float], now: Sequence[float]) -> bool:
    """Tell whether means differ by a fifth, and by more than chance: three standard errors."""
    first, second = statistics.fmean(before), statistics.fmean(now)
    error = math.sqrt(
        statistics.pvariance(before) / len(before) + statistics.pvariance(now) / len(now)
    )
    return abs(first - second) > max(0.2 * max(first, second), 3 * error)
