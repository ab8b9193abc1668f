"""``SlotPipeline``: blocks stream through slots of GPU memory while others are computed on."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from jitkern.offload.streams import COMPUTE, LOAD, NONE, STORE, CudaStreams, Streams

if TYPE_CHECKING:
    import torch

Copy = Callable[["torch.Tensor", Any], object]
"""Queues the copy between a slot's tensor and a block on torch's current stream."""

Slots = Generator["Slot", None, None]

_MAX_STREAMS = 8  # of one direction: a link has one copy engine for each
_END = object()


class Slot:
    """A slot with the block that is in it, until the run goes on to the next one.

    Attributes
    ----------
    tensor : torch.Tensor
        Of the pipeline's shape and dtype, on its device.
    block : object
        What the iterable of blocks gave.
    index : int
        Of the slot, from 0 on.
    """

    __slots__ = ("_load_on", "_store_on", "block", "index", "tensor")

    def __init__(self, number: int, tensor: torch.Tensor, streams: Streams) -> None:
        self.index = number
        self.tensor = tensor
        self.block: Any = None
        self._load_on = streams.setter(LOAD, number)
        self._store_on = streams.setter(STORE, number)

    def __repr__(self) -> str:
        return f"Slot({self.index}, block={self.block!r})"


class _Turn:
    """One going over a run. The iterator is not kept: a `for` that is left drops it at once."""

    slots: weakref.ref[Slots] | None = None

    def close(self) -> None:
        slots = self.slots() if self.slots is not None else None
        if slots is not None:
            slots.close()


class Run:
    """The slots of one run, in the order of the blocks; what the methods of a pipeline return.

    The run begins with the first slot that is asked for. Under ``with``, it ends with the block at
    the latest, whoever still holds the iterator.
    """

    def __init__(self, start: Callable[[_Turn], Slots]) -> None:
        self._start = start
        self._turn = _Turn()

    def __iter__(self) -> Iterator[Slot]:
        self._turn = _Turn()
        slots = self._start(self._turn)
        self._turn.slots = weakref.ref(slots)
        return slots

    def close(self) -> None:
        """End the run, if it goes on."""
        self._turn.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    torch.OutOfMemoryError
        The slots do not fit.

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
    ) -> None:
        depth = _count_arg("num_slots", num_slots)
        count = _count_arg("num_streams", num_streams, _MAX_STREAMS)
        self._shape, self._dtype = _shape_arg(slot_shape), _dtype_arg(dtype)
        self._device = _device_arg(device)
        self._slot_bytes = math.prod(self._shape) * self._dtype.itemsize
        on_gpu = self._device.type == "cuda"
        self._streams = CudaStreams(self._device.index, count, 0) if on_gpu else Streams(count, 0)
        self._lock = threading.Lock()  # held by a session, that of a run or of `with`
        self._thread = 0
        self._in_with = False
        self._turn: _Turn | None = None  # of the run that goes on
        self._is_closed = False
        self._is_captured = False
        self._free: deque[Slot] = deque()  # the one that was used longest ago first
        self._slots: list[Slot] = []
        for _ in range(depth):
            self._add_slot()

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
        _iterable_arg("load", blocks)
        _copy_arg("load", "copy", copy)
        return Run(lambda turn: self._slots_of(turn, blocks, copy, None))

    def store(self, blocks: Iterable[Any], *, copy: Copy) -> Run:
        """Give out slots, whose content is undefined, for the body to write; take them away.

        Parameters
        ----------
        blocks : iterable
            Taken one by one, each before its body.
        copy : callable
            ``copy(slot.tensor, block)`` queues the copy of what the body has written, on a transfer
            stream.

        Returns, raises as :meth:`load`.
        """
        _iterable_arg("store", blocks)
        _copy_arg("store", "copy", copy)
        return Run(lambda turn: self._slots_of(turn, blocks, None, copy))

    def update(self, blocks: Iterable[Any], *, load: Copy, store: Copy) -> Run:
        """Bring blocks into slots, which the body changes, and store them back: both at once.

        Parameters
        ----------
        blocks : iterable
            As for :meth:`load`.
        load, store : callable
            As ``copy`` of :meth:`load` and :meth:`store`. A block is loaded before the blocks ahead
            of it are stored: blocks that share memory are the caller's matter.

        Returns, raises as :meth:`load`.
        """
        _iterable_arg("update", blocks)
        _copy_arg("update", "load", load)
        _copy_arg("update", "store", store)
        return Run(lambda turn: self._slots_of(turn, blocks, load, store))

    def fork(self) -> None:
        """Have later copies wait for all that the compute stream has been given.

        To be called between runs under ``with pipeline:``, where copies read what was computed
        since it was entered, such as indices; else a run does so by itself.
        """
        if not self._in_with or self._thread != threading.get_ident():
            raise RuntimeError("SlotPipeline.fork: not inside `with pipeline:`, expected to be")
        self._streams.fork()

    def close(self) -> None:
        """Give the slots' memory back to torch's allocator; again: do nothing.

        Tensors that somebody still holds stay valid. What is queued is waited for by the allocator,
        not by this call.

        Raises
        ------
        RuntimeError
            A run is not over.
        """
        if self._is_closed:
            return
        self._take_lock()
        self._is_closed = True
        self._slots.clear()
        self._free.clear()
        self._lock.release()

    @property
    def depth(self) -> int:
        """Slots that there are."""
        return len(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._slot_bytes

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self._device

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
        self._take_lock()
        self._enter()
        self._in_with = True
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._turn is not None:  # of a run whose iterator somebody holds
                self._turn.close()
        finally:
            self._in_with = False
            self._leave()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.depth} slots"
        return f"SlotPipeline({state} of {self._shape}, {self._dtype}, on {self._device})"

    # -- a run -------------------------------------------------------------------------------------

    def _slots_of(
        self, turn: _Turn, blocks: Iterable[Any], load: Copy | None, store: Copy | None
    ) -> Slots:
        """Go over the blocks; what is queued on a GPU is queued in this order.

        The compute stream is the current one but for the time of a copy.
        """
        coming: Iterator[Any] | None = iter(blocks)
        # An iterator may take its time: the compute before it is then ended at once.
        takes_time = not isinstance(blocks, list | tuple | range)
        self._begin_run(turn, COMPUTE if store is None else STORE)
        free, ahead = self._free, deque[Slot]()
        failed: Exception | None = None
        slot: Slot | None = None
        begin = self._streams.next  # which also ends what was begun before
        compute_on = self._streams.setter(COMPUTE, 0)
        try:
            while True:
                while free and coming is not None:
                    # An error is raised once the blocks before it had their turn, as it would be
                    # if each was loaded just before its body.
                    try:
                        block = next(coming, _END)
                        if block is _END:
                            coming = None
                            break
                        slot = free.popleft()
                        slot.block = block
                        if load is not None:
                            begin(LOAD, slot.index)
                            slot._load_on()
                            try:
                                load(slot.tensor, block)
                            finally:
                                compute_on()
                    except Exception as error:
                        failed, coming = error, None
                        break
                    ahead.append(slot)
                    slot = None
                    if load is None:
                        break
                if not ahead:
                    break
                if slot is not None:  # its load has failed
                    self._put_back(slot)
                slot = ahead.popleft()
                begin(COMPUTE, slot.index)
                yield slot
                if store is not None:
                    begin(STORE, slot.index)
                    slot._store_on()
                    try:
                        store(slot.tensor, slot.block)
                    finally:
                        compute_on()
                elif takes_time:
                    begin(NONE, 0)
                self._put_back(slot)
                slot = None
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback holds this frame
            if slot is not None:
                self._put_back(slot)
            for slot in ahead:
                self._put_back(slot)
            self._end_run()

    def _put_back(self, slot: Slot) -> None:
        slot.block = None
        self._free.append(slot)

    def _begin_run(self, turn: _Turn, final_access: int) -> None:
        if self._in_with and self._turn is None and self._thread == threading.get_ident():
            if not self._streams.is_current():
                text = "torch's current stream is another one, expected the pipeline's compute"
                raise RuntimeError(f"SlotPipeline: {text} stream, as `with pipeline:` made it")
        else:
            self._take_lock()
            self._enter()
        self._turn = turn
        self._streams.start(final_access)

    def _end_run(self) -> None:
        self._turn = None
        try:
            self._streams.next(NONE, 0)
        finally:
            if not self._in_with:
                self._leave()

    def _enter(self) -> None:
        try:
            self._is_captured = self._streams.enter()
        except BaseException:
            self._lock.release()
            raise

    def _leave(self) -> None:
        try:
            self._streams.leave()
        finally:
            self._lock.release()

    def _take_lock(self) -> None:
        me = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            if self._thread != me:
                text = "in use by another thread; make a pipeline for each thread"
            elif self._turn is not None:
                text = (
                    "a run of it is not over; end it first, or use update() for both directions "
                    "at once, or a second pipeline"
                )
            else:
                text = "inside `with pipeline:` already; leave it first"
            raise RuntimeError(f"SlotPipeline: {text}")
        self._thread = me
        if self._is_closed:
            self._lock.release()
            raise RuntimeError("SlotPipeline: the pipeline is closed; make another one")

    def _add_slot(self) -> None:
        number = len(self._slots)
        tensor = self._streams.add_slot(number, self._shape, self._dtype, self._device)
        slot = Slot(number, tensor, self._streams)
        self._slots.append(slot)
        self._free.append(slot)


# -- arguments -------------------------------------------------------------------------------------


def _count_arg(name: str, value: Any, most: int = 0) -> int:
    expected = f"1 to {most}" if most else "at least 1"
    if isinstance(value, bool):
        raise TypeError(f"SlotPipeline: {name}: bool, expected an int")
    try:
        count = index(value)
    except TypeError:
        text = f"SlotPipeline: {name}: {type(value).__name__}, expected an int"
        raise TypeError(text) from None
    if count < 1 or (most and count > most):
        raise ValueError(f"SlotPipeline: {name}: {count}, expected {expected}")
    return count


def _shape_arg(shape: Any) -> tuple[int, ...]:
    expected = "a sequence of ints"
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise TypeError(f"SlotPipeline: slot_shape: {type(shape).__name__}, expected {expected}")
    try:
        sizes = tuple(index(size) for size in shape if not isinstance(size, bool))
    except TypeError:
        sizes = ()
    if len(sizes) != len(shape):
        raise TypeError(f"SlotPipeline: slot_shape: {list(shape)}, expected {expected}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"SlotPipeline: slot_shape: {list(shape)}, expected sizes of at least 1")
    return sizes


def _dtype_arg(dtype: Any) -> torch.dtype:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"SlotPipeline: dtype: {type(dtype).__name__}, expected a torch.dtype")
    return dtype


def _device_arg(device: Any) -> torch.device:
    """Return a device of this machine, with its number if it is a GPU."""
    import torch

    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        what = type(device).__name__
        raise TypeError(f"SlotPipeline: device: {what}, expected a torch.device, a str or an int")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        found = None
    if found is not None and found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found is not None and found.type == "cuda" and (found.index or 0) < count:
        number = torch.cuda.current_device() if found.index is None else found.index
        return torch.device("cuda", number)
    there = "cpu" if count == 0 else f"cpu or cuda:0 to cuda:{count - 1}"
    raise ValueError(f"SlotPipeline: device: {device!s}, expected {there}")


def _iterable_arg(method: str, blocks: Any) -> None:
    if not isinstance(blocks, Iterable) and not hasattr(blocks, "__getitem__"):
        what = type(blocks).__name__
        raise TypeError(f"SlotPipeline.{method}: blocks: {what}, expected an iterable")


def _copy_arg(method: str, name: str, copy: Any) -> None:
    if not callable(copy):
        what = type(copy).__name__
        raise TypeError(f"SlotPipeline.{method}: {name}: {what}, expected a function")
