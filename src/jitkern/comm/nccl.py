"""``init_pynccl``: NCCL without PyTorch in between, and with a deadline for each call."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.comm import nccl_library
from jitkern.comm.args import MAX_TIMEOUT_S, deadline_arg, device_arg, rows_arg
from jitkern.comm.protocol import REDUCE_OPS, ReduceOp
from jitkern.comm.rendezvous import Rendezvous, call_with_timeout
from jitkern.env import settings
from jitkern.errors import CommError, name_unreadable
from jitkern.fs import ForkLocal
from jitkern.host import module as host
from jitkern.ops import dispatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OPS = {name: number for number, name in enumerate(REDUCE_OPS)}  # as NCCL numbers them
_WITH_OUTPUT = ("all_gather", "reduce_scatter", "all_to_all")
_ALIGN_BYTES = 512  # of PyTorch's allocator

_ABORT_S = 1.5  # that is waited for an abort: it is over only when graphs are gone, too
_MARK_S = 0.1  # that is waited for an event, which takes 2 us where the launch queue has room
_GRAPHS_S = 10.0  # that they get to go away when a communicator is closed
_EXIT_S = 5.0  # that what is in flight gets when the process ends
_LOOK_S = 0.01, 1.0  # between two looks for late calls; a tenth of the shortest deadline

# What became of a call: CallStatus in csrc/comm/communicator.h.
_DONE, _STOPPED, _LATE, _FAILED, _TRACED = range(5)

Call = Callable[..., int]


class _Functions(NamedTuple):
    """The functions of one communicator in C++, in the order of csrc/comm/collectives.cc."""

    all_reduce: Call
    all_gather: Call
    reduce_scatter: Call
    broadcast: Call
    send: Call
    recv: Call
    all_to_all: Call
    barrier: Call
    watch: Call
    open: Call
    wait_done: Call
    finish: Call
    free: Callable[[], None]
    abort: Callable[[], None]
    mark: Callable[[], None]
    register_memory: Call
    progress: Callable[[], Sequence[Any]]
    trouble: Callable[[], str]
    num_captured: Callable[[], int]


class _Progress(NamedTuple):
    num_calls: int  # that all ranks make
    last_op: str
    waiting_s: float  # since the oldest call that is not done was made, -1: none
    op: str  # that call
    number: int
    ops: Sequence[str]  # from that call to the next event: the one that is not done is among them
    peer: int  # the other rank of a call between two, else -1
    trouble: str  # of NCCL
    is_open: bool  # the last call has no event yet


def init_pynccl(
    *,
    tp_rank: int,
    tp_size: int,
    tp_cpu_group: Any,
    max_size_bytes: int = 0,
    device: torch.device | None = None,
    timeout_s: float = 600.0,
) -> PyNCCLCommunicator:
    """Return a communicator over NCCL, once all ranks have called this.

    Uses the libnccl that PyTorch has loaded, else the ``nvidia-nccl`` package, else the system's;
    ``JITKERN_NCCL`` names another. Needs NCCL 2.18 or newer.

    Parameters
    ----------
    tp_rank, tp_size : int
        This rank, 0 to ``tp_size - 1``, and how many there are.
    tp_cpu_group : torch.distributed.ProcessGroup or torch.distributed.Store
        How the ranks find each other: a gloo group of just these ranks, or a store that is this
        communicator's own (a ``PrefixStore``). It is not used after the set-up.
    max_size_bytes : int
        Bytes of device memory that are registered with NCCL, for :meth:`PyNCCLCommunicator.empty`
        and :attr:`PyNCCLCommunicator.buffer`; at most ``JITKERN_PYNCCL_MAX_BUFFER_SIZE``, by
        default 1 GiB. Nothing is ever copied there: calls read and write tensors where they are.
    device : torch.device, optional
        This rank's GPU, by default the current one.
    timeout_s : float
        Seconds that the set-up and each call may take, from when it is made to when the GPU is done
        with it; ``math.inf``: no deadline.

    Raises
    ------
    CommTimeoutError
        Some ranks did not come within ``timeout_s``; it names them.
    CommError
        Ranks do not fit together: two of one number, on one GPU, or of other versions.
    UnsupportedError
        There is no usable NCCL; the message says what to install.
    TypeError, ValueError
        A wrong argument.

    Examples
    --------
    >>> comm = init_pynccl(tp_rank=0, tp_size=2, tp_cpu_group=group)  # doctest: +SKIP
    >>> comm.all_reduce(x, "sum")  # doctest: +SKIP
    """
    import torch

    timeout_s = deadline_arg("init_pynccl", "timeout_s", timeout_s)
    if not isinstance(max_size_bytes, int) or max_size_bytes < 0:
        raise ValueError(
            f"init_pynccl: max_size_bytes: {max_size_bytes!r}, expected bytes, 0 or more"
        )
    given = torch.device("cuda") if device is None else device
    device = device_arg("init_pynccl", "device", given)
    if device.type != "cuda":
        raise ValueError(f"init_pynccl: device: {device}, expected a GPU")
    num_bytes = min(max_size_bytes, settings().pynccl_max_buffer_bytes)
    made = PyNCCLCommunicator.__new__(PyNCCLCommunicator)
    made._open(tp_cpu_group, tp_rank, tp_size, device, num_bytes, timeout_s)
    return made


def _new_word(device: torch.device) -> Tensor:
    """Return what ranks that have nothing to tell each other send."""
    import torch

    return torch.zeros(1, dtype=torch.int32, device=device)


class PyNCCLCommunicator:
    """A :class:`Communicator` over NCCL, made by :func:`init_pynccl`.

    Every call queues one NCCL operation on the current stream of the communicator's GPU, without a
    copy and without a synchronisation, and may be captured in a CUDA graph. A call on another
    stream than the one before comes behind it. One thread at a time.

    Each call has ``timeout_s`` seconds from when it is made to when the GPU is done with it. When
    they are over, the communicator is aborted, so that whatever waits for the GPU goes on with what
    is there, and the next call, or :meth:`check`, raises :class:`jitkern.CommTimeoutError`. So it
    does before that where NCCL hears of a rank's end, as over a network; it is
    :class:`jitkern.CommError` where NCCL fails, and no rank is gone. Replays of a graph make no
    calls here: :meth:`watch` behind one puts it under the deadline. Graphs that have captured the
    communicator must be gone before :meth:`close`, and an abort is over only when they are.

    A communicator that has failed is closed; ranks that are left make a new one, over a new group.

    Attributes
    ----------
    rank, size : int
    device : torch.device
    timeout_s : float
    nccl_version : str
        Such as ``"2.28.9"``.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    nccl_version: str
    _calls: _Functions  # once it is open

    def __init__(self) -> None:
        raise TypeError("PyNCCLCommunicator: made by init_pynccl(tp_rank=..., ...)")

    def _open(
        self,
        group: Any,
        rank: int,
        size: int,
        device: torch.device,
        num_bytes: int,
        timeout_s: float,
    ) -> None:
        import torch

        self.nccl_version = nccl_library.version_name(nccl_library.load())
        self._failing = threading.Lock()  # while one thread finds out why
        self._is_marking = threading.Lock()  # held for as long as a launch queue is full
        self._functions: _Functions | None = None
        self._error: CommError | None = None  # the first, which every later call raises again
        self._is_over = False  # closed by its user
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        facts = {"nccl": self.nccl_version, "buffer_bytes": num_bytes, "_gpu": gpu}
        self._rendezvous = Rendezvous(
            *("init_pynccl", group, rank, size),
            timeout_s=min(timeout_s, MAX_TIMEOUT_S), position=self._position, facts=facts,
        )  # fmt: skip
        self.rank, self.size, self.timeout_s, self.device = rank, size, timeout_s, device
        try:
            self._refuse_shared_gpus()
            own_id = nccl_library.unique_id().hex() if rank == 0 else ""
            unique_id = self._rendezvous.exchange("unique_id", own_id)[0]
            self._connect(bytes.fromhex(unique_id))
            self._word = _new_word(device)
            self._buffer = _Buffer(device, num_bytes)
            if self._buffer.is_of_nccl:
                status = self._calls.register_memory(self._buffer.address, num_bytes)
                self._settle("init_pynccl", status)
        except BaseException as error:
            found = _as_comm_error(error)
            self._fail(lambda: found)
            self._end("has not made it")
            raise

    def _connect(self, unique_id: bytes) -> None:
        make = host.op("make_nccl_communicator")
        made = make(self.device.index, self.rank, self.size, self.timeout_s)
        for function in made:
            function.release_gil = True  # whatever is the default: another thread has to watch
        functions = _Functions(*made)
        try:
            status = call_with_timeout(lambda: functions.open(unique_id), self.timeout_s)
        except TimeoutError:
            functions.abort()  # once it is made, for nobody
            raise self._rendezvous.timed_out("init_pynccl", 0) from None
        self._functions = self._calls = functions
        self._settle("init_pynccl", status)
        _open_ones.value.add(self)
        if math.isfinite(self.timeout_s):
            _watch.value.add(self)

    def _refuse_shared_gpus(self) -> None:
        seen: dict[str, int] = {}
        for peer in self._rendezvous.peers:
            gpu = peer.facts["_gpu"]
            other = seen.setdefault(gpu, peer.rank)
            if other != peer.rank:
                raise CommError(
                    f"init_pynccl: ranks {other} and {peer.rank} are on one GPU ({gpu}), expected "
                    "one for each; call torch.cuda.set_device(rank) first, or give device="
                )

    # -- calls -------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place. See :meth:`Communicator.all_reduce`."""
        code = _code("all_reduce", op)
        self._run("all_reduce", self._calls.all_reduce, (x,), (), (x, code))

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``, by rank. ``x`` may be its own part of it."""
        self._run("all_gather", self._calls.all_gather, (output,), (x,), (output, x))

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, and write part ``rank`` of ``size`` to ``output``."""
        code = _code("reduce_scatter", op)
        function = self._calls.reduce_scatter
        self._run("reduce_scatter", function, (output,), (x,), (output, x, code))

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Write rank ``src``'s ``x`` to that of every rank."""
        self._run("broadcast", self._calls.broadcast, (x,), (), (x, src))

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``."""
        self._run("send", self._calls.send, (), (x,), (x, dst))

    def recv(self, x: Tensor, src: int) -> None:
        """Write to ``x`` what rank ``src`` sends."""
        self._run("recv", self._calls.recv, (x,), (), (x, src))

    def all_to_all(
        self,
        output: Tensor,
        x: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> None:
        """Send part r of ``x`` to rank r, and receive its part. Splits are rows for each rank."""
        if output_splits is not None:
            output_splits = rows_arg("all_to_all", "output_splits", output_splits)
        if input_splits is not None:
            input_splits = rows_arg("all_to_all", "input_splits", input_splits)
        args = (output, x, output_splits, input_splits)
        self._run("all_to_all", self._calls.all_to_all, (output,), (x,), args)

    def barrier(self) -> None:
        """Return when every rank has come to it, and the GPU is done with all before it.

        Raises RuntimeError while the current stream is being captured.
        """
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("barrier: called in a graph, expected outside: the host waits in it")
        self._run("barrier", self._calls.barrier, (), (), (self._word,))
        if math.isfinite(self.timeout_s):
            self._settle("barrier", self._calls.wait_done())
        else:
            torch.cuda.current_stream(self.device).synchronize()

    def watch(self) -> None:
        """Put all that is queued on the current stream under the deadline, such as a graph replay.

        Every rank calls it, as any other call; it queues nothing.
        """
        self._run("watch", self._calls.watch, (), (), (self._word,))

    def check(self) -> None:
        """Raise if a call has failed, or was not done in time; look at once, wait for nothing."""
        self._look()
        if self._error is not None:
            raise self._error.with_traceback(None)

    # -- memory ------------------------------------------------------------------------------------

    def get_buffer(self) -> int:
        """Return the address of :attr:`buffer`, 0 if there is none."""
        return self._buffer.address

    @property
    def buffer(self) -> Tensor:
        """The registered memory, uint8: what lies there is sent without a copy."""
        return self._buffer.whole()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the registered memory, on every rank at the same place of it.

        Ranks make the same calls of it in the same order. Raises ValueError where it is full.
        """
        return self._buffer.empty(shape, dtype)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all calls, and end the communicator together with the others.

        Raises CommTimeoutError where they do not come; then it is aborted. Does nothing to one that
        has ended.
        """
        if self._is_over:
            return
        try:
            if self._error is None:
                self._settle("close", self._calls.finish())
                self._free()
        except BaseException:
            self._abort()
            raise
        finally:
            self._end("has closed it")

    destroy = close  # as mini-sglang calls it

    def abort(self) -> None:
        """End the communicator at once: its operations on the GPU return, with wrong results."""
        if not self._is_over:
            self._end("has aborted it")
            self._abort()

    def __enter__(self) -> PyNCCLCommunicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()  # the other ranks may not come to a close()

    # -- what became of a call ---------------------------------------------------------------------

    def _run(
        self,
        name: str,
        function: Call,
        written: tuple[Any, ...],
        read: tuple[Any, ...],
        args: tuple[Any, ...],
    ) -> None:
        """Make a call. `written` and `read` are its tensors, `args` what C++ gets, these first."""
        if not dispatch.in_inference_mode() and not dispatch.may_write(written, read):
            tensors = _tensors(name, args)
            dispatch.refuse(name, dict(list(tensors.items())[: len(written)]), tensors)
        try:
            status = function(*args)
        except (RuntimeError, ValueError) as error:
            name_unreadable(error, name, **_tensors(name, args))
        if status:
            self._settle(name, status)
        if written:
            dispatch.wrote(*written)

    def _settle(self, op: str, status: int) -> None:
        """Raise for a call that was not made, or not done in time."""
        if status == _DONE:
            return
        if status == _TRACED:
            raise RuntimeError(
                f"{op}: called while a tracer or a dispatch mode of PyTorch is active, expected "
                "neither: it would see nothing of the call"
            )
        if status == _LATE:
            self._fail(lambda: self._late_error(op))
        elif status == _FAILED:
            self._fail(lambda: self._broken_error(op, self._calls.trouble()))
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._rendezvous.check(op)
        raise CommError(f"{op}: another thread has ended the communicator")

    def _look(self) -> None:
        """See whether a call has come to its deadline: for the thread that watches."""
        if self._is_over or self._error is not None or self._failing.locked():
            return
        try:
            progress = self._progress()
            if progress.is_open and not self._is_marking.locked():
                with suppress(TimeoutError):  # behind a full launch queue
                    call_with_timeout(self._mark, _MARK_S)
                progress = self._progress()
            if trouble := progress.trouble:
                op = progress.last_op or "init_pynccl"
                self._fail(lambda: self._broken_error(op, trouble), wait_s=0)
            elif progress.waiting_s > self.timeout_s:
                self._fail(lambda: self._late_error(progress.op), wait_s=0)
        except Exception as error:  # a driver that is gone: the thread watches others as well
            found = _as_comm_error(error)
            self._fail(lambda: found, wait_s=0)

    def _mark(self) -> None:
        with self._is_marking:
            self._calls.mark()

    def _late_error(self, op: str) -> CommError:
        """Return the error for the oldest call that is not done, or the last one."""
        op, number, ops, peer = self._oldest(op)
        return self._rendezvous.timed_out(op, number, ops, peer=peer, timeout_s=self.timeout_s)

    def _broken_error(self, op: str, trouble: str) -> CommError:
        """As NCCL cannot go on: over a network it hears of a rank's end before any deadline.

        With no call on its way it was the last one: one that is captured is done in a replay.
        """
        op, number, ops, peer = self._oldest(op)
        trouble = f"NCCL {self.nccl_version}: {trouble}"
        return self._rendezvous.broken(op, number, trouble, ops, peer=peer)

    def _oldest(self, op: str) -> tuple[str, int, list[str], int]:
        found = self._progress()
        if found.waiting_s < 0:
            return op, found.num_calls, [], -1
        return str(found.op) or op, found.number, [*map(str, found.ops)], found.peer

    def _progress(self) -> _Progress:
        return _Progress(*self._calls.progress())

    def _position(self) -> tuple[int, str]:
        if self._functions is None:
            return 0, ""
        progress = self._progress()
        return progress.num_calls, str(progress.last_op)

    def _fail(self, why: Callable[[], CommError], wait_s: float = _ABORT_S) -> None:
        """Keep the first error, tell the others, and free whoever waits for the GPU."""
        with self._failing:
            if self._error is not None or self._is_over:
                return
            self._error = why()
        self._rendezvous.fail(self._error)
        self._abort(wait_s)

    def _abort(self, wait_s: float = _ABORT_S) -> None:
        if self._functions is not None:
            with suppress(TimeoutError):
                call_with_timeout(self._functions.abort, wait_s)

    def _free(self) -> None:
        """Free what has ended together with the others: NCCL waits for ranks, and for graphs."""
        is_captured = self._calls.num_captured() > 0
        limit_s = min(self.timeout_s, _GRAPHS_S) if is_captured else self.timeout_s
        try:
            call_with_timeout(self._calls.free, limit_s)
        except TimeoutError:
            if not is_captured:
                raise self._rendezvous.timed_out("close", self._progress().number) from None
            raise CommError(
                "close: graphs that have captured the communicator are there, expected none: "
                "delete them before; NCCL frees it when they are gone"
            ) from None
        except RuntimeError as error:
            raise CommError(f"close: NCCL {self.nccl_version}: {error}") from error

    def _end(self, how: str) -> None:
        """Make no more calls."""
        self._is_over = True
        self._rendezvous.close(how)
        _watch.value.discard(self)
        _open_ones.value.discard(self)


def _as_comm_error(error: BaseException) -> CommError:
    if isinstance(error, CommError):
        return error
    return CommError(f"init_pynccl: {type(error).__name__}: {error}")


def _code(call: str, op: str) -> int:
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        expected = f"{', '.join(REDUCE_OPS[:-1])} or {REDUCE_OPS[-1]}"
        raise ValueError(f"{call}: op: {op!r}, expected {expected}") from None


def _tensors(call: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the tensors among a call's arguments by their names, what is written first."""
    return dict(zip(("output", "x") if call in _WITH_OUTPUT else ("x",), args, strict=False))


