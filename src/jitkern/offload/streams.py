"""The streams of a ``SlotPipeline``, as torch knows them, and the C++ that orders them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host

if TYPE_CHECKING:
    import torch

# Accesses of a slot, as in csrc/offload/slots.h.
NONE, LOAD, COMPUTE, STORE = -1, 0, 1, 2

_NUM_POOLED = 32  # streams of a priority that torch hands out in turn


class Streams:
    """What orders the accesses of slots: on the CPU nothing runs beside anything else.

    Attributes
    ----------
    next : callable
        ``next(access, slot)`` ends the access that is open and begins one.
    start : callable
        ``start(access)`` begins a run, whose iterations end with this access.
    fork : callable
        Has later transfers wait for what the compute stream has been given.
    harvest : callable
        Reads times of iterations that are over; see ``SlotTimes`` there.

    Parameters
    ----------
    num_streams : int
        Of each direction.
    capacity, every : int
        Iterations whose times may wait to be read, 0 for none, and that one in so many is timed.
    """

    compute: Any = None
    loads: Sequence[Any] = ()
    stores: Sequence[Any] = ()

    def __init__(self, num_streams: int, capacity: int, every: int) -> None:
        self._connect(-1, 0, [0] * num_streams, [0] * num_streams, capacity, every)

    def _connect(self, *how: object) -> None:
        """Make the C++, given an ordinal, handles of streams, and what the times need."""
        made = host.module()["make_slot_streams"](*how)
        self.next: Any
        self.start: Any
        self.fork: Any
        self.harvest: Any
        self.next, self._enter, self.start, self.fork = made[0], made[1], made[2], made[3]
        self._leave, self._add_slot, self.harvest = made[4:7]

    def enter(self) -> bool:
        """Begin a session behind the caller's stream; tell whether that is being captured."""
        return bool(self._enter(0))

    def leave(self) -> None:
        """End the session: the caller's stream waits for it, and is torch's current one again.

        Again, or without `enter`: do nothing.
        """
        self._leave()

    def is_current(self) -> bool:
        """Tell whether the compute stream is torch's current one, as it is in a session."""
        return True

    def setter(self, access: int, slot: int) -> Callable[[], object]:
        """Return what makes the stream of an access torch's current one."""
        return _nothing

    def add_slot(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory of a new slot, whose content is undefined."""
        import torch

        with torch.inference_mode(False):  # or it could not be written outside of that
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self._add_slot(index)
        return tensor


def _nothing() -> None:
    pass


class CudaStreams(Streams):
    """Streams of one GPU: for compute, and a number of them for each direction."""

    _caller: tuple[Any, int, int] | None = None  # in a session: stream, device and thread

    def __init__(self, ordinal: int, num_streams: int, capacity: int, every: int) -> None:
        import torch

        taken: set[int] = set()
        self._ordinal = ordinal
        self.compute: Any = _stream(ordinal, 0, taken)
        # Before the compute's kernels where SMs copy; the copy engines do not care.
        self.loads: Sequence[Any] = [_stream(ordinal, -1, taken) for _ in range(num_streams)]
        self.stores: Sequence[Any] = [_stream(ordinal, -1, taken) for _ in range(num_streams)]
        # What torch.cuda.set_stream calls, without the three attributes that it reads each time.
        set_stream: Any = torch._C._cuda_setStream
        self._setters = {
            stream: partial(set_stream, stream.stream_id, stream.device_index, stream.device_type)
            for stream in (self.compute, *self.loads, *self.stores)
        }
        loads = [stream.cuda_stream for stream in self.loads]
        stores = [stream.cuda_stream for stream in self.stores]
        self._connect(ordinal, self.compute.cuda_stream, loads, stores, capacity, every)

    def enter(self) -> bool:
        import torch

        caller = torch.cuda.current_stream(self._ordinal)
        self._caller = (caller, torch.cuda.current_device(), threading.get_ident())
        is_captured = bool(self._enter(caller.cuda_stream))
        self._setters[self.compute]()
        return is_captured

    def leave(self) -> None:
        import torch

        if self._caller is None:
            return
        caller, device, thread = self._caller
        try:
            self._leave()
        finally:
            if thread == threading.get_ident():  # a run may be dropped in any thread
                torch.cuda.set_stream(caller)
                torch.cuda.set_device(device)
            self._caller = None

    def is_current(self) -> bool:
        import torch

        return bool(torch.cuda.current_stream(self._ordinal) == self.compute)

    def setter(self, access: int, slot: int) -> Callable[[], object]:
        streams = self.loads if access == LOAD else self.stores
        return self._setters[streams[slot % len(streams)] if access != COMPUTE else self.compute]

    def add_slot(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        import torch

        with torch.cuda.stream(self.compute):
            tensor = super().add_slot(index, shape, dtype, device)
        # Memory of a slot that is dropped is not given to others before all are done with it.
        for stream in (*self.loads, *self.stores):
            tensor.record_stream(stream)
        return tensor


def _stream(ordinal: int, priority: int, taken: set[int]) -> Any:
    """Return a stream that is none of those taken: torch hands out the same ones in turn."""
    import torch

    for _ in range(_NUM_POOLED + 1):
        stream: Any = torch.cuda.Stream(ordinal, priority=priority)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in taken:
            break
    taken.add(stream.cuda_stream)
    return stream
