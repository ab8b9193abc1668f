"""The calls of one NCCL communicator: what became of each, and the end of all of them."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from jitkern.comm.guard import Guard, Position
from jitkern.comm.protocol import REDUCE_OPS
from jitkern.comm.watch import forget, watch
from jitkern.errors import CommError
from jitkern.forks import PerProcess
from jitkern.host import module as host
from jitkern.ops import dispatch
from jitkern.unreadable import name_unreadable

_ABORT_S = 1.5  # that is waited for an abort: it is over only when graphs are gone, too
_MARK_S = 0.1  # that is waited for an event, which takes 2 us where the launch queue has room
_GRAPHS_S = 10.0  # that they get to go away when a communicator is closed
_EXIT_S = 5.0  # that what is in flight gets when the process ends

# What became of a call: CallStatus in csrc/comm/communicator.h.
_DONE, _STOPPED, _LATE, _FAILED, _TRACED = range(5)
_WITH_OUTPUT = ("all_gather", "reduce_scatter", "all_to_all")
_BETWEEN_TWO = ("send", "recv")
_REDUCING = ("all_reduce", "reduce_scatter")
_PARTS = ("items_sent", "items_received")

Call = Callable[..., int]


class Functions(NamedTuple):
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
    begin_group: Call
    end_group: Call
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
    num_completed: int
    last_op: str
    waiting_s: float  # since the oldest call that is not done was made, -1: none
    op: str  # that call
    number: int
    links: Sequence[tuple[int, bool, int]]  # of a call between some ranks: peer, is_send, number
    sent: Sequence[int]  # calls so far, by rank
    received: Sequence[int]
    trouble: str  # of NCCL
    is_open: bool  # the last call has no event yet
    ops: Sequence[str]  # from that call to the next event: the one that is not done is among them


class NcclCalls:
    """Makes calls, raises for those that fail, and ends the communicator when one has.

    Attributes
    ----------
    functions : Functions
        From :meth:`open` on.
    guard : Guard
    timeout_s : float
    error : CommError or None
        The first, which every later call raises again.
    ended : str or None
        How it was ended by its user.
    """

    functions: Functions
    guard: Guard

    def __init__(self, version: str, timeout_s: float) -> None:
        self._version = version
        self.timeout_s = timeout_s
        self._failing = threading.Lock()
        self._asking = threading.Lock()  # while one thread asks why NCCL has failed
        self._is_marking = threading.Lock()  # held for as long as a launch queue is full
        self._kept: list[Any] | None = None  # tensors of a group, until it is sent
        self._num_compared = 0
        self.error: CommError | None = None
        self.ended: str | None = None

    def open(self, ordinal: int, unique_id: bytes) -> None:
        """Make the communicator, with all ranks of `guard`."""
        make = host.op("make_nccl_communicator")
        made = make(ordinal, self.guard.rank, self.guard.size, self.timeout_s)
        for function in made:
            function.release_gil = True  # whatever is the default: another thread has to watch
        functions = Functions(*made)
        status = _beside(lambda: functions.open(unique_id), self.timeout_s)
        if status is None:
            functions.abort()  # once it is made, for nobody
            raise self.guard.timed_out(self.guard.name, 0)
        self.functions = functions
        self.settle(self.guard.name, status)
        _open_ones.value.add(self)
        if math.isfinite(self.timeout_s):
            watch(self)

    @property
    def is_in_group(self) -> bool:
        """Whether calls are kept until the group ends."""
        return self._kept is not None

    def run(
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
        if self.guard.is_debug and name not in _BETWEEN_TWO:
            self._compare(name, args)
        if self._kept is not None:
            self._kept.append(args)
        try:
            status = function(*args)
        except (RuntimeError, ValueError) as error:
            name_unreadable(error, name, **_tensors(name, args))
        if status:
            self.settle(name, status)
        if written:
            dispatch.wrote(*written)

    def begin_group(self) -> None:
        """Keep calls from now on."""
        self.settle("group", self.functions.begin_group())
        self._kept = []

    def end_group(self, is_to_send: bool) -> None:
        """Send what was kept as one, or forget it."""
        kept, self._kept = self._kept, None
        # Its stream is torch's current one of the device of a tensor that comes with the call.
        tensor = kept[0][0] if kept else None
        self.settle("group", self.functions.end_group(is_to_send, tensor))

    def settle(self, op: str, status: int) -> None:
        """Raise for a call that was not made, or not done in time."""
        if status == _DONE:
            return
        if status == _TRACED:
            raise RuntimeError(
                f"{op}: called while a tracer or a dispatch mode of PyTorch is active, expected "
                "neither: it would see nothing of the call"
            )
        if status == _LATE:
            self._be_late(op)
        elif status == _FAILED:
            self._be_broken(op, self.functions.trouble())
        if self.error is not None:
            raise self.error.with_traceback(None)
        self.guard.check(op)
        raise CommError(f"{op}: another thread has ended the communicator")

    def look(self) -> None:
        """See whether a call has come to its deadline: for the thread that watches."""
        if self.ended is not None or self.error is not None or self._asking.locked():
            return
        try:
            progress = self._progress()
            if progress.is_open and not self._is_marking.locked():
                _beside(self._mark, _MARK_S)
                progress = self._progress()
            if progress.trouble:
                op = progress.last_op or self.guard.name
                self._be_broken(op, progress.trouble, wait_s=0)
            elif progress.waiting_s > self.timeout_s:
                self._be_late(str(progress.op), wait_s=0)
        except Exception as error:  # a driver that is gone: the thread watches others as well
            self.fail(error, wait_s=0)

    def _mark(self) -> None:
        with self._is_marking:
            self.functions.mark()

    def _be_late(self, op: str, wait_s: float = _ABORT_S) -> None:
        """Fail, as the oldest call that is not done has come to its deadline."""
        op, number, of_whom = self._oldest(op)
        self.fail(self.guard.timed_out(op, number, **of_whom), wait_s=wait_s)

    def _be_broken(self, op: str, trouble: str, wait_s: float = _ABORT_S) -> None:
        """Fail, as NCCL cannot go on: over a network it hears of a rank's end before any deadline.

        With none on its way it was the last call: one that is captured is done in a replay.
        """
        with self._asking:  # its deadline may come meanwhile
            if self.error is not None or self.ended is not None:
                return
            op, number, of_whom = self._oldest(op)
            text = f"NCCL {self._version}: {trouble}"
            self.fail(self.guard.broken(op, number, text, **of_whom), wait_s=wait_s)

    def _oldest(self, op: str) -> tuple[str, int, dict[str, Any]]:
        """Return the oldest call that is not done, else the last one: op, number and whose it is.

        That is what :meth:`Guard.timed_out` takes: ranks and links, or ops.
        """
        progress = self._progress()
        if progress.waiting_s < 0:
            return op, progress.num_calls, {}
        links: dict[int, list[tuple[str, int]]] = {}
        for peer, is_send, due in progress.links:
            links.setdefault(peer, []).append((self._link(peer, is_send), due))
        if not links:
            return str(progress.op) or op, progress.number, {"ops": [*map(str, progress.ops)]}
        if len(progress.links) != 1:
            return str(progress.op) or op, progress.number, {"links": links}
        peer, [(link, number)] = links.popitem()
        return str(progress.op) or op, number, {"ranks": [peer], "link": link}

    def _link(self, peer: int, is_send: bool) -> str:
        """Return the name that both ranks give what one sends the other."""
        own = self.guard.rank
        return f"rank {own} to rank {peer}" if is_send else f"rank {peer} to rank {own}"

    def position(self) -> Position:
        """Return how far this rank is, for the others."""
        if not hasattr(self, "functions"):
            return Position(0, 0, "")
        progress = self._progress()
        links = {
            self._link(peer, is_send): count
            for is_send, counts in ((True, progress.sent), (False, progress.received))
            for peer, count in enumerate(counts)
            if count
        }
        return Position(progress.num_calls, progress.num_completed, str(progress.last_op), links)

    def fail(self, error: BaseException, wait_s: float = _ABORT_S) -> None:
        """Keep the first error, tell the others, and free whoever waits for the GPU."""
        with self._failing:
            if self.error is not None or self.ended is not None:
                return
            if isinstance(error, CommError):
                self.error = error
            else:
                self.error = CommError(f"{self.guard.name}: {type(error).__name__}: {error}")
        self.guard.fail(self.error)
        self.end(wait_s)

    def end(self, wait_s: float = _ABORT_S) -> None:
        """Abort: what waits on the GPU for other ranks returns."""
        if hasattr(self, "functions"):
            _beside(self.functions.abort, wait_s)

    def free(self) -> None:
        """Free what has ended together with the others.

        Raises
        ------
        CommError
            Graphs hold it: NCCL goes on waiting for them.
        CommTimeoutError
            NCCL is not done with the other ranks.
        """
        is_captured = self.functions.num_captured() > 0
        limit_s = min(self.timeout_s, _GRAPHS_S) if is_captured else self.timeout_s
        if _beside(self.functions.free, limit_s) is not None:
            return
        if is_captured:
            raise CommError(
                "close: graphs that have captured the communicator are there, expected none: "
                "delete them before; NCCL frees it when they are gone"
            )
        raise self.guard.timed_out("close", self._progress().number)

    def close(self, how: str) -> None:
        """Make no more calls."""
        self.ended = how
        self.guard.close(how)
        forget(self)
        _open_ones.value.discard(self)

    def _progress(self) -> _Progress:
        return _Progress(*self.functions.progress())

    def _compare(self, name: str, args: tuple[Any, ...]) -> None:
        """Under JITKERN_COMM_DEBUG=1: raise where another rank makes another call."""
        if self.ended is not None or self.error is not None:
            return  # which C++ says
        self._num_compared += 1
        try:
            if name == "all_to_all":
                said = self.guard.compare(name, self._num_compared, _parts(args, self.guard.size))
                sends, gets = ({r: one[f"_{k}"].split() for r, one in said.items()} for k in _PARTS)
                if any(sends[a][b] != gets[b][a] for a in said for b in said):
                    raise self.guard.mismatch(name, self._num_compared, said)
                return
            signature = {arg: _described(given) for arg, given in _tensors(name, args).items()}
            if isinstance(args[-1], int):
                key, names = ("op", REDUCE_OPS) if name in _REDUCING else ("src", range(1 << 30))
                signature[key] = str(names[args[-1]])
            self.guard.compare(name, self._num_compared, signature)
        except CommError as error:
            self.fail(error)
            raise


def _described(tensor: Any) -> str:
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    return f"{dtype} {list(getattr(tensor, 'shape', ()))}"


def _parts(args: tuple[Any, ...], size: int) -> dict[str, str]:
    """Return what all ranks have in common in an all_to_all, and the items for and from each."""
    output, x, output_splits, input_splits = args
    signature = {"dtype": str(getattr(x, "dtype", None)).removeprefix("torch.")}
    for key, tensor, splits in zip(_PARTS, (x, output), (input_splits, output_splits), strict=True):
        shape = list(getattr(tensor, "shape", ())) or [1]
        rows = [shape[0] / size] * size if splits is None else splits
        items = math.prod(shape[1:])
        signature[f"_{key}"] = " ".join(f"{one * items:g}" for one in rows)
    return signature


def _beside(function: Callable[[], Any], wait_s: float) -> int | None:
    """Call it in a thread of its own, since NCCL may wait for ranks, or graphs, without an end.

    Returns its status, 0 where it has none, or None where it is not over within `wait_s`.
    """
    outcome: list[int | BaseException] = []

    def call() -> None:
        try:
            outcome.append(function() or 0)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call, name="jitkern-comm-beside", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends
        call()
    else:
        thread.join(min(wait_s, threading.TIMEOUT_MAX))
    if not outcome:
        return None
    if isinstance(outcome[0], BaseException):
        raise CommError(f"NCCL: {outcome[0]}") from outcome[0]
    return outcome[0]


def _tensors(call: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the tensors among a call's arguments by their names, what is written first."""
    return dict(zip(("output", "x") if call in _WITH_OUTPUT else ("x",), args, strict=False))


# -- the end of the process ------------------------------------------------------------------------

_open_ones: PerProcess[weakref.WeakSet[NcclCalls]] = PerProcess(weakref.WeakSet)


@atexit.register
def _at_exit() -> None:
    """Leave no kernel behind that waits for other ranks: the driver would wait for it."""
    deadline = time.monotonic() + _EXIT_S
    for calls in list(_open_ones.value):
        # Whatever a driver says that is going away.
        with suppress(Exception):
            while calls._progress().waiting_s >= 0:
                calls.functions.mark()
                if time.monotonic() > deadline:
                    calls.end()
                    break
                time.sleep(0.01)
