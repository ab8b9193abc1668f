"""``DescriptorRing``: descriptors that a CPU pushes right into memory that kernels read."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from jitkern.args import device_arg, int_arg, number_arg
from jitkern.errors import name_unreadable
from jitkern.fs import make_memory
from jitkern.host import module as host
from jitkern.offload import memory
from jitkern.offload.memory import PinnedMemory
from jitkern.offload.ring_server import CALL as SERVE
from jitkern.offload.ring_server import RingServer
from jitkern.ops import dispatch
from jitkern.ops.unpack import set_ring_type

# As in both/ring.h and csrc/offload/ring.cc.
_MAX_SLOTS, _MAX_DESCRIPTORS = 65_536, 65_535
_DESCRIPTOR_BYTES = 64
_RESERVED = -2

_SLICE_S = 0.05  # of a wait in C++, between two of which Ctrl-C gets through
_WAIT_S = 10.0
_PUSH = "DescriptorRing.push"


class DescriptorRing(AbstractContextManager["DescriptorRing"]):
    """Slots of descriptors in pinned host memory, which a CPU thread fills and a consumer empties.

    A descriptor says which bytes of a source go where in a destination. A push writes descriptors
    into memory that GPUs read in place, and publishes them by one store: no copy, no driver call.
    Slots are used in turn, each again once its last push has been consumed. Any thread may push. A
    C++ producer (``jitkern/both/ring.h``) may take the place of Python, but not push beside it.

    Parameters
    ----------
    num_slots : int, optional
        Pushes that can be under way, at most 65,536.
    max_descriptors : int, optional
        Of one push, at most 65,535.
    device : torch.device, str or int, optional
        Whose kernels consume; by default the current GPU, or the CPU if there is none.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    MemoryError, RuntimeError, UnsupportedError
        More memory than is free; CUDA does not register it; there is no ``memfd_create``.
    """

    def __init__(
        self,
        num_slots: int = 16,
        max_descriptors: int = 2048,
        device: torch.device | str | int | None = None,
    ) -> None:
        call, module = "DescriptorRing", host.module()
        most = int_arg(call, "max_descriptors", max_descriptors, 1, _MAX_DESCRIPTORS)
        num_slots = int_arg(call, "num_slots", num_slots, 1, _MAX_SLOTS)
        self.num_slots, self.max_descriptors = num_slots, most
        self.device: torch.device = device_arg(call, "device", device)
        num_bytes, self._first, self._slot_bytes = module["ring_layout"](num_slots, most)
        memory.require_free(num_bytes, f"{call}: num_slots, max_descriptors")
        # Memory of a descriptor, which a producer in another process can map.
        self._fd = make_memory(call, "jitkern-ring", num_bytes)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._memory = PinnedMemory(num_bytes, self._fd)
        self._memory.register()
        self._bytes: Tensor = self._memory.tensor
        made = module["make_ring"](self._bytes, num_slots, most)
        self._push, self._reserve, self._publish = made[:3]
        self._await_free, self._await_done, self._consume, self._next = made[3:]
        if self.device.type == "cuda":
            state = _zeros_on(self.device, module["ring_state_bytes"](num_slots, most))
            self._consume, self._serve = module["ring_on_gpu"](self._bytes, state)
        self._reserved_by = 0  # a thread
        self._server: RingServer | None = None
        self._is_open = True
        _open.add(self)

    @property
    def num_pushed(self) -> int:
        """How many pushes there have been, which is the next one's ticket."""
        return int(self._next())

    @property
    def address(self) -> int:
        """Of the first byte, for C++ of this process: ``RingProducer(void* base)``."""
        self._next()  # raises once it is closed
        return self._bytes.data_ptr()

    def fileno(self) -> int:
        """Return the descriptor of the memory, which a producer in another process maps."""
        self._next()
        return self._fd

    def push(self, descriptors: Any, *, timeout_s: float = _WAIT_S) -> int:
        """Push descriptors; return the push's ticket, a number from 0 on.

        Parameters
        ----------
        descriptors : Tensor or array
            int64 on the CPU, ``[n, 3]`` of (src_off, dst_off, len), or ``[n, 6]`` of (src_off,
            dst_off, len, count, src_stride, dst_stride): `count` rows of `len` bytes.
        timeout_s : float, optional
            How long to wait until the last push of the slot has been consumed.

        Raises
        ------
        TypeError, ValueError
            Another dtype or shape, too many descriptors, a value that is negative or does not fit.
        TimeoutError
            The slot is not free in time.
        RuntimeError
            This thread has a slot reserved; the ring is closed.
        """
        ticket = self._try_push(descriptors)
        if ticket >= 0:
            return ticket
        return self._await(_PUSH, lambda: self._try_push(descriptors), timeout_s)

    def try_push(self, descriptors: Any) -> int | None:
        """Push as ``push``, at once; return None if the slot is still being read."""
        ticket = self._try_push(descriptors)
        self._refuse_own(_PUSH, ticket)
        return ticket if ticket >= 0 else None

    def reserve(
        self, num_descriptors: int | None = None, *, timeout_s: float = _WAIT_S
    ) -> RingSlot:
        """Return the next slot, to be written in place; other pushes wait until it is pushed.

        `num_descriptors` are by default as many as a slot has room for; `timeout_s` is as of
        ``push``. A slot that is dropped is cancelled.
        """
        call, count = "DescriptorRing.reserve", self.max_descriptors
        if num_descriptors is not None:
            count = int_arg(call, "num_descriptors", num_descriptors, 1, count)
        ticket = self._await(call, lambda: self._reserve(count), timeout_s)
        self._reserved_by = threading.get_ident()
        index = ticket % self.num_slots
        begin = self._first + index * self._slot_bytes
        part = self._bytes[begin : begin + count * _DESCRIPTOR_BYTES]
        return RingSlot(index, ticket, part.view(count, _DESCRIPTOR_BYTES), self._finish)

    def done(self, ticket: int) -> bool:
        """Tell whether all that a push asked for has been done."""
        return bool(self._await_done(self._ticket_arg("DescriptorRing.done", ticket), 0))

    def wait(self, ticket: int, *, timeout_s: float = _WAIT_S) -> None:
        """Wait until all that a push asked for has been done, mostly asleep; else TimeoutError."""
        call = "DescriptorRing.wait"
        number = self._ticket_arg(call, ticket)
        deadline = time.monotonic() + number_arg(call, "timeout_s", timeout_s)
        while not self._await_done(number, _slice_us(deadline)):
            if time.monotonic() >= deadline:
                text = f"push {number}, in slot {number % self.num_slots}, is not consumed"
                raise TimeoutError(f"{call}: {text} after {timeout_s:g} s; is a consumer running?")

    def serve(
        self, src: Tensor, dst: Tensor, *, num_sms: int = 1, idle_timeout_s: float = _WAIT_S
    ) -> RingServer:
        """Return a server: in its ``with`` body a kernel consumes what is pushed.

        The kernel occupies its SMs all the time: for small pushes that cannot wait for a launch.
        What waits for the whole device waits until it ends: ``torch.cuda.synchronize``, cudaMalloc
        and cudaFree, the first launch of a kernel that is loaded lazily, the end of a pinned pool.
        One server per device, and no ``unpack`` on its ring meanwhile.

        Parameters
        ----------
        src, dst : Tensor
            As of ``unpack``.
        num_sms : int, optional
            Blocks of the kernel, each on an SM: 1 to 8, and 1 before compute capability 9.0.
        idle_timeout_s : float, optional
            The kernel ends once no push has come for so long.
        """
        self._next()  # raises once it is closed
        if self.device.type == "cpu":
            raise ValueError(f"{SERVE}: {self!r}, expected a ring of a GPU")
        _require_writable(SERVE, dst, src)
        # A cluster that any GPU with clusters has.
        most = 8 if torch.cuda.get_device_capability(self.device) >= (9, 0) else 1
        sms = int_arg(SERVE, "num_sms", num_sms, 1, most)
        idle_ns = int(1e9 * number_arg(SERVE, "idle_timeout_s", idle_timeout_s, 1e9))
        return RingServer(self, partial(self._serve, src, dst, sms, idle_ns), dst)

    def close(self) -> None:
        """End its server, wait for the GPUs and give the memory back; again: do nothing."""
        if not self._is_open:
            return
        if self._server is not None:
            self._server.stop()
        self._memory.close()
        self._shut("the ring is closed; make another one")
        self._close_fd()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __enter__(self) -> DescriptorRing:
        self._next()  # raises once it is closed
        return self

    def __repr__(self) -> str:
        state = f"{self.num_pushed} pushed" if self._is_open else "closed"
        slots = f"{self.num_slots} slots of {self.max_descriptors} descriptors"
        return f"DescriptorRing({slots} on {self.device}, {state})"

    def _unpack(self, src: Tensor, dst: Tensor, num_slots: int) -> None:
        """Do what ``unpack`` does of a ring."""
        if type(num_slots) is not int or num_slots != 1:
            num_slots = int_arg("unpack", "num_slots", num_slots, 1, self.num_slots)
        _require_writable("unpack", dst, src)
        try:
            self._consume(src, dst, num_slots)
        except (TypeError, ValueError):
            raise  # nothing was queued
        except Exception as error:
            # Earlier slots were copied; or the kernel is queued, and the error is of another call.
            dispatch.wrote(dst)
            name_unreadable(error, "unpack", dst=dst, src=src)
        dispatch.wrote(dst)

    def _try_push(self, descriptors: Any) -> int:
        if type(descriptors) is not Tensor:  # an array, such as NumPy's
            try:
                descriptors = torch.as_tensor(descriptors, device="cpu")  # whatever torch's default
            except (TypeError, ValueError, RuntimeError):
                text = f"{type(descriptors).__name__}, expected a tensor or an array of int64"
                raise TypeError(f"{_PUSH}: descriptors: {text}") from None
        try:
            ticket: int = self._push(descriptors)
        except RuntimeError as error:
            name_unreadable(error, _PUSH, descriptors=descriptors)
        return ticket

    def _await(self, call: str, attempt: Callable[[], int], timeout_s: Any) -> int:
        """Return the ticket once the slot is free."""
        deadline = time.monotonic() + number_arg(call, "timeout_s", timeout_s)
        while (ticket := attempt()) < 0:
            self._refuse_own(call, ticket)
            if time.monotonic() >= deadline:
                pushed, count = self.num_pushed, self.num_slots
                slot = pushed % count
                if ticket == _RESERVED:
                    text = f"another thread has slot {slot} reserved for over {timeout_s:g} s"
                    raise TimeoutError(f"{call}: {text}")
                raise TimeoutError(
                    f"{call}: slot {slot} is still being read after {timeout_s:g} s: push "
                    f"{pushed - count} is not consumed; wait longer (timeout_s), consume sooner, "
                    f"or make a ring of more than {count} slots"
                )
            if ticket == _RESERVED:
                time.sleep(1e-4)
            else:
                self._await_free(_slice_us(deadline))
        return ticket

    def _refuse_own(self, call: str, ticket: int) -> None:
        if ticket == _RESERVED and self._reserved_by == threading.get_ident():
            text = "this thread has a slot reserved; publish() or cancel() it first"
            raise RuntimeError(f"{call}: {text}")

    def _finish(self, count: int) -> None:
        """End a reservation: push `count` descriptors; -1: push nothing."""
        self._reserved_by = 0
        self._publish(count)

    def _ticket_arg(self, call: str, ticket: Any) -> int:
        number = int_arg(call, "ticket", ticket, 0)
        pushed = self.num_pushed
        if number >= pushed:
            raise ValueError(f"{call}: ticket: {number}, expected below the {pushed} pushes so far")
        return number

    def _shut(self, why: str) -> None:
        def refuse(*_: object) -> NoReturn:
            raise RuntimeError(f"DescriptorRing: {why}")

        self._is_open = False
        self._push = self._reserve = self._publish = refuse
        self._await_free = self._await_done = self._consume = self._next = refuse
        _open.discard(self)


