"""``RingServer``: a kernel that consumes a ``DescriptorRing`` as long as it runs."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host
from jitkern.offload.args import count_arg, number_arg
from jitkern.offload.ring_call import require_writable
from jitkern.ops import dispatch

if TYPE_CHECKING:
    import torch

_CALL = "DescriptorRing.serve"

# By device: a second one would take more SMs from the kernels that compute.
_servers: dict[int, weakref.ref[RingServer]] = {}


class RingServer:
    """A kernel that waits for pushes of a ring and copies what they ask for: see ``serve``.

    It begins as the body of ``with`` does, behind what is on the current stream, and on a stream of
    its own. It ends with the body, however that ends, or by itself once no push has come for the
    idle timeout; what it leaves is not consumed until :func:`jitkern.unpack` or another server does
    so. What the caller queues on the current stream behind the body comes behind its copies.

    Examples
    --------
    >>> with ring.serve(dst, bounce) as server:  # doctest: +SKIP
    ...     ring.wait(ring.push(descriptors))
    ...     assert server.is_running
    """

    def __init__(
        self,
        run: Callable[[RingServer, Callable[[], None]], None],
        launch: Callable[..., None],
        sides: tuple[torch.Tensor, torch.Tensor],
        device: torch.device,
        num_sms: int,
        idle_timeout_s: float,
    ) -> None:
        self._dst, src = sides
        require_writable(_CALL, self._dst, src)
        self._run = run
        self._launch: Callable[..., None] = partial(launch, *sides)
        self._device = device
        self._num_sms = count_arg(_CALL, "num_sms", num_sms, _most_sms(device))
        self._idle_ns = int(1e9 * number_arg(_CALL, "idle_timeout_s", idle_timeout_s, 1e9))
        self._stop = _pinned_zero()
        self._stream: Any = _stream_of(device)
        self._ended: Any = None  # an event behind the kernel
        self._tell: Callable[[], object] = partial(_tell, self._stop, os.getpid())
        weakref.finalize(self, self._tell).atexit = False  # too late: see _stop_all

    @property
    def is_running(self) -> bool:
        """Whether the kernel has been queued and has not ended."""
        return self._ended is not None and not self._ended.query()

    def stop(self) -> None:
        """End the kernel and wait for that; of all pushes it completes what it has begun with."""
        import torch

        if self._ended is not None:
            self._tell()
            self._ended.synchronize()
            dispatch.wrote(self._dst)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._run = self._launch = _refuse_again  # and keep the ring no longer

    def __enter__(self) -> RingServer:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{_CALL}: a graph is being captured; serve outside of it")
        other = _servers.get(self._device.index, lambda: None)()
        if other is not None and other.is_running:
            raise RuntimeError(f"{_CALL}: {self._device} has a server; end that one first")
        self._run(self, self._begin)
        dispatch.wrote(self._dst)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin(self) -> None:
        import torch

        # The last that is registered is the first to be called: whatever else waits for the device
        # at exit, as pools do, comes behind it.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        _servers[self._device.index] = weakref.ref(self)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._launch(self._num_sms, self._idle_ns, self._stop.data_ptr(), self._stream.cuda_stream)
        self._ended = self._stream.record_event()


def _stop_all() -> None:
    for known in _servers.values():
        server = known()
        if server is not None:
            server._tell()


def _tell(stop: torch.Tensor, pid: int) -> None:
    """Have a kernel end; a forked child has no part of it, nor of the memory."""
    if os.getpid() == pid:
        stop.fill_(1)


def _pinned_zero() -> torch.Tensor:
    import torch

    return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


@cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream of a device's servers, for good.

    Those of ``torch.cuda.Stream`` are 32, handed out in turn: others would get the same, and what
    they queue there would wait until the server ends.
    """
    import torch

    made = host.module()["make_ring_stream"](device.index)
    return torch.cuda.ExternalStream(made, device=device)  # type: ignore[no-untyped-call]


def _refuse_again(*_: object) -> None:
    raise RuntimeError(f"{_CALL}: the server has ended; make another one")


def _most_sms(device: torch.device) -> int:
    import torch

    # A cluster that any GPU with clusters has.
    return 8 if torch.cuda.get_device_capability(device) >= (9, 0) else 1
