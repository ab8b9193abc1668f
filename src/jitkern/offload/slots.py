"""The slots of a ``SlotPipeline``: which there are, and which are free."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from jitkern.offload.streams import LOAD, STORE, Streams

if TYPE_CHECKING:
    import torch


class Slot:
    """A slot with the block that is in it, until the run goes on to the next one.

    Attributes
    ----------
    tensor : torch.Tensor
        Of the pipeline's shape and dtype, on its device.
    block : object
        What the iterable of blocks gave.
    index : int
        Of the slot, from 0 on.
    """

    __slots__ = ("_load_on", "_store_on", "block", "index", "tensor")

    def __init__(self, number: int, tensor: torch.Tensor, streams: Streams) -> None:
        self.index: int = number
        self.tensor: torch.Tensor = tensor
        self.block: Any = None
        self._load_on = streams.setter(LOAD, number)
        self._store_on = streams.setter(STORE, number)

    def __repr__(self) -> str:
        return f"Slot({self.index}, block={self.block!r})"


class SlotSet:
    """Slots of one shape, each a tensor of its own, so that their number may change in a run.

    Attributes
    ----------
    free : collections.deque of Slot
        The one that was used longest ago first.
    slot_bytes : int
        Of one.
    wanted : int
        How many there are to be.
    """

    def __init__(
        self,
        streams: Streams,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        depth: int,
    ) -> None:
        self._streams = streams
        self.shape: tuple[int, ...] = shape
        self.dtype: torch.dtype = dtype
        self.device: torch.device = device
        self.slot_bytes: int = math.prod(shape) * dtype.itemsize
        self.free: deque[Slot] = deque()
        self._all: list[Slot] = []
        self.wanted: int = depth
        self.resize(depth)

    def __len__(self) -> int:
        return len(self._all)

    def put_back(self, slot: Slot) -> None:
        """Make a slot free, or let it go where there are more than are wanted."""
        slot.block = None
        if len(self._all) <= self.wanted:
            self.free.append(slot)
        else:
            self._all.remove(slot)

    def take_back(self) -> None:
        """Make all free at the end of a run, wherever that was cut short."""
        every = list(dict.fromkeys([*self.free, *self._all]))
        for slot in every:
            slot.block = None
        self._all = every[: self.wanted]
        self.free = deque(self._all)

    def resize(self, depth: int) -> bool:
        """Have so many slots, as soon as those that are too many are free.

        Returns
        -------
        bool
            False where there is no memory for more than there are; at first it is raised.
        """
        import torch

        self.wanted = depth
        is_first = not self._all
        try:
            while len(self._all) < depth:
                self._add()
        except torch.OutOfMemoryError:
            if is_first:
                raise
            self.wanted = len(self._all)
        for _ in range(len(self.free)):
            self.put_back(self.free.popleft())
        return self.wanted == depth

    def clear(self) -> None:
        """Let all go."""
        self._all.clear()
        self.free.clear()

    def _add(self) -> None:
        used = {slot.index for slot in self._all}
        number = next(number for number in range(len(used) + 1) if number not in used)
        tensor = self._streams.add_slot(number, self.shape, self.dtype, self.device)
        slot = Slot(number, tensor, self._streams)
        self._all.append(slot)
        self.free.append(slot)
