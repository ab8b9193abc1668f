"""``DescriptorRing``: descriptors that a CPU pushes into memory that kernels read, and no copy."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jitkern.errors import name_unreadable
from jitkern.host import module as host
from jitkern.offload import ring_call
from jitkern.offload.args import count_arg, device_arg, int64_arg, natural_arg, number_arg
from jitkern.offload.ring_memory import RingMemory, full_text, memory_arg, zeros_on
from jitkern.offload.ring_server import RingServer
from jitkern.offload.ring_slot import RingSlot
from jitkern.ops.unpack import set_ring_type

if TYPE_CHECKING:
    import torch

# As in both/ring.h and csrc/offload/ring.cc.
_MAX_SLOTS, _MAX_DESCRIPTORS = 65_536, 65_535
_HEADER_BYTES, _DESCRIPTOR_BYTES = 128, 64
_RESERVED, _RESERVED_HERE = -2, -3

_SLICE_S = 0.05  # of a wait in C++, between two of which Ctrl-C gets through
_WAIT_S = 10.0


class DescriptorRing:
    """Slots of descriptors in pinned host memory, which a CPU thread fills and a consumer empties.

    A descriptor says which bytes of a source go where in a destination. A push writes them right
    into memory that GPUs read in place and publishes them by one store: no copy, no driver call.
    Slots are used in turn; one is written again once what was pushed before has been consumed.
    Threads may push at the same time, one after the other. A C++ producer, of this process or of
    another one, may take the place of Python (``jitkern/both/ring.h``), but not push beside it.

    The ring lives as long as this object; :meth:`close` waits for the GPUs first. A forked child
    has no part of it.

    Parameters
    ----------
    num_slots : int, optional
        Pushes that can be under way.
    max_descriptors : int, optional
        Of one push, at most 65,535.
    memory : "mapped" or "device", optional
        Where kernels find the slots: in the host memory that is written; or in memory of the GPU,
        to which each push queues a copy of its slot on the current stream, so that those of Python
        alone arrive there. Completion words are in host memory either way.
    device : torch.device, str or int, optional
        Whose kernels consume; by default the current GPU, or the CPU where there is none.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    MemoryError, RuntimeError, UnsupportedError
        No memory for it; CUDA does not register it; there is no ``memfd_create``.

    Examples
    --------
    >>> import torch
    >>> from jitkern.offload import DescriptorRing
    >>> ring = DescriptorRing(num_slots=4, max_descriptors=128)
    >>> ring.push(torch.tensor([[0, 512, 100], [4096, 0, 512]]))  # src_off, dst_off, len
    0
    >>> ring.done(0)
    False
    >>> ring.close()
    """

    def __init__(
        self,
        num_slots: int = 16,
        max_descriptors: int = 2048,
        memory: Literal["mapped", "device"] = "mapped",
        device: torch.device | str | int | None = None,
    ) -> None:
        import torch

        call = "DescriptorRing"
        self._num_slots = count_arg(call, "num_slots", num_slots, _MAX_SLOTS)
        self._max = count_arg(call, "max_descriptors", max_descriptors, _MAX_DESCRIPTORS)
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self._device = device_arg(call, device)
        memory_arg(memory, self._device)
        module = host.module()
        num_bytes, self._first, self._slot_bytes = module["ring_layout"](self._num_slots, self._max)
        self._memory = RingMemory(num_bytes)
        self._bytes: torch.Tensor = self._memory.pool.tensor()
        made = module["make_ring"](self._bytes, self._num_slots, self._max)
        self._push, self._try_push, self._reserve, self._await_free, self._await_done = made[:5]
        self._consume, self._next, self._queue = made[5:]
        self._on_device: torch.Tensor | None = None
        if memory == "device":
            self._on_device = zeros_on(self._device, num_bytes)
            self._on_device[:_HEADER_BYTES].copy_(self._bytes[:_HEADER_BYTES])  # and waits
        if self._device.type == "cuda":
            state = zeros_on(self._device, module["ring_state_bytes"](self._num_slots, self._max))
            base = 0 if self._on_device is None else self._on_device.data_ptr()
            self._consume, self._serve = module["ring_on_gpu"](self._bytes, base, state)
        self._server: RingServer | None = None
        self._is_tensor = torch.Tensor
        self._is_open = True
        _open.add(self)

    @property
    def num_slots(self) -> int:
        """Pushes that can be under way."""
        return self._num_slots

    @property
    def max_descriptors(self) -> int:
        """Descriptors of one push."""
        return self._max

    @property
    def device(self) -> torch.device:
        """Whose kernels consume."""
        return self._device

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
        return self._memory.fd

    def push(self, descriptors: Any, *, timeout_s: float = _WAIT_S) -> int:
        """Push descriptors; return the push's ticket, a number from 0 on.

        Parameters
        ----------
        descriptors : Tensor or array
            int64 on the CPU, ``[n, 3]`` of (src_off, dst_off, len), or ``[n, 6]`` of (src_off,
            dst_off, len, count, src_stride, dst_stride): of each descriptor `count` rows of `len`
            bytes, whose offsets in bytes are a stride apart. A NumPy array or another buffer of
            these shapes is as good. They are copied.
        timeout_s : float, optional
            How long to wait for the slot.

        Raises
        ------
        TypeError, ValueError
            Another dtype or shape, more descriptors than a slot has room for, a negative value, or
            a length or count of more than 32 bits. Nothing was pushed.
        TimeoutError
            What was pushed into the slot before has not been consumed.
        RuntimeError
            This thread has a slot reserved; the ring is closed.
        """
        if type(descriptors) is not self._is_tensor:
            descriptors = int64_arg("DescriptorRing.push", "descriptors", descriptors)
        push = self._push  # self._push(...) would look for a method first: a twentieth of a push
        try:
            ticket = push(descriptors)
        except RuntimeError as error:
            name_unreadable(error, "DescriptorRing.push", descriptors=descriptors)
        if ticket < 0:
            again = partial(self._push, descriptors)
            ticket = self._when_free("DescriptorRing.push", again, ticket, timeout_s)
        return ticket if self._on_device is None else self._to_device(ticket, self._on_device)

    def try_push(self, descriptors: Any) -> int | None:
        """Push as :meth:`push`, at once; return None where the slot is still being read."""
        if type(descriptors) is not self._is_tensor:
            descriptors = int64_arg("DescriptorRing.try_push", "descriptors", descriptors)
        try:
            ticket = self._try_push(descriptors)
        except RuntimeError as error:
            name_unreadable(error, "DescriptorRing.try_push", descriptors=descriptors)
        if ticket < 0:
            _refuse_own("DescriptorRing.try_push", ticket)
            return None
        return ticket if self._on_device is None else self._to_device(ticket, self._on_device)

    def reserve(
        self, num_descriptors: int | None = None, *, timeout_s: float = _WAIT_S
    ) -> RingSlot:
        """Return the next slot, to be written in place; other pushes wait until it is pushed.

        Dropped, which an error or Ctrl-C may do at any place, it is cancelled.

        Parameters
        ----------
        num_descriptors : int, optional
            By default as many as a slot has room for.
        timeout_s : float, optional
            How long to wait for the slot.

        Examples
        --------
        >>> with ring.reserve(2) as slot:  # doctest: +SKIP
        ...     slot.src_off[:] = torch.tensor([0, 4096])
        ...     slot.len[:] = 512
        >>> ring.wait(slot.ticket)  # doctest: +SKIP
        """
        call, count = "DescriptorRing.reserve", self._max
        if num_descriptors is not None:
            count = count_arg(call, "num_descriptors", num_descriptors, self._max)
        # Whoever drops `end` cancels, by no Python that a signal could cut short.
        end = self._when_free(call, lambda: self._reserve(count), None, timeout_s)
        ticket = self.num_pushed
        begin = self._first + ticket % self._num_slots * self._slot_bytes
        part = self._bytes[begin : begin + count * _DESCRIPTOR_BYTES].view(count, _DESCRIPTOR_BYTES)
        return RingSlot(ticket % self._num_slots, ticket, part, partial(self._finish, end))

    def done(self, ticket: int) -> bool:
        """Tell whether all that a push asked for has been done."""
        return bool(self._await_done(self._ticket_arg("DescriptorRing.done", ticket), 0))

    def wait(self, ticket: int, *, timeout_s: float = _WAIT_S) -> None:
        """Wait until all that a push asked for has been done; mostly asleep.

        Raises
        ------
        TimeoutError
            It has not.
        """
        call = "DescriptorRing.wait"
        number = self._ticket_arg(call, ticket)
        deadline = time.monotonic() + number_arg(call, "timeout_s", timeout_s)
        while not self._await_done(number, _slice_us(deadline)):
            if time.monotonic() >= deadline:
                text = f"push {number}, in slot {number % self._num_slots}, is not consumed"
                raise TimeoutError(f"{call}: {text} after {timeout_s:g} s; is a consumer running?")

    def serve(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        *,
        num_sms: int = 1,
        idle_timeout_s: float = _WAIT_S,
    ) -> RingServer:
        """Return a server, as the context in which a kernel consumes what is pushed.

        The kernel occupies its SMs and reads the ring all the time: for small pushes that cannot
        wait for a launch. Whoever waits for the whole device in the body waits until it ends by
        itself: ``torch.cuda.synchronize``, maybe cudaMalloc and cudaFree, the first launch of a
        kernel that is loaded lazily, the end of a pinned pool or of an engine. One server on a
        device; calls of :func:`jitkern.unpack` on its ring are refused meanwhile.

        Parameters
        ----------
        dst, src : Tensor
            As of :func:`jitkern.unpack`.
        num_sms : int, optional
            Blocks of the kernel, each of which has an SM: 1 to 8, and 1 on a GPU before compute
            capability 9.0.
        idle_timeout_s : float, optional
            The kernel ends once no push has come for so long.

        Raises
        ------
        TypeError, ValueError
            A wrong argument; a ring of the CPU, or one whose pushes are copied to the device.
        RuntimeError
            As of ``unpack``; as the body begins: the device has a server, a graph is captured.
        """
        call = "DescriptorRing.serve"
        self._next()  # raises once it is closed
        if self._device.type == "cpu" or self._on_device is not None:
            raise ValueError(f"{call}: {self!r}, expected a mapped ring of a GPU")
        if self._server is not None and self._server.is_running:
            raise RuntimeError(f"{call}: the ring has a server; end that one first")
        sides = (dst, src)
        return RingServer(self._run, self._serve, sides, self._device, num_sms, idle_timeout_s)

    def close(self) -> None:
        """End its server, wait for the GPUs and give the memory back; again: do nothing.

        Producers in C++ must have ended. Those in other processes keep their mapping of it.
        """
        if not self._is_open:
            return
        if self._server is not None:
            self._server.stop()
        self._memory.pool.close()
        self._shut("the ring is closed; make another one")
        self._memory.close_fd()

    def __enter__(self) -> DescriptorRing:
        self._next()  # raises once it is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed"
        if self._is_open:
            pinned = "pinned" if self._memory.pool.stats.is_registered else "pageable"
            where = "mapped" if self._on_device is None else f"copied to {self._device}"
            state = f"{where}, {pinned}, {self.num_pushed} pushed"
        slots = "slot" if self._num_slots == 1 else "slots"
        return f"DescriptorRing({self._num_slots} {slots} of {self._max} descriptors, {state})"

    def _unpack(
        self, dst: torch.Tensor, src: torch.Tensor, slot: int | None, num_slots: int
    ) -> None:
        """Do what :func:`jitkern.unpack` does of a ring."""
        ring_call.consume(self._consume, self._num_slots, dst, src, slot, num_slots)

    def _run(self, server: RingServer, launch: Callable[[], None]) -> None:
        """Have a server begin, which close() will end."""
        self._next()  # raises once it is closed
        launch()
        self._server = server

    def _when_free(
        self, call: str, attempt: Callable[[], Any], last: int | None, timeout_s: float
    ) -> Any:
        """Return what the first attempt that finds the slot free returns."""
        deadline = time.monotonic() + number_arg(call, "timeout_s", timeout_s)
        found = attempt() if last is None else last
        while type(found) is int and found < 0:
            _refuse_own(call, found)
            if time.monotonic() >= deadline:
                where = (self.num_pushed, self._num_slots, found == _RESERVED)
                raise TimeoutError(full_text(call, *where, timeout_s))
            if found == _RESERVED:
                time.sleep(1e-4)
            else:
                self._await_free(_slice_us(deadline))
            found = attempt()
        return found

    def _finish(self, end: Callable[[int], int], count: int | None) -> int:
        """End a reservation: push so many, or nothing."""
        self._next()  # raises once it is closed
        ticket = end(-1 if count is None else count)
        if count is None or self._on_device is None:
            return ticket
        return self._to_device(ticket, self._on_device)

    def _to_device(self, ticket: int, slots: torch.Tensor) -> int:
        """Have a slot copied on the current stream; it stays as it is until it is consumed."""
        import torch

        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._queue(ticket, slots.data_ptr(), self._device.index, stream)
        return ticket

    def _ticket_arg(self, call: str, ticket: Any) -> int:
        number = natural_arg(call, "ticket", ticket)
        pushed = self.num_pushed
        if number >= pushed:
            raise ValueError(f"{call}: ticket: {number}, expected below the {pushed} pushes so far")
        return number

    def _shut(self, why: str) -> None:
        def refuse(*_: object) -> NoReturn:
            raise RuntimeError(f"DescriptorRing: {why}")

        self._is_open = False
        self._push = self._try_push = self._reserve = refuse
        self._await_free = self._await_done = self._consume = self._next = self._queue = refuse
        _open.discard(self)


set_ring_type(DescriptorRing)

_open: weakref.WeakSet[DescriptorRing] = weakref.WeakSet()


def _shut_in_child() -> None:
    # The child would be a second producer.
    for ring in list(_open):
        ring._shut("a forked child has no part of its parent's ring; make one")


os.register_at_fork(after_in_child=_shut_in_child)


def _refuse_own(call: str, found: int) -> None:
    if found == _RESERVED_HERE:
        text = "this thread has a slot reserved; publish() or cancel() it first"
        raise RuntimeError(f"{call}: {text}")


def _slice_us(deadline: float) -> int:
    return max(0, int(1e6 * min(_SLICE_S, deadline - time.monotonic())))
