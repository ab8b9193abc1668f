"""``RingServer``: a kernel that consumes a ``DescriptorRing`` as long as it runs."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jitkern.host import module as host
from jitkern.ops import dispatch

if TYPE_CHECKING:
    from jitkern.offload.ring import DescriptorRing

CALL = "DescriptorRing.serve"
# By device: a second server would take more SMs from the model's kernels.
_servers: dict[int, weakref.ref[RingServer]] = {}


class RingServer:
    """A kernel that waits for pushes of a ring and copies what they ask for: see ``serve``.

    It begins with the ``with`` body, after all work on the current stream; later work there comes
    after its copies. It ends with the body, or if no push comes for the idle timeout.
    """

    def __init__(self, ring: DescriptorRing, launch: Callable[..., None], dst: Tensor) -> None:
        self._ring: DescriptorRing | None = ring
        self._launch, self._dst, self._device = launch, dst, ring.device
        self._stop = _pinned_zero()
        self._stream: Any = _stream_of(ring.device)
        self._ended: Any = None  # an event after the kernel
        self._tell: Callable[[], object] = partial(_tell, self._stop, os.getpid())
        weakref.finalize(self, self._tell).atexit = False  # too late: see _stop_all

    @property
    def is_running(self) -> bool:
        """Whether the kernel has been queued and has not ended."""
        return self._ended is not None and not self._ended.query()

    def stop(self) -> None:
        """End the kernel and wait for that; it completes the push that it has begun with."""
        if self._ended is not None:
            self._tell()
            self._ended.synchronize()
            dispatch.wrote(self._dst)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._ring is not None and self._ring._server is self:
            self._ring._server = None
        self._ring = None

    def __enter__(self) -> RingServer:
        ring = self._ring
        if ring is None:
            raise RuntimeError(f"{CALL}: the server has ended; make another one")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{CALL}: a graph is being captured; serve outside of it")
        other = _servers.get(self._device.index, lambda: None)()
        if other is not None and other.is_running:
            raise RuntimeError(f"{CALL}: {self._device} has a server; end that one first")
        ring._next()  # raises once it is closed
        # atexit calls the last one first: before pools, which wait for the device.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        _servers[self._device.index] = weakref.ref(self)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._launch(self._stop.data_ptr(), self._stream.cuda_stream)
        self._ended = self._stream.record_event()
        ring._server = self  # which close() ends
        dispatch.wrote(self._dst)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop_all() -> None:
    for known in _servers.values():
        if (server := known()) is not None:
            server._tell()


def _tell(stop: Tensor, pid: int) -> None:
    """Have a kernel end; a forked child has no part of it, nor of the memory."""
    if os.getpid() == pid:
        stop.fill_(1)


def _pinned_zero() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


@cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream of a device's servers: torch would hand out its own to others, too."""
    made = host.module()["make_ring_stream"](device.index)
    return torch.cuda.ExternalStream(made, device=device)  # type: ignore[no-untyped-call]
