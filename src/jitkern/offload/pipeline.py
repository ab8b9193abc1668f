"""``SlotPipeline``: blocks stream through slots of GPU memory, concurrently with compute."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from jitkern.args import device_arg, dtype_arg, int_arg, optional_arg, shape_arg, type_text
from jitkern.host import library as host
from jitkern.offload.depth import DepthController
from jitkern.offload.monitor import OverlapMonitor

Copy = Callable[[torch.Tensor, Any], object]
"""Queues the copy between a slot's tensor and a block on torch's current stream."""

_CALL = "SlotPipeline"
_OTHER_THREAD = "in use by another thread; make a pipeline for each thread"
# Iterations between two reads of times, each of at most 16: a longer read would delay the host, and
# so the GPU, at the start of a run.
_EVERY = 8
_MAX_SLOTS = 4096
_END = object()
# Accesses of a slot, as in csrc/offload/slots.cc.
NONE, LOAD, COMPUTE, STORE = -1, 0, 1, 2


class Streams:
    """A CUDA stream for each access; None on the CPU.

    csrc/offload/slots.cc orders them: ``next(access, slot)`` ends the current access and begins
    another; ``start(first, last)`` begins a run whose iterations start and end with these accesses.
    """

    def __init__(self, device: torch.device, is_timed: bool, all_timed: bool) -> None:
        self.all: Sequence[Any] = [None] * 3
        if device.type == "cuda":
            # Copies by SMs start before the compute's kernels; copy engines ignore priorities.
            self.all = [
                torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
                for priority in (-1, 0, -1)
            ]
        self.compute: Any = self.all[COMPUTE]
        self._caller: tuple[Any, int, int] | None = None  # in a session: stream, device and thread
        self._device_index: int | None = device.index
        self._set_stream: Any = torch.cuda.set_stream
        handles = [0 if stream is None else stream.cuda_stream for stream in self.all]
        device_index = -1 if device.index is None else device.index
        self._connect(device_index, handles, is_timed, all_timed)

    def _connect(self, *arguments: object) -> None:
        functions: Any = host.module()["make_slot_streams"](*arguments)
        self.next, self._enter, self.start, self.fork, self._leave, *others = functions
        self._add_slot, self.harvest = others

    def enter(self) -> bool:
        """Begin a session after the caller's work; return whether the caller is being captured."""
        if self.compute is None:
            return bool(self._enter(0))
        caller = torch.cuda.current_stream(self._device_index)
        self._caller = (caller, torch.cuda.current_device(), threading.get_ident())
        is_captured = bool(self._enter(caller.cuda_stream))
        torch.cuda.set_stream(self.compute)
        return is_captured

    def leave(self) -> None:
        """End the session: the caller's stream waits for it. A second call does nothing."""
        if self._caller is None:
            return
        caller, device, thread = self._caller
        try:
            self._leave()
        finally:
            if thread == threading.get_ident():  # any thread may drop the last reference to a run
                torch.cuda.set_stream(caller)
                torch.cuda.set_device(device)
            self._caller = None

    def is_current(self) -> bool:
        """Return whether the compute stream is torch's current stream, as it is in a session."""
        return self.compute is None or torch.cuda.current_stream(self._device_index) == self.compute

    def use(self, access: int) -> None:
        """Make the stream of an access torch's current stream."""
        self._set_stream(self.all[access])  # None has no effect

    def add_slot(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the memory of a new slot."""
        # Inference tensors cannot be written outside inference mode.
        with torch.inference_mode(False), torch.cuda.stream(self.compute):
            tensor = torch.empty(shape, dtype=dtype, device=device)
        self._add_slot(index)
        if self.compute is not None:
            # The allocator reuses a dropped slot's memory after these streams are done with it.
            for access in (LOAD, STORE):
                tensor.record_stream(self.all[access])
        return tensor


@dataclass(eq=False)
class PipelineSlot:
    """A slot: its memory `tensor`, its `index`, and the `block` that it holds in this iteration."""

    index: int
    tensor: torch.Tensor = field(repr=False)
    block: Any = None


class PipelineRun(AbstractContextManager["PipelineRun"], Iterator[PipelineSlot]):
    """One loop of a ``SlotPipeline``: an iterator over slots, in the order of the blocks.

    Returned by ``SlotPipeline.load``, ``store`` and ``update``. It starts at the first ``next`` and
    belongs to the thread that calls it. It ends after the last slot, when nothing references it any
    more (as after a ``break``), or at the end of a ``with run:`` body.
    """

    _thread = 0  # not started
    _steps: Any  # the generator of the slots

    def __next__(self) -> PipelineSlot:
        if self._thread not in (0, threading.get_ident()):
            raise RuntimeError(f"{_CALL}: {_OTHER_THREAD}")
        return next(self._steps)  # type: ignore[no-any-return]

    @property
    def is_done(self) -> bool:
        """Whether the run has ended."""
        return self._steps.gi_frame is None

    def close(self) -> None:
        """End the run."""
        self._steps.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class SlotPipeline:
    """Streams blocks through a few slots of GPU memory, concurrently with compute.

    A run is a ``for`` loop over blocks; each iteration gets a slot. Inside the body, torch's
    current stream is the pipeline's compute stream. Loads and stores are queued on a stream each,
    loads as many blocks ahead as there are slots. Events order the uses of each slot.

    A run starts after all earlier work on the caller's current stream, and later work there waits
    for the run. ``with pipeline:`` does so once for several runs. The host never waits. A body may
    raise or ``break``. Ctrl-C inside the pipeline's own code can break the pipeline: then every use
    but ``close`` raises. ``torch.cuda.graph`` can capture runs. On the CPU, copies run at once.

    Parameters
    ----------
    num_slots : int
        Number of blocks on the GPU at a time: 1 to 4096. With 1 nothing overlaps.
    slot_shape : sequence of int
        Shape of a slot's tensor.
    dtype : torch.dtype
    device : torch.device, str or int, optional
        By default the current GPU, or the CPU if there is none.
    monitor : OverlapMonitor, optional
        Times the iterations.
    max_slots : int, optional
        Add slots up to this number if that saves time, and remove them if fewer are as fast. All
        iterations are then timed.

    Attributes
    ----------
    device, slot_bytes
        The device, and the bytes of a slot.
    compute_stream, load_stream, store_stream : torch.cuda.Stream or None
        The streams of bodies, of copies to slots, and of copies from slots; None on the CPU.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        slot_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | int | None = None,
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
            max_slots = int_arg(_CALL, "max_slots", max_slots, depth, _MAX_SLOTS)
            self._controller = DepthController(depth, max_slots)
            monitor = monitor or OverlapMonitor()
        self._monitor = monitor
        self._streams = Streams(self.device, monitor is not None, max_slots is not None)
        self.load_stream, self.compute_stream, self.store_stream = self._streams.all
        self._free = deque[PipelineSlot]()  # the least recently used slot first
        self._all: list[PipelineSlot] = []
        self._resize(depth)
        # Held by a run or by `with`, from the first wait for the caller's stream to the last.
        self._session = threading.Lock()
        self._in_with = self._is_captured = self._was_captured = self._is_closed = False
        self._thread = 0
        self._run: weakref.ref[PipelineRun] | None = None  # the active run, if any
        if monitor is not None:
            observe = None if self._controller is None else self._controller.observe
            monitor._attach(self, self._streams.harvest, observe)

    def load(self, blocks: Iterable[Any], *, copy: Copy) -> PipelineRun:
        """Iterate over slots into which blocks have been copied; the body reads them.

        Parameters
        ----------
        blocks : iterable
            The blocks, of any type. The pipeline takes one when a slot becomes free, in order.
        copy : callable
            ``copy(slot.tensor, block)`` queues the copy on torch's current stream. Use pinned
            memory: a copy from pageable memory blocks the host.

        Raises
        ------
        RuntimeError
            At the first ``next``: the pipeline is closed or broken, another thread uses it, or it
            has an active run.
        """
        return self._new_run("load", blocks, {"copy": copy}, copy, None)

    def store(self, blocks: Iterable[Any], *, copy: Copy) -> PipelineRun:
        """Iterate over slots that the body fills; each is copied to its block afterwards.

        ``copy(slot.tensor, block)`` queues that copy; see ``load`` for the rest.
        """
        return self._new_run("store", blocks, {"copy": copy}, None, copy)

    def update(self, blocks: Iterable[Any], *, load: Copy, store: Copy) -> PipelineRun:
        """Iterate over slots with copied blocks; after the body each is copied back to its block.

        ``load`` and ``store`` are as `copy` in the methods of these names. A block may be loaded
        before earlier blocks have been stored, so blocks must not share memory.
        """
        return self._new_run("update", blocks, {"load": load, "store": store}, load, store)

    def fork(self) -> None:
        """Make later copies wait for all work queued so far on the compute stream.

        For copies that read results of that work, such as indices. Only inside ``with pipeline:``,
        else RuntimeError.
        """
        if not self._is_inside():
            raise RuntimeError("SlotPipeline.fork: not inside `with pipeline:`, expected to be")
        self._streams.fork()

    def close(self) -> None:
        """Free the slots' memory without waiting; a second call does nothing.

        Inside ``with pipeline:``, the caller's stream waits for all queued work as at its end.
        RuntimeError if a run is active, or another thread is inside ``with pipeline:``.
        """
        if self._is_closed:
            return
        # After Ctrl-C between `with pipeline:` and its body, no `__exit__` ends the session.
        is_free = self._session.acquire(blocking=False)
        if not is_free:
            is_elsewhere = self._in_with and self._thread != threading.get_ident()
            if is_elsewhere or self._active_run() is not None:
                raise RuntimeError(f"{_CALL}: {self._why_busy()}")
        self._is_closed, self._in_with = True, False  # the session stays acquired
        self._streams.leave()  # if the end of a session was cut short, or has not come
        self._all.clear()
        self._free.clear()

    @property
    def num_slots(self) -> int:
        """The number of slots now; 0 after ``close``."""
        return len(self._all)

    def __enter__(self) -> SlotPipeline:
        self._begin()
        self._in_with = True
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if (run := self._active_run()) is not None:
                run.close()
        finally:
            self._in_with = False
            if not self._is_closed:
                self._end()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.num_slots} slots"
        return f"SlotPipeline({state} of {self._shape}, {self._dtype}, on {self.device})"

    # -- runs --------------------------------------------------------------------------------------

    def _new_run(
        self, name: str, blocks: Any, copies: dict[str, Any], load: Copy | None, store: Copy | None
    ) -> PipelineRun:
        if not hasattr(blocks, "__iter__") and not hasattr(blocks, "__getitem__"):
            text = f"{type_text(blocks)}, expected an iterable"
            raise TypeError(f"{_CALL}.{name}: blocks: {text}")
        for argument, copy in copies.items():
            if not callable(copy):
                text = f"{type_text(copy)}, expected a callable of a tensor and a block"
                raise TypeError(f"{_CALL}.{name}: {argument}: {text}")
        run = PipelineRun()
        run._steps = self._iterate(blocks, load, store, weakref.ref(run))
        return run

    def _iterate(
        self,
        blocks: Iterable[Any],
        load: Copy | None,
        store: Copy | None,
        run: weakref.ref[PipelineRun],
    ) -> Generator[PipelineSlot, None, None]:
        """Iterate over the blocks; work is queued on the GPU in the order of this function."""
        remaining: Iterator[Any] | None = iter(blocks)
        # A lazy iterator may be slow: the compute before it is then ended first.
        is_lazy = not isinstance(blocks, list | tuple | range)
        loaded = deque[PipelineSlot]()
        error: Exception | None = None
        num_copies = (load is not None) + (store is not None)
        self._begin_run(run, COMPUTE if load is None else LOAD, COMPUTE if store is None else STORE)
        try:
            monitor = None if self._is_captured else self._monitor
            while True:
                try:
                    while remaining is not None and self._free and not (load is None and loaded):
                        block = next(remaining, _END)
                        if block is _END:
                            remaining = None
                            break
                        slot = self._free.popleft()
                        slot.block = block
                        if load is not None:
                            self._copy(LOAD, slot, load)
                        loaded.append(slot)
                except Exception as exception:  # raised after the bodies of the blocks before it
                    error, remaining = exception, None
                if not loaded:
                    break
                slot = loaded.popleft()
                self._streams.next(COMPUTE, slot.index)
                if monitor is not None:
                    monitor._num_iterations += 1
                    monitor._num_copies += num_copies
                yield slot
                if store is not None:
                    self._copy(STORE, slot, store)
                elif is_lazy:
                    self._streams.next(NONE, 0)
                slot.block = None
                self._free.append(slot)
                if monitor is not None and monitor._num_iterations % _EVERY == 0:
                    self._measure(monitor)
            if error is not None:
                raise error
        finally:
            error = None  # its traceback references this frame
            self._end_run()

    def _copy(self, access: int, slot: PipelineSlot, queue: Copy) -> None:
        self._streams.next(access, slot.index)
        self._streams.use(access)
        try:
            queue(slot.tensor, slot.block)
        finally:
            self._streams.use(COMPUTE)

    def _begin_run(self, run: weakref.ref[PipelineRun], first: int, last: int) -> None:
        if not self._is_inside():
            self._begin()
        elif self._active_run() is not None:
            raise RuntimeError(f"{_CALL}: {self._why_busy()}")
        elif not self._streams.is_current():
            text = "torch's current stream is another one, expected the pipeline's compute stream"
            raise RuntimeError(f"{_CALL}: {text}, as `with pipeline:` made it")
        self._run = run
        run()._thread = self._thread  # type: ignore[union-attr]
        self._free_all()
        self._streams.start(first, last)

    def _end_run(self) -> None:
        try:
            self._streams.next(NONE, 0)
        finally:
            self._free_all()
            self._run = None
            if not self._in_with:
                self._end()

    def _active_run(self) -> PipelineRun | None:
        run = None if self._run is None else self._run()
        return None if run is None or run.is_done else run

    # -- sessions: one run, or all runs in a `with` body -------------------------------------------

    def _begin(self) -> None:
        if self._is_closed or not self._session.acquire(blocking=False):
            raise RuntimeError(f"{_CALL}: {self._why_busy()}")
        self._thread = threading.get_ident()
        self._is_captured = self._streams.enter()
        self._was_captured |= self._is_captured

    def _end(self) -> None:
        self._streams.leave()
        self._session.release()

    def _is_inside(self) -> bool:
        return self._in_with and self._thread == threading.get_ident()

    def _is_broken(self) -> bool:
        """Return whether a held session has no owner that would end it."""
        return not self._in_with and self._active_run() is None

    def _why_busy(self) -> str:
        if self._is_closed:
            return "the pipeline is closed; make another one"
        if self._is_broken():
            return "an exception has cut a run's begin or end short; close() it and make another"
        if self._thread != threading.get_ident():
            return _OTHER_THREAD
        if self._active_run() is not None:
            return (
                "a run of it is not over; end it first, or use update() for both directions "
                "at once, or a second pipeline"
            )
        return "inside `with pipeline:` already; leave it, or close() the pipeline"

    # -- slots and times ---------------------------------------------------------------------------

    def _resize(self, depth: int) -> None:
        """Add slots up to `depth` as far as there is memory; extra slots go after the run."""
        self._wanted = depth
        is_first = not self._all
        try:
            for index in range(len(self._all), depth):
                tensor = self._streams.add_slot(index, self._shape, self._dtype, self.device)
                self._all.append(PipelineSlot(index, tensor))
                self._free.append(self._all[-1])
        except torch.OutOfMemoryError:
            if is_first or self._controller is None:
                raise
            self._wanted = len(self._all)
            self._controller.refuse(self._wanted)

    def _free_all(self) -> None:
        """Make all slots free, also those in use when an error occurred; drop unwanted slots."""
        self._all = self._all[: self._wanted]
        slots = dict.fromkeys([*self._free, *self._all])  # free slots first, in their order
        self._free = deque(slot for slot in slots if slot.index < self._wanted)
        for slot in self._all:
            slot.block = None

    def _measure(self, monitor: OverlapMonitor) -> None:
        monitor._update()
        if self._controller is not None and self._controller.depth != self._wanted:
            # A captured graph holds the addresses of all slots.
            self._resize(max(self._controller.depth, self.num_slots if self._was_captured else 0))
