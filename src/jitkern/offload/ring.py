"""``DescriptorRing``: descriptors that a CPU thread writes to memory that kernels read."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from jitkern.args import device_arg, int_arg, number_arg
from jitkern.errors import name_unreadable
from jitkern.fs import make_memory
from jitkern.host import library as host
from jitkern.offload import memory
from jitkern.offload.memory import PinnedMemory
from jitkern.ops import dispatch
from jitkern.ops.unpack import set_ring_type

_MAX_SLOTS, _MAX_DESCRIPTORS = 65_536, 65_535  # as in both/ring.h
_MAX_TICKET = 2**63 - 1
_WAIT_S = 10.0  # the default timeouts
_SLICE_S = 0.05  # the longest wait in C++, between two of which Ctrl-C is handled

_PUSH = "DescriptorRing.push"
_SERVE = "DescriptorRing.serve"


class DescriptorRing(AbstractContextManager["DescriptorRing"]):
    """A ring of copy descriptors in pinned host memory: CPU threads push, ``unpack`` consumes.

    A descriptor names bytes of a source and their place in a destination. A push writes descriptors
    to memory that GPUs read in place, and publishes them by one store, without a copy or a driver
    call. Slots are used in turn; a slot is reused after its push has been consumed. Any thread may
    push. A C++ producer (``jitkern/both/ring.h``) may push instead of Python, but not at the same
    time.

    Parameters
    ----------
    num_slots : int, optional
        Maximum number of pushes in flight, up to 65,536.
    max_descriptors : int, optional
        Maximum number of descriptors per push, up to 65,535.
    device : torch.device, str or int, optional
        The device that consumes. Default: the current GPU, or the CPU if there is none.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.
    MemoryError, RuntimeError, UnsupportedError
        There is not enough free memory; CUDA cannot register it; there is no ``memfd_create``.
    """

    def __init__(
        self,
        num_slots: int = 16,
        max_descriptors: int = 2048,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        call, module = "DescriptorRing", host.module()
        self.max_descriptors: int = int_arg(
            call, "max_descriptors", max_descriptors, 1, _MAX_DESCRIPTORS
        )
        self.num_slots: int = int_arg(call, "num_slots", num_slots, 1, _MAX_SLOTS)
        self.device: torch.device = device_arg(call, "device", device)
        sizes = (self.num_slots, self.max_descriptors)
        num_bytes = module["ring_bytes"](*sizes)
        memory.require_free(num_bytes, f"{call}: num_slots, max_descriptors")
        # Memory with a file descriptor, which a producer in another process can map.
        self._fd = make_memory(call, "jitkern-ring", num_bytes)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._memory = PinnedMemory(num_bytes, self._fd)
        self._memory.register()
        self._bytes: Tensor = self._memory.tensor
        functions = module["make_ring"](self._bytes, *sizes)
        self._push, self._await_free, self._await_done, self._consume, self._next = functions
        if self.device.type == "cuda":
            state = _zeros_on(self.device, module["ring_state_bytes"](*sizes))
            self._consume, self._serve = module["ring_on_gpu"](self._bytes, state)
        self._server: RingServer | None = None
        self._closed = ""  # why the ring cannot be used
        _open.add(self)

    @property
    def num_pushed(self) -> int:
        """The number of pushes so far; also the ticket of the next push."""
        self._require_open()
        return int(self._next())

    @property
    def address(self) -> int:
        """The address of the memory, for ``RingProducer(void* base)`` in this process."""
        self._require_open()
        return self._bytes.data_ptr()

    def fileno(self) -> int:
        """Return the file descriptor of the memory, for a producer in another process."""
        self._require_open()
        return self._fd

    def push(self, descriptors: Any, *, timeout_s: float = _WAIT_S) -> int:
        """Push descriptors, and return the ticket of the push, counted from 0.

        Parameters
        ----------
        descriptors : Tensor or array
            int64 on the CPU, ``[n, 3]`` of (src_off, dst_off, len), or ``[n, 6]`` of (src_off,
            dst_off, len, count, src_stride, dst_stride): `count` rows of `len` bytes.
        timeout_s : float, default: 10
            Seconds to wait until the next slot is free.

        Raises
        ------
        TypeError, ValueError
            Wrong dtype or shape, too many descriptors, or a value that is negative or too large.
        TimeoutError
            The slot was not free in time.
        RuntimeError
            The ring is closed.
        """
        ticket = self.try_push(descriptors)
        if ticket is not None:
            return ticket
        deadline = time.monotonic() + number_arg(_PUSH, "timeout_s", timeout_s)
        while ticket is None:
            if not _await(self._await_free, deadline):
                pushed, count = self.num_pushed, self.num_slots
                raise TimeoutError(
                    f"{_PUSH}: slot {pushed % count} is still being read after {timeout_s:g} s: "
                    f"push {pushed - count} is not consumed; wait longer (timeout_s), consume "
                    f"sooner, or make a ring of more than {count} slots"
                )
            ticket = self.try_push(descriptors)
        return ticket

    def try_push(self, descriptors: Any) -> int | None:
        """Push like ``push`` if the next slot is free; else return None."""
        self._require_open()
        if type(descriptors) is not Tensor:
            try:
                # The device is explicit: torch's default device may be another one.
                descriptors = torch.as_tensor(descriptors, device="cpu")
            except (TypeError, ValueError, RuntimeError):
                text = f"{type(descriptors).__name__}, expected a tensor or an array of int64"
                raise TypeError(f"{_PUSH}: descriptors: {text}") from None
        try:
            ticket: int = self._push(descriptors)
        except RuntimeError as error:
            name_unreadable(error, _PUSH, descriptors=descriptors)
        return ticket if ticket >= 0 else None

    def is_done(self, ticket: int) -> bool:
        """Return whether the bytes of the push have been copied."""
        return self._is_done("DescriptorRing.is_done", ticket, 0)

    def wait(self, ticket: int, *, timeout_s: float = _WAIT_S) -> None:
        """Wait until the bytes of the push have been copied; TimeoutError after ``timeout_s``.

        During a long wait the thread mostly sleeps.
        """
        call = "DescriptorRing.wait"
        if self._is_done(call, ticket, 0):
            return
        deadline = time.monotonic() + number_arg(call, "timeout_s", timeout_s)
        if not _await(partial(self._is_done, call, ticket), deadline):
            text = f"push {ticket}, in slot {ticket % self.num_slots}, is not consumed"
            raise TimeoutError(f"{call}: {text} after {timeout_s:g} s; is a consumer running?")

    def serve(self, src: Tensor, dst: Tensor, *, idle_timeout_s: float = _WAIT_S) -> RingServer:
        """Return a server: during its ``with`` body, a running kernel consumes the pushes.

        For small pushes, for which a launch per call takes too long. The kernel occupies one SM.
        Until it ends, everything that synchronises the device blocks: ``torch.cuda.synchronize``,
        cudaMalloc and cudaFree, the first launch of a lazily loaded kernel, closing a pinned pool.
        One server per device; do not call ``unpack`` with its ring meanwhile.

        Parameters
        ----------
        src, dst : Tensor
            See ``unpack``.
        idle_timeout_s : float, default: 10
            The kernel ends if there is no push for so many seconds.
        """
        self._require_open()
        if self.device.type == "cpu":
            none = "" if torch.cuda.is_available() else ", and PyTorch sees none"
            raise ValueError(f"{_SERVE}: {self!r}, expected a ring of a GPU{none}")
        _require_writable(_SERVE, dst, src)
        idle_ns = int(1e9 * number_arg(_SERVE, "idle_timeout_s", idle_timeout_s, 1e9))
        return RingServer()._init(self, partial(self._serve, src, dst, idle_ns), dst)

    def close(self) -> None:
        """End the server, wait for the GPUs and free the memory; a second call does nothing."""
        if self._closed:
            return
        if self._server is not None:
            self._server.close()
        self._memory.close()
        self._closed = "the ring is closed; make another one"
        _open.discard(self)
        self._close_fd()

    def __enter__(self) -> DescriptorRing:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.num_pushed} pushed"
        slots = f"{self.num_slots} slots of {self.max_descriptors} descriptors"
        return f"DescriptorRing({slots} on {self.device}, {state})"

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"DescriptorRing: {self._closed}")

    def _unpack(self, src: Tensor, dst: Tensor, max_pushes: int) -> None:
        """Implement ``unpack`` of a ring."""
        self._require_open()
        if type(max_pushes) is not int or max_pushes != 1:
            max_pushes = int_arg("unpack", "max_pushes", max_pushes, 1, self.num_slots)
        _require_writable("unpack", dst, src)
        try:
            self._consume(src, dst, max_pushes)
        except (TypeError, ValueError):
            raise  # nothing was queued
        except Exception as error:
            # Earlier slots were copied; or the kernel is queued and the error is an earlier call's.
            dispatch.bump_versions((dst,))
            name_unreadable(error, "unpack", dst=dst, src=src)
        dispatch.bump_versions((dst,))

    def _is_done(self, call: str, ticket: int, most_us: int) -> bool:
        self._require_open()
        if type(ticket) is not int or not 0 <= ticket <= _MAX_TICKET:
            ticket = int_arg(call, "ticket", ticket, 0, _MAX_TICKET)
        state = self._await_done(ticket, most_us)
        if state < 0:
            pushed = self.num_pushed
            raise ValueError(f"{call}: ticket: {ticket}, expected below the {pushed} pushes so far")
        return bool(state)


set_ring_type(DescriptorRing)

_open: weakref.WeakSet[DescriptorRing] = weakref.WeakSet()


def _close_in_child() -> None:
    # The memory is shared, so the child would be a second producer.
    for ring in _open:
        ring._closed = "a forked child has no part of its parent's ring; make one"


os.register_at_fork(after_in_child=_close_in_child)


def _await(attempt: Callable[[int], bool], deadline: float) -> bool:
    """Repeat an attempt, which waits for the given microseconds; False after the deadline."""
    while True:
        left_s = deadline - time.monotonic()
        if attempt(max(0, int(1e6 * min(_SLICE_S, left_s)))):
            return True
        if left_s <= 0:
            return False


def _zeros_on(device: torch.device, num_bytes: int) -> Tensor:
    """Return zeros that are visible to all streams."""
    zeros = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return zeros


def _require_writable(call: str, dst: Tensor, src: Tensor) -> None:
    """Raise for a write that autograd or a tracer would have to see."""
    if not (dispatch.inference_mode.is_enabled() or dispatch.is_plain((dst,), (src,))):
        dispatch.refuse(call, {"dst": dst}, {"src": src})
    dispatch.refuse_tracing(call)


# By device: a second server would take more SMs from the model's kernels.
_servers: dict[int, weakref.ref[RingServer]] = {}


class RingServer:
    """A kernel that runs until it is ended, and copies the bytes of each push of a ring.

    Returned by ``DescriptorRing.serve``. It starts with the ``with`` body, after all earlier work
    on the current stream; later work there waits for its copies. It ends with the body, or after
    ``idle_timeout_s`` without a push.
    """

    def _init(self, ring: DescriptorRing, launch: Callable[..., None], dst: Tensor) -> RingServer:
        self._ring: DescriptorRing | None = ring
        self._launch, self._dst, self._device = launch, dst, ring.device
        self._stop = _pinned_zero()
        self._stream: Any = _server_stream(ring.device)
        self._ended: Any = None  # an event after the kernel
        self._request_stop: Callable[[], object] = partial(_request_stop, self._stop, os.getpid())
        # Not at exit: _stop_all must run before the pools close.
        weakref.finalize(self, self._request_stop).atexit = False
        return self

    @property
    def is_running(self) -> bool:
        """Whether the kernel has been queued and has not ended yet."""
        return self._ended is not None and not self._ended.query()

    def close(self) -> None:
        """End the kernel and wait for it. It first completes the push that it is copying."""
        if self._ended is not None:
            self._request_stop()
            self._ended.synchronize()
            dispatch.bump_versions((self._dst,))
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._ring is not None and self._ring._server is self:
            self._ring._server = None
        self._ring = None

    def __enter__(self) -> RingServer:
        ring = self._ring
        if ring is None:
            raise RuntimeError(f"{_SERVE}: the server has ended; make another one")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{_SERVE}: a graph is being captured; serve outside of it")
        server = _servers.get(self._device.index, lambda: None)()
        if server is not None and server.is_running:
            raise RuntimeError(f"{_SERVE}: {self._device} has a server; end that one first")
        ring._require_open()
        # atexit calls the function registered last first: before pools, which wait for the device.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        _servers[self._device.index] = weakref.ref(self)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._launch(self._stop.data_ptr(), self._stream.cuda_stream)
        self._ended = self._stream.record_event()
        ring._server = self
        dispatch.bump_versions((self._dst,))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop_all() -> None:
    for reference in _servers.values():
        if (server := reference()) is not None:
            server._request_stop()


def _request_stop(stop: Tensor, pid: int) -> None:
    """Tell a kernel to end, unless this is a forked child, which shares the memory."""
    if os.getpid() == pid:
        stop.fill_(1)


def _pinned_zero() -> Tensor:
    with torch.inference_mode(False):  # inference tensors cannot be written outside of it
        return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


@cache
def _server_stream(device: torch.device) -> Any:
    """Return a stream for servers only: torch.cuda.Stream would share its 32 with other code."""
    stream = host.module()["make_ring_stream"](device.index)
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
