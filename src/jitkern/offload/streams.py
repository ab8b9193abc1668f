"""The streams of a ``SlotPipeline``, and the C++ that orders them (csrc/offload/slots.cc)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host

if TYPE_CHECKING:
    import torch

# Accesses of a slot, as in csrc/offload/slots.h.
NONE, LOAD, COMPUTE, STORE = -1, 0, 1, 2

_NUM_POOLED = 32  # streams of a priority that torch hands out in turn


class Streams:
    """One stream for compute and some for each direction; on the CPU none, but times all the same.

    ``next(access, slot)`` ends the access that is open and begins one. ``start(access)`` begins a
    run whose iterations end with this access. ``fork()`` has later transfers wait for the compute
    stream. ``harvest`` reads times: see csrc/offload/slots.h.

    One iteration in `every` is timed; the times of `capacity` may wait to be read, 0: none.
    """

    compute: Any = None
    loads: Sequence[Any] = ()
    stores: Sequence[Any] = ()
    _caller: tuple[Any, int, int] | None = None  # in a session: stream, device and thread

    def __init__(self, device: torch.device, num_streams: int, capacity: int, every: int) -> None:
        import torch

        self._ordinal: int | None = device.index
        self._set_stream: Any = torch.cuda.set_stream
        if device.type == "cpu":
            self._connect(-1, 0, [0] * num_streams, [0] * num_streams, capacity, every)
            return
        taken: set[int] = set()
        self.compute = _stream(device, 0, taken)
        # Where SMs copy, before the compute's kernels; the copy engines do not care.
        self.loads = [_stream(device, -1, taken) for _ in range(num_streams)]
        self.stores = [_stream(device, -1, taken) for _ in range(num_streams)]
        loads, stores = ([one.cuda_stream for one in lane] for lane in (self.loads, self.stores))
        self._connect(device.index, self.compute.cuda_stream, loads, stores, capacity, every)

    def _connect(self, *how: object) -> None:
        made: Any = host.module()["make_slot_streams"](*how)
        self.next: Any = made[0]
        self._enter, self.start, self.fork = made[1], made[2], made[3]
        self._leave, self._add_slot, self.harvest = made[4], made[5], made[6]

    def enter(self) -> bool:
        """Begin a session after the caller's work; tell whether that is being captured."""
        import torch

        if self.compute is None:
            return bool(self._enter(0))
        caller = torch.cuda.current_stream(self._ordinal)
        self._caller = (caller, torch.cuda.current_device(), threading.get_ident())
        is_captured = bool(self._enter(caller.cuda_stream))
        torch.cuda.set_stream(self.compute)
        return is_captured

    def leave(self) -> None:
        """End the session: the caller's stream waits for it. Again: do nothing."""
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
        """Tell whether the compute stream is torch's current one, as it is in a session."""
        import torch

        return self.compute is None or torch.cuda.current_stream(self._ordinal) == self.compute

    def use(self, access: int, slot: int) -> None:
        """Make the stream of an access torch's current one."""
        if access == COMPUTE:
            stream = self.compute
        else:
            lanes = self.loads if access == LOAD else self.stores
            stream = lanes[slot % len(lanes)] if lanes else None
        self._set_stream(stream)  # None: does nothing

    def add_slot(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory of a new slot, whose content is undefined."""
        import torch

        # In inference mode it could not be written outside of that.
        with torch.inference_mode(False), torch.cuda.stream(self.compute):
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self._add_slot(index)
        # The memory of a slot that is dropped is reused only after all are done with it.
        for stream in (*self.loads, *self.stores):
            tensor.record_stream(stream)
        return tensor


def _stream(device: torch.device, priority: int, taken: set[int]) -> Any:
    """Return a stream that is none of those taken: torch hands out the same ones in turn."""
    import torch

    for _ in range(_NUM_POOLED + 1):
        stream: Any = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in taken:
            break
    taken.add(stream.cuda_stream)
    return stream