# -- the thread that watches deadlines -------------------------------------------------------------


class _Watch:
    """One thread for all communicators of the process, from the first of them on."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[PyNCCLCommunicator] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, one: PyNCCLCommunicator) -> None:
        with self._changed:
            self._all.add(one)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="jitkern-comm-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def discard(self, one: PyNCCLCommunicator) -> None:
        with self._changed:
            self._all.discard(one)

    def _run(self) -> None:
        while True:
            with self._changed:
                every_s = min((one.timeout_s / 10 for one in self._all), default=None)
                if every_s is not None:
                    every_s = min(max(every_s, _LOOK_S[0]), _LOOK_S[1])
                self._changed.wait(every_s)  # for the next one, if there is none
                now = list(self._all)
            for one in now:
                one._look()
            del now[:]  # nothing is kept alive between two looks
            one = None  # type: ignore[assignment]


_watch = ForkLocal(_Watch)
_open_ones: ForkLocal[weakref.WeakSet[PyNCCLCommunicator]] = ForkLocal(weakref.WeakSet)


@atexit.register
def _at_exit() -> None:
    """Leave no kernel behind that waits for other ranks: the driver would wait for it."""
    deadline = time.monotonic() + _EXIT_S
    for one in list(_open_ones.value):
        with suppress(Exception):  # whatever a driver says that is going away
            while one._progress().waiting_s >= 0:
                one._calls.mark()
                if time.monotonic() > deadline:
                    one._abort()
                    break
                time.sleep(0.01)


# -- registered memory -----------------------------------------------------------------------------


class _Piece:
    """A range of the memory as PyTorch takes it; the tensor made of it keeps it."""

    def __init__(self, memory: _Memory, begin: int, num_bytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.address + begin, False),
            "version": 3,
        }


class _Memory:
    """Device memory that is freed when nothing is made of it any more."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.ordinal = device.index
        self.address = int(host.module()["nccl_allocate"](self.ordinal, num_bytes))
        self.is_of_nccl = self.address != 0
        if not self.is_of_nccl:  # before 2.19: calls are the same, and take NCCL a copy
            self._tensor = _new_bytes(num_bytes, device)
            self.address = self._tensor.data_ptr()

    def __del__(self) -> None:
        if getattr(self, "is_of_nccl", False):
            with suppress(Exception):  # at the end of the process there may be no driver any more
                host.module()["nccl_free"](self.ordinal, self.address)