set_ring_type(DescriptorRing)

_open: weakref.WeakSet[DescriptorRing] = weakref.WeakSet()


def _shut_in_child() -> None:
    # The child would be a second producer.
    for ring in list(_open):
        ring._shut("a forked child has no part of its parent's ring; make one")


os.register_at_fork(after_in_child=_shut_in_child)


def _slice_us(deadline: float) -> int:
    return max(0, int(1e6 * min(_SLICE_S, deadline - time.monotonic())))


def _zeros_on(device: torch.device, num_bytes: int) -> Tensor:
    """Return zeros that every stream finds."""
    zeros = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return zeros


def _require_writable(call: str, dst: Tensor, src: Tensor) -> None:
    """Raise for a write that PyTorch would have to see, but does not."""
    if not dispatch.in_inference_mode() and not dispatch.may_write((dst,), (src,)):
        dispatch.refuse(call, {"dst": dst}, {"src": src})
    dispatch.refuse_watchers(call)


def _field(dtype: str, column: int, doc: str) -> property:
    def field(self: RingSlot) -> Tensor:
        return self._open("RingSlot").view(getattr(torch, dtype))[:, column]

    return property(field, doc=doc)


class RingSlot:
    """A slot of a ``DescriptorRing`` that is written in place: push `ticket` in slot `index`.

    The fields are views of the slot, ``[num_descriptors]`` each, and begin as empty rows. The end
    of the ``with`` body pushes the slot, unless the body raises. Do not write views after that.
    """

    def __init__(
        self, index: int, ticket: int, bytes_: Tensor, finish: Callable[[int], object]
    ) -> None:
        self.index: int = index
        self.ticket: int = ticket
        self._bytes: Tensor | None = bytes_  # a row for each descriptor
        self._finish = finish

    src_off = _field("int64", 0, "Offset of the first row in the source, in bytes: int64.")
    dst_off = _field("int64", 1, "Where the first row begins in the destination: int64.")
    len = _field("uint32", 4, "Bytes of a row: uint32.")
    count = _field("uint32", 5, "How many rows: uint32.")
    src_stride = _field("int64", 4, "From one row to the next in the source, in bytes: int64.")
    dst_stride = _field("int64", 5, "The same in the destination: int64.")

    def publish(self, num_descriptors: int | None = None) -> int:
        """Push the slot, or its first descriptors alone; return the ticket."""
        call = "RingSlot.publish"
        count = self._open(call).shape[0]
        if num_descriptors is not None:
            count = int_arg(call, "num_descriptors", num_descriptors, 1, count)
        self._bytes = None
        self._finish(count)
        return self.ticket

    def cancel(self) -> None:
        """Push nothing: the slot is the next push's."""
        self._open("RingSlot.cancel")
        self._bytes = None
        self._finish(-1)

    def __enter__(self) -> RingSlot:
        self._open("RingSlot")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bytes is not None:
            if kind is None:
                self.publish()
            else:
                self.cancel()

    def __del__(self) -> None:
        if self._bytes is not None:
            with suppress(RuntimeError):  # of a ring that is closed
                self.cancel()

    def __repr__(self) -> str:
        state = "pushed or cancelled" if self._bytes is None else "being written"
        return f"RingSlot({self.index}, ticket {self.ticket}, {state})"

    def _open(self, call: str) -> Tensor:
        if self._bytes is None:
            raise RuntimeError(f"{call}: the slot was pushed or cancelled; reserve another one")
        return self._bytes
