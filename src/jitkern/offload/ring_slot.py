"""A slot of a ``DescriptorRing`` that is written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jitkern.offload.args import count_arg

if TYPE_CHECKING:
    import torch


class RingSlot:
    """A slot of a :class:`DescriptorRing` that is written in place.

    The fields are views of the slot, ``[num_descriptors]`` each. They begin as those of rows that
    are empty: all 0, and ``count`` 1. As the body of ``with`` ends the slot is pushed, unless it
    raises; a slot that is dropped is cancelled. Nothing is checked here: what is out of range, the
    consumer refuses. Views must not be written behind either.

    Attributes
    ----------
    index : int
        Of the slot, from 0 on.
    ticket : int
        The push's number.
    """

    __slots__ = ("_bytes", "_finish", "index", "ticket")

    def __init__(
        self,
        index: int,
        ticket: int,
        bytes_: torch.Tensor,
        finish: Callable[[int | None], int],
    ) -> None:
        self.index: int = index
        self.ticket: int = ticket
        self._bytes: torch.Tensor | None = bytes_  # a row for each descriptor
        self._finish = finish

    @property
    def src_off(self) -> torch.Tensor:
        """Where the first row begins in the source, in bytes: int64."""
        return self._int64(0)

    @property
    def dst_off(self) -> torch.Tensor:
        """Where the first row begins in the destination: int64."""
        return self._int64(1)

    @property
    def len(self) -> torch.Tensor:
        """Bytes of a row: uint32."""
        return self._uint32(4)

    @property
    def count(self) -> torch.Tensor:
        """How many rows: uint32."""
        return self._uint32(5)

    @property
    def src_stride(self) -> torch.Tensor:
        """From one row to the next in the source, in bytes: int64."""
        return self._int64(4)

    @property
    def dst_stride(self) -> torch.Tensor:
        """The same in the destination: int64."""
        return self._int64(5)

    def publish(self, num_descriptors: int | None = None) -> int:
        """Push the slot, or its first descriptors alone; return the ticket."""
        call = "RingSlot.publish"
        count = len(self._open(call))
        if num_descriptors is not None:
            count = count_arg(call, "num_descriptors", num_descriptors, count)
        ticket = self._finish(count)
        self._bytes = None  # not in front: interrupted in between it is cancelled, not lost
        return ticket

    def cancel(self) -> None:
        """Push nothing: the slot is the next push's."""
        self._open("RingSlot.cancel")
        self._finish(None)
        self._bytes = None

    def __enter__(self) -> RingSlot:
        self._open("RingSlot")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bytes is None:
            return
        try:
            if kind is None:
                self.publish()
        finally:
            if self._bytes is not None:
                self.cancel()

    def __repr__(self) -> str:
        state = "pushed or cancelled" if self._bytes is None else "being written"
        return f"RingSlot({self.index}, ticket {self.ticket}, {state})"

    def _open(self, call: str) -> torch.Tensor:
        if self._bytes is None:
            raise RuntimeError(f"{call}: the slot was pushed or cancelled; reserve another one")
        return self._bytes

    def _int64(self, column: int) -> torch.Tensor:
        import torch

        return self._open("RingSlot").view(torch.int64)[:, column]

    def _uint32(self, column: int) -> torch.Tensor:
        import torch

        return self._open("RingSlot").view(torch.uint32)[:, column]
