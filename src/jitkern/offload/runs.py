"""A run of a ``SlotPipeline``: what is queued in which order, and how it ends."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jitkern.offload.ranges import Ranges
from jitkern.offload.session import Session, Turn
from jitkern.offload.slots import Slot, SlotSet
from jitkern.offload.streams import COMPUTE, LOAD, NONE, STORE, Streams

if TYPE_CHECKING:
    import torch

Copy = Callable[["torch.Tensor", Any], object]
"""Queues the copy between a slot's tensor and a block on torch's current stream."""

Slots = Generator[Slot, None, None]
_END = object()


class Countdown:
    """Every so many iterations, whichever runs they are of; of 0 never."""

    __slots__ = ("every", "left")

    def __init__(self, every: int) -> None:
        self.every: int = every
        self.left: int = every


class Run:
    """The slots of one run, in the order of the blocks; what the methods of a pipeline return.

    The run begins with the first slot that is asked for. Under ``with``, it ends with the block at
    the latest, whoever still holds the iterator.
    """

    def __init__(self, start: Callable[[Turn], Slots]) -> None:
        self._start = start
        self._turn = Turn()

    def __iter__(self) -> Iterator[Slot]:
        self._turn = Turn()
        slots = self._start(self._turn)
        self._turn.slots = weakref.ref(slots)
        return slots

    def close(self) -> None:
        """End the run, if it goes on."""
        self._turn.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def go_over(
    turn: Turn,
    session: Session,
    streams: Streams,
    slots: SlotSet,
    blocks: Iterable[Any],
    load: Copy | None,
    store: Copy | None,
    countdown: Callable[[], tuple[Countdown, Callable[[], None]]],
    ranges: Ranges | None,
) -> Slots:
    """Go over the blocks; what is queued on a GPU is queued in this order.

    The compute stream is the current one but for the time of a copy.

    Parameters
    ----------
    countdown
        Returns, once the session has begun, what is called every how many iterations.
    """
    coming: Iterator[Any] | None = iter(blocks)
    # An iterator may take its time: the compute before it is then ended at once.
    takes_time = not isinstance(blocks, list | tuple | range)
    ahead = deque[Slot]()
    failed: Exception | None = None
    is_copying = False
    begin = streams.next  # which also ends what was begun before
    compute_on = streams.setter(COMPUTE, 0)
    final_access = COMPUTE if store is None else STORE
    if ranges is not None:
        load, store = ranges.around("load", load), ranges.around("store", store)
    # A signal's handler may raise anywhere from here on.
    try:
        session.begin_run(turn, final_access)
        counted, act = countdown()
        free = slots.free
        while True:
            while free and coming is not None:
                # An error is raised once the blocks before it had their turn, as it would be
                # if each was loaded just before its body.
                try:
                    block = next(coming, _END)
                    if block is _END:
                        coming = None
                        break
                    slot = free.popleft()
                    slot.block = block
                    if load is not None:
                        begin(LOAD, slot.index)
                        is_copying = True
                        slot._load_on()
                        load(slot.tensor, block)
                        compute_on()
                        is_copying = False
                except Exception as error:
                    if is_copying:
                        compute_on()
                    failed, coming, is_copying = error, None, False
                    break
                ahead.append(slot)
                if load is None:
                    break
            if not ahead:
                break
            slot = ahead.popleft()
            begin(COMPUTE, slot.index)
            if ranges is None:
                yield slot
            else:
                with ranges.range("compute"):
                    yield slot
            if store is not None:
                begin(STORE, slot.index)
                is_copying = True
                slot._store_on()
                store(slot.tensor, slot.block)
                compute_on()
                is_copying = False
            elif takes_time:
                begin(NONE, 0)
            slots.put_back(slot)
            if counted.left == 1:
                counted.left = counted.every
                act()
            else:
                counted.left -= 1
        if failed is not None:
            raise failed
    finally:
        failed = None  # its traceback holds this frame
        try:
            if is_copying:  # under `with` the caller goes on, on the compute stream
                compute_on()
            session.end_run(turn)
        finally:
            session.end_run(turn)  # again, where that was cut short
