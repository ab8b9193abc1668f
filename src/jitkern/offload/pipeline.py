"""``SlotPipeline``: blocks stream through slots of GPU memory while others are computed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.offload.args import (
    count_arg,
    device_arg,
    dtype_arg,
    function_arg,
    iterable_arg,
    optional_arg,
    shape_arg,
)
from jitkern.offload.depth import AutoDepth, DepthController
from jitkern.offload.monitor import OverlapMonitor
from jitkern.offload.ranges import Ranges
from jitkern.offload.runs import Copy, Countdown, Run, Slots, go_over
from jitkern.offload.session import Session, Turn
from jitkern.offload.slots import SlotSet
from jitkern.offload.streams import NONE, CudaStreams, Streams

if TYPE_CHECKING:
    import torch

_CALL = "SlotPipeline"
_MAX_STREAMS = 8  # of one direction: a link has one copy engine for each

# Times of iterations that are there when some are read: more in one call cost less each.
_SELDOM, _OFTEN = 16, 8


class SlotPipeline:
    """Slots of GPU memory through which blocks stream, so that copies run beside the compute.

    A run goes over blocks: its body gets one slot after the other, in the order of the blocks, with
    the pipeline's compute stream as torch's current one. Copies are queued on a stream for each
    direction, loads as many blocks ahead as there are slots. Events order what shares a slot: a
    load waits for the compute that still reads it, a compute for the load that fills it and for the
    store that still reads it, a store for the compute that writes it.

    A run begins behind all that is on the caller's current stream, and what the caller queues there
    afterwards comes behind the run; nothing is synchronised. `with pipeline:` around several runs
    does so once for all of them: loads of the next run are queued while the last slots of the
    former are computed on, and the compute stream is the current one in between, too. A body that
    raises, ``break``, a run that is dropped leave the pipeline ready for the next run, and the
    caller's stream current and in order.

    Runs can be captured by ``torch.cuda.graph``. On the CPU all happens at once, in the order in
    which it is queued on a GPU.

    Parameters
    ----------
    num_slots : int
        Depth: blocks on the GPU at a time, from 1 on. With one nothing overlaps.
    slot_shape : sequence of int
        Of a slot's tensor.
    dtype : torch.dtype
    device : torch.device, str or int
        A GPU, or the CPU.
    num_streams : int, optional
        For the copies of each direction, 1 to 8. The link is one: more are for copies that wait
        for something else than the link.
    monitor : OverlapMonitor, optional
        Is given times of iterations, of one in four unless it asks for all.
    auto_depth : AutoDepth, optional
        Lets the pipeline take slots more, from `num_slots` on, and give them back. Every iteration
        is then timed, as the decision needs it.
    nvtx : bool, optional
        Whether each copy and body is a range in NVIDIA's profilers, ``load 3``: its time on the
        host.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    torch.OutOfMemoryError
        The slots do not fit.
    UnsupportedError
        `nvtx`, and this torch has none.

    Examples
    --------
    >>> import torch
    >>> from jitkern.offload import SlotPipeline
    >>> pipeline = SlotPipeline(num_slots=2, slot_shape=[3], dtype=torch.float32, device="cpu")
    >>> blocks = [torch.full([3], float(i)) for i in range(4)]
    >>> def copy(tensor, block):
    ...     tensor.copy_(block, non_blocking=True)
    >>> [slot.tensor.sum().item() for slot in pipeline.load(blocks, copy=copy)]
    [0.0, 3.0, 6.0, 9.0]
    """

    def __init__(
        self,
        *,
        num_slots: int,
        slot_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | int = "cuda",
        num_streams: int = 1,
        monitor: OverlapMonitor | None = None,
        auto_depth: AutoDepth | None = None,
        nvtx: bool = False,
    ) -> None:
        depth = count_arg(_CALL, "num_slots", num_slots)
        count = count_arg(_CALL, "num_streams", num_streams, _MAX_STREAMS)
        shape, torch_dtype = shape_arg(_CALL, "slot_shape", slot_shape), dtype_arg(_CALL, dtype)
        where = device_arg(_CALL, device)
        optional_arg(_CALL, "monitor", monitor, OverlapMonitor)
        optional_arg(_CALL, "auto_depth", auto_depth, AutoDepth)
        self._ranges = Ranges() if nvtx else None
        self._controller: DepthController | None = None
        if auto_depth is not None:
            most = auto_depth.most(depth, math.prod(shape) * torch_dtype.itemsize)
            self._controller = DepthController(auto_depth, depth, most)
            monitor = monitor or OverlapMonitor()
        self._monitor = monitor
        capacity = 0 if monitor is None else monitor.capacity
        every = 1 if monitor is None or self._controller is not None else monitor.every
        if where.type == "cuda":
            self._streams: Streams = CudaStreams(where.index, count, capacity, every)
        else:
            self._streams = Streams(count, capacity, every)
        few = _SELDOM if self._controller is None else _OFTEN
        self._every_few = Countdown(0 if monitor is None else few * every)
        self._each_captured = Countdown(1)
        # Twice as many as have come since, so that what has piled up is worked off over a run. When
        # the host is far ahead that is most of the run before: on an H200, 190 iterations held up
        # the next run for 4 ms with 1.8 ms of work queued, and the GPU had nothing to do.
        self._most_read = 2 * few
        self._slots = SlotSet(self._streams, shape, torch_dtype, where, depth)
        self._session = Session(self._streams, self._slots)
        if monitor is not None:
            monitor._attach(self)

    def load(self, blocks: Iterable[Any], *, copy: Copy) -> Run:
        """Bring blocks into slots; the body reads them.

        Parameters
        ----------
        blocks : iterable
            Taken one by one, as slots become free; the order is kept.
        copy : callable
            ``copy(slot.tensor, block)`` queues the copy on torch's current stream, which is a
            transfer stream. Host memory has to be pinned, or the copy holds up the host.

        Returns
        -------
        Run
            To iterate over: a :class:`Slot` for each block.

        Raises
        ------
        TypeError
            A wrong argument.
        RuntimeError
            When the run begins: the pipeline is closed, in use by another thread, or has a run
            that is not over.
        """
        iterable_arg("SlotPipeline.load", "blocks", blocks)
        function_arg("SlotPipeline.load", "copy", copy)
        return self._run(blocks, copy, None)

    def store(self, blocks: Iterable[Any], *, copy: Copy) -> Run:
        """Give out slots, whose content is undefined, for the body to write; take them away.

        Returns and raises as :meth:`load`.

        Parameters
        ----------
        blocks : iterable
            Taken one by one, each before its body.
        copy : callable
            ``copy(slot.tensor, block)`` queues the copy of what the body has written, on a transfer
            stream.
        """
        iterable_arg("SlotPipeline.store", "blocks", blocks)
        function_arg("SlotPipeline.store", "copy", copy)
        return self._run(blocks, None, copy)

    def update(self, blocks: Iterable[Any], *, load: Copy, store: Copy) -> Run:
        """Bring blocks into slots, which the body changes, and store them back: both at once.

        Returns and raises as :meth:`load`.

        Parameters
        ----------
        blocks : iterable
            As for :meth:`load`.
        load, store : callable
            As ``copy`` of :meth:`load` and :meth:`store`. A block is loaded before the blocks ahead
            of it are stored: blocks that share memory are the caller's matter.
        """
        iterable_arg("SlotPipeline.update", "blocks", blocks)
        function_arg("SlotPipeline.update", "load", load)
        function_arg("SlotPipeline.update", "store", store)
        return self._run(blocks, load, store)

    def fork(self) -> None:
        """Have later copies wait for all that the compute stream has been given.

        To be called between runs under ``with pipeline:``, where copies read what was computed
        since it was entered, such as indices; else a run does so by itself.
        """
        self._session.fork()

    def close(self) -> None:
        """Give the slots' memory back to torch's allocator; again: do nothing.

        Tensors that somebody still holds stay valid. What is queued is waited for by the allocator,
        not by this call.

        Raises
        ------
        RuntimeError
            A run is not over.
        """
        if self._session.is_closed:
            return
        self._session.close()
        if self._monitor is not None:
            self._poll()
            self._monitor._detach()
        self._slots.clear()

    @property
    def depth(self) -> int:
        """Slots that there are."""
        return len(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._slots.slot_bytes

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self._slots.device

    @property
    def compute_stream(self) -> Any:
        """The ``torch.cuda.Stream`` that bodies run on; None on the CPU."""
        return self._streams.compute

    @property
    def load_streams(self) -> tuple[Any, ...]:
        """The streams of copies to slots."""
        return tuple(self._streams.loads)

    @property
    def store_streams(self) -> tuple[Any, ...]:
        """The streams of copies from slots."""
        return tuple(self._streams.stores)

    def __enter__(self) -> SlotPipeline:
        holder = Turn(is_with=True)
        try:
            self._session.begin_with(holder)
            return self
        except BaseException:
            self._session.end_with(holder)
            raise

    def __exit__(self, *_: object) -> None:
        holder = self._session.holder
        try:
            self._session.end_with(holder)
        finally:
            self._session.end_with(holder)  # again, where a signal's handler cut it short

    def __repr__(self) -> str:
        slots = self._slots
        state = "closed" if self._session.is_closed else f"{len(slots)} slots"
        return f"SlotPipeline({state} of {slots.shape}, {slots.dtype}, on {slots.device})"

    def _run(self, blocks: Iterable[Any], load: Copy | None, store: Copy | None) -> Run:
        def start(turn: Turn) -> Slots:
            return go_over(
                turn,
                self._session,
                self._streams,
                self._slots,
                blocks,
                load,
                store,
                self._countdown,
                self._ranges,
            )

        return Run(start)

    # -- times -------------------------------------------------------------------------------------

    def _countdown(self) -> tuple[Countdown, Callable[[], None]]:
        if self._monitor is not None and self._session.is_captured:
            return self._each_captured, self._count_captured
        return self._every_few, self._measure

    def _measure(self) -> None:
        self._poll(self._most_read)
        if self._monitor is not None:
            self._monitor._look(self.depth)
        controller = self._controller
        if controller is None:
            return
        wanted = controller.depth
        if self._session.was_captured:  # a graph knows the slots by their addresses
            wanted = max(wanted, self.depth)
        if wanted != self._slots.wanted:
            self._streams.next(NONE, 0)  # of a slot that may go
            if not self._slots.resize(wanted):
                controller.refuse(self.depth)

    def _count_captured(self) -> None:
        if self._monitor is not None:
            self._monitor._count_captured()

    def _poll(self, most: int = 0) -> None:
        """Give the monitor the times that are there, of `most` iterations or of all; any thread."""
        if self._monitor is not None:
            observe = None if self._controller is None else self._controller.observe
            self._monitor._poll(self._streams, observe, most)
