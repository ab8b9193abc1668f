"""``SlotPipeline``: blocks stream through slots of GPU memory while others are computed on."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from jitkern.args import device_arg, dtype_arg, int_arg, optional_arg, shape_arg
from jitkern.host import module as host
from jitkern.offload.depth import DepthController
from jitkern.offload.monitor import OverlapMonitor

Copy = Callable[[torch.Tensor, Any], object]
"""Queues the copy between a slot's tensor and a block on torch's current stream."""

_CALL = "SlotPipeline"
_OTHER_THREAD = "in use by another thread; make a pipeline for each thread"
# Iterations between two reads of times. A read takes at most twice as many: more would delay the
# host, and so the GPU, at the begin of a run.
_EVERY = 8
_MAX_SLOTS = 4096
_END = object()
# Accesses of a slot, as in csrc/offload/slots.cc.
NONE, LOAD, COMPUTE, STORE = -1, 0, 1, 2


class Streams:
    """A stream for each access; on the CPU none.

    csrc/offload/slots.cc orders them: ``next(access, slot)`` ends the access that is open and
    begins one, ``start(first, last)`` begins a run whose iterations go from one access to another.
    """

    def __init__(self, device: torch.device, is_timed: bool, all_timed: bool) -> None:
        self.all: Sequence[Any] = [None] * 3
        if device.type == "cuda":
            # If SMs copy, they do so before the compute's kernels; the copy engines do not care.
            self.all = [
                torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
                for priority in (-1, 0, -1)
            ]
        self.compute: Any = self.all[COMPUTE]
        self._caller: tuple[Any, int, int] | None = None  # in a session: stream, device and thread
        self._ordinal: int | None = device.index
        self._set_stream: Any = torch.cuda.set_stream
        handles = [0 if stream is None else stream.cuda_stream for stream in self.all]
        ordinal = -1 if device.index is None else device.index
        self._connect(ordinal, handles, is_timed, all_timed)

    def _connect(self, *how: object) -> None:
        made: Any = host.module()["make_slot_streams"](*how)
        self.next, self._enter, self.start, self.fork, self._leave, *others = made
        self._add_slot, self.harvest, self.num_dropped = others

    def enter(self) -> bool:
        """Begin a session after the caller's work; tell whether that is being captured."""
        if self.compute is None:
            return bool(self._enter(0))
        caller = torch.cuda.current_stream(self._ordinal)
        self._caller = (caller, torch.cuda.current_device(), threading.get_ident())
        is_captured = bool(self._enter(caller.cuda_stream))
        torch.cuda.set_stream(self.compute)
        return is_captured

    def leave(self) -> None:
        """End the session: the caller's stream waits for it. Again: do nothing."""
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
        return self.compute is None or torch.cuda.current_stream(self._ordinal) == self.compute

    def use(self, access: int) -> None:
        """Make the stream of an access torch's current one."""
        self._set_stream(self.all[access])  # None: does nothing

    def add_slot(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory of a new slot."""
        # In inference mode it could not be written outside of that.
        with torch.inference_mode(False), torch.cuda.stream(self.compute):
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self._add_slot(index)
        if self.compute is not None:
            # The memory of a slot that is dropped is reused only after all are done with it.
            for access in (LOAD, STORE):
                tensor.record_stream(self.all[access])
        return tensor


@dataclass(eq=False)
class Slot:
    """A slot: its `tensor`, its `index`, and the `block` in it for one iteration."""

    index: int
    tensor: torch.Tensor = field(repr=False)
    block: Any = None


class Run(AbstractContextManager["Run"], Iterator[Slot]):
    """The slots of one run, in the order of the blocks; what the methods of a pipeline return.

    The run begins with the first slot that is asked for, and is for the thread that asks. It ends
    with the last one, if it is dropped, as a ``for`` does that is left, or with ``with run:``.
    """

    def __init__(self, go: Callable[[weakref.ref[Run]], Generator[Slot, None, None]]) -> None:
        self._thread = 0  # not begun
        self._steps: Any = go(weakref.ref(self))

    def __next__(self) -> Slot:
        if self._thread not in (0, threading.get_ident()):
            raise RuntimeError(f"{_CALL}: {_OTHER_THREAD}")
        return next(self._steps)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the run, if it goes on."""
        self._steps.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class SlotPipeline:
    """Slots of GPU memory through which blocks stream, so that copies run beside the compute.

    A run iterates over blocks. Its body gets one slot after the other; torch's current stream is
    the pipeline's compute stream. Copies are queued on a stream for each direction, loads as many
    blocks ahead as there are slots. Events order the uses of each slot.

    A run begins after all work on the caller's current stream, and later work there waits for the
    run; nothing is synchronised. ``with pipeline:`` does so once for several runs. A body may raise
    or ``break``. Ctrl-C inside the pipeline's own code can leave it broken: the next use says so,
    and ``close`` works. ``torch.cuda.graph`` can capture runs. On the CPU all happens at once.

    Parameters
    ----------
    num_slots : int
        Depth: blocks on the GPU at a time, 1 to 4096. With one nothing overlaps.
    slot_shape : sequence of int
        Of a slot's tensor.
    dtype : torch.dtype
    device : torch.device, str or int
        A GPU, or the CPU.
    monitor : OverlapMonitor, optional
        Gets the times of iterations.
    max_slots : int, optional
        Lets the pipeline take more slots if they save time, up to so many, and give them back. All
        iterations are then timed.

    Attributes
    ----------
    device, slot_bytes
    compute_stream, load_stream, store_stream : torch.cuda.Stream or None
        For bodies, copies to slots, and copies from them; None on the CPU.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        slot_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | int = "cuda",
        monitor: OverlapMonitor | None = None,
        max_slots: int | None = None,
    ) -> None:
        depth = int_arg(_CALL, "num_slots", num_slots, 1, _MAX_SLOTS)
        self._shape = shape_arg(_CALL, "slot_shape", slot_shape)
        self._dtype = dtype_arg(_CALL, dtype)
        self.device: torch.device = device_arg(_CALL, "device", device)
        self.slot_bytes: int = math.prod(self._shape) * dtype.itemsize
        optional_arg(_CALL, "monitor", monitor, OverlapMonitor)
        self._controller: DepthController | None = None
        if max_slots is not None:
            most = int_arg(_CALL, "max_slots", max_slots, depth, _MAX_SLOTS)
            self._controller = DepthController(depth, most)
            monitor = monitor or OverlapMonitor()
        self._monitor = monitor
        self._streams = Streams(self.device, monitor is not None, max_slots is not None)
        self.load_stream, self.compute_stream, self.store_stream = self._streams.all
        self._free = deque[Slot]()  # the slot used longest ago first
        self._all: list[Slot] = []  # by index
        self._grow(depth)
        # Held from the first wait on the caller's stream to the last, by a run or by `with`.
        self._session = threading.Lock()
        self._in_with = self._is_captured = self._was_captured = self._is_closed = False
        self._thread = 0
        self._run: weakref.ref[Run] | None = None  # which goes on
        if monitor is not None:
            observe = None if self._controller is None else self._controller.observe
            monitor._attach(self, self._streams, observe)

    def load(self, blocks: Iterable[Any], *, copy: Copy) -> Run:
        """Copy blocks into slots; the body reads them.

        Parameters
        ----------
        blocks : iterable
            Taken one by one, as slots become free; the order is kept.
        copy : callable
            ``copy(slot.tensor, block)`` queues the copy on torch's current stream. Pageable host
            memory would make the host wait: pin it.

        Raises
        ------
        RuntimeError
            From the first iteration: the pipeline is closed or broken, in use by another thread, or
            has a run that is not over.
        """
        return Run(partial(self._go, blocks, copy, None))

    def store(self, blocks: Iterable[Any], *, copy: Copy) -> Run:
        """Give out slots for the body to write, and copy each to its block afterwards.

        ``copy(slot.tensor, block)`` queues that copy; the rest is as of ``load``.
        """
        return Run(partial(self._go, blocks, None, copy))

    def update(self, blocks: Iterable[Any], *, load: Copy, store: Copy) -> Run:
        """Copy blocks into slots, which the body changes, and store them back.

        A block is loaded before earlier ones are stored: they must not share memory.
        """
        return Run(partial(self._go, blocks, load, store))

    def fork(self) -> None:
        """Have later copies wait for all work queued on the compute stream.

        Inside ``with pipeline:``, for copies that read what was computed since, such as indices.
        """
        if not self._is_inside():
            raise RuntimeError("SlotPipeline.fork: not inside `with pipeline:`, expected to be")
        self._streams.fork()

    def close(self) -> None:
        """Give the slots' memory back to torch's allocator; again: do nothing.

        It does not wait: the allocator does. RuntimeError if a run is not over.
        """
        if self._is_closed:
            return
        if not self._session.acquire(blocking=False) and not self._is_broken():
            raise RuntimeError(f"{_CALL}: {self._why_not()}")
        self._is_closed = True  # the session stays acquired
        self._streams.leave()  # if an exception has cut the end of a session short
        if self._monitor is not None:
            self._monitor._poll()
        self._all.clear()
        self._free.clear()

    @property
    def depth(self) -> int:
        """Slots that there are."""
        return len(self._all)

    def __enter__(self) -> SlotPipeline:
        self._begin()
        self._in_with = True
        return self

    def __exit__(self, *_: object) -> None:
        try:
            run = self._running()
            if run is not None:
                run.close()
        finally:
            self._in_with = False
            self._end()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.depth} slots"
        return f"SlotPipeline({state} of {self._shape}, {self._dtype}, on {self.device})"

    # -- runs --------------------------------------------------------------------------------------

    def _go(
        self, blocks: Iterable[Any], load: Copy | None, store: Copy | None, run: weakref.ref[Run]
    ) -> Generator[Slot, None, None]:
        """Go over the blocks; what is queued on a GPU is queued in this order."""
        coming: Iterator[Any] | None = iter(blocks)
        # An iterator may take its time: the compute before it is then ended at once.
        takes_time = not isinstance(blocks, list | tuple | range)
        ahead = deque[Slot]()
        failed: Exception | None = None
        done, num_copies = 0, (load is not None) + (store is not None)
        self._begin_run(run, COMPUTE if load is None else LOAD, COMPUTE if store is None else STORE)
        try:
            monitor = None if self._is_captured else self._monitor
            while True:
                try:
                    while coming is not None and self._free and not (load is None and ahead):
                        block = next(coming, _END)
                        if block is _END:
                            coming = None
                            break
                        slot = self._free.popleft()
                        slot.block = block
                        if load is not None:
                            self._copy(LOAD, slot, load)
                        ahead.append(slot)
                except Exception as error:  # raised after the bodies of the blocks before it
                    failed, coming = error, None
                if not ahead:
                    break
                slot = ahead.popleft()
                self._streams.next(COMPUTE, slot.index)
                if monitor is not None:
                    monitor._iterations += 1
                    monitor._copies += num_copies
                yield slot
                if store is not None:
                    self._copy(STORE, slot, store)
                elif takes_time:
                    self._streams.next(NONE, 0)
                slot.block = None
                self._free.append(slot)
                done += 1
                if monitor is not None and monitor._iterations % _EVERY == 0:
                    self._measure(monitor)
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback holds this frame
            self._end_run(done)

    def _copy(self, access: int, slot: Slot, queue: Copy) -> None:
        self._streams.next(access, slot.index)
        self._streams.use(access)
        try:
            queue(slot.tensor, slot.block)
        finally:
            self._streams.use(COMPUTE)

    def _begin_run(self, run: weakref.ref[Run], first: int, last: int) -> None:
        if not self._is_inside():
            self._begin()
        elif self._running() is not None:
            raise RuntimeError(f"{_CALL}: {self._why_not()}")
        elif not self._streams.is_current():
            text = "torch's current stream is another one, expected the pipeline's compute stream"
            raise RuntimeError(f"{_CALL}: {text}, as `with pipeline:` made it")
        self._run = run
        run()._thread = self._thread  # type: ignore[union-attr]
        self._take_back()
        self._streams.start(first, last)

    def _end_run(self, done: int) -> None:
        try:
            self._streams.next(NONE, 0)
        finally:
            if self._is_captured and self._monitor is not None:
                self._monitor._captured += done
            self._take_back()
            self._run = None
            if not self._in_with:
                self._end()

    def _running(self) -> Run | None:
        run = self._run() if self._run is not None else None
        return None if run is None or run._steps.gi_frame is None else run

    # -- sessions ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._is_closed or not self._session.acquire(blocking=False):
            raise RuntimeError(f"{_CALL}: {self._why_not()}")
        self._thread = threading.get_ident()
        self._is_captured = self._streams.enter()
        self._was_captured |= self._is_captured

    def _end(self) -> None:
        self._streams.leave()
        self._session.release()

    def _is_inside(self) -> bool:
        return self._in_with and self._thread == threading.get_ident()

    def _is_broken(self) -> bool:
        """Tell whether nobody is left who would end the session."""
        return not self._in_with and self._running() is None

    def _why_not(self) -> str:
        if self._is_closed:
            return "the pipeline is closed; make another one"
        if self._is_broken():
            return "an exception has cut a run's begin or end short; close() it and make another"
        if self._thread != threading.get_ident():
            return _OTHER_THREAD
        if self._running() is not None:
            return (
                "a run of it is not over; end it first, or use update() for both directions "
                "at once, or a second pipeline"
            )
        return "inside `with pipeline:` already; leave it first"

    # -- slots and times ---------------------------------------------------------------------------

    def _grow(self, depth: int) -> None:
        """Have at least `depth` slots, or as many as there is memory for; more go after the run."""
        self._wanted = depth
        is_first = not self._all
        try:
            for number in range(len(self._all), depth):
                tensor = self._streams.add_slot(number, self._shape, self._dtype, self.device)
                self._all.append(Slot(number, tensor))
                self._free.append(self._all[-1])
        except torch.OutOfMemoryError:
            if is_first or self._controller is None:
                raise
            self._wanted = len(self._all)
            self._controller.refuse(self._wanted)

    def _take_back(self) -> None:
        """Make all slots free, also those that an error has left anywhere; drop some if wanted."""
        self._all = self._all[: self._wanted]
        known = dict.fromkeys([*self._free, *self._all])
        self._free = deque(slot for slot in known if slot.index < self._wanted)
        for slot in self._all:
            slot.block = None

    def _measure(self, monitor: OverlapMonitor) -> None:
        monitor._poll(2 * _EVERY)
        monitor._look()
        if self._controller is not None and self._controller.depth != self._wanted:
            # A graph knows the slots by their addresses.
            self._grow(max(self._controller.depth, self.depth if self._was_captured else 0))