def _new_bytes(num_bytes: int, device: torch.device) -> Tensor:
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _as_tensor(piece: _Piece, device: torch.device) -> Tensor:
    import torch

    return torch.as_tensor(piece, device=device)


class _Buffer:
    """Registered memory, given out piece by piece in the order in which it is asked for.

    Ranks ask in the same order, so that what they make at the same time lies at the same place:
    that is what NCCL's fastest kernels need. When all tensors of it are gone, it begins anew.

    Raises
    ------
    RuntimeError
        There is not that much memory on the GPU.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._memory = _Memory(device, num_bytes) if num_bytes else None
        self._used = 0
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()

    @property
    def address(self) -> int:
        """Where it begins; 0 if there is none."""
        return 0 if self._memory is None else self._memory.address

    @property
    def is_of_nccl(self) -> bool:
        """Whether it is memory that can be registered."""
        return self._memory is not None and self._memory.is_of_nccl

    def whole(self) -> Tensor:
        """Return all of it as uint8."""
        return self._tensor(0, self.num_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in it. Raises ValueError where it is full."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not self._pieces:
            self._used = 0
        left = self.num_bytes - self._used
        if num_bytes > left:
            raise ValueError(
                f"empty: shape {tuple(shape)} of {dtype}: {num_bytes} bytes, expected at most "
                f"{left}, which are left of the {self.num_bytes} of the communicator's buffer; "
                "give a larger max_size_bytes"
            )
        begin = self._used
        self._used += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._tensor(begin, num_bytes).view(dtype).view(tuple(shape))

    def _tensor(self, begin: int, num_bytes: int) -> Tensor:
        if num_bytes == 0 or self._memory is None:
            return _new_bytes(0, self._device)
        piece = _Piece(self._memory, begin, num_bytes)
        self._pieces.add(piece)
        return _as_tensor(piece, self._device)
