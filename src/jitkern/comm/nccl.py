"""``init_pynccl``: NCCL without PyTorch in between, and with a deadline for each call."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jitkern.args import MAX_TIMEOUT_S, choice_arg, device_arg, int_arg, seconds_arg
from jitkern.comm.args import call_cpp, namespace
from jitkern.comm.peer_memory import as_torch
from jitkern.comm.protocol import REDUCE_OPS, Closing, ReduceOp
from jitkern.comm.rendezvous import Rendezvous
from jitkern.comm.threads import call_with_timeout, watch
from jitkern.env import settings
from jitkern.errors import CommError, UnsupportedError
from jitkern.fs import ForkLocal
from jitkern.host import library as host

# How long to wait:
_ABORT_S = 1.5  # until an abort returns, which may wait for graphs of the communicator
_GRAPHS_S = 10.0  # until graphs are deleted, when a communicator is closed
_EXIT_S = 5.0  # until calls end, when the process does

# CallStatus in csrc/comm/communicator.h.
_DONE, _STOPPED, _LATE, _FAILED = range(4)


def init_pynccl(
    *,
    tp_rank: int,
    tp_size: int,
    tp_cpu_group: Any,
    max_size_bytes: int = 0,
    device: torch.device | str | int | None = None,
    timeout_s: float = 600.0,
) -> PyNCCLCommunicator:
    """Return a communicator over NCCL 2.27 or newer. Collective: all ranks call it.

    Uses the libnccl that PyTorch has loaded, else the system's; ``JITKERN_NCCL`` names another.
    The parameters have mini-sglang's names: ``tp_rank``, ``tp_size``, ``tp_cpu_group`` and
    ``max_size_bytes`` are ``rank``, ``world_size``, ``group`` and ``max_bytes`` elsewhere.

    Parameters
    ----------
    tp_rank, tp_size : int
        This rank, 0 to ``tp_size - 1``, and the number of ranks.
    tp_cpu_group : torch.distributed.ProcessGroup or torch.distributed.Store
        A gloo group of exactly these ranks, or a store that nothing else uses. Only the set-up and
        errors use it.
    max_size_bytes : int
        Bytes of ``buffer``, device memory that is registered with NCCL; at most 1 GiB.
    device : torch.device, str or int, optional
        This rank's GPU. Default: the current GPU.
    timeout_s : float
        Seconds within which the GPU must finish a call, and all ranks the set-up. ``math.inf``: no
        limit.

    Raises
    ------
    CommTimeoutError, CommError
        Ranks did not arrive in time, and the error names them. Or two ranks have the same number or
        GPU, or versions of NCCL differ.
    UnsupportedError
        There is no usable NCCL; the message says what to install.
    """
    call = "init_pynccl"
    timeout_s = seconds_arg(call, timeout_s, most=math.inf)
    num_bytes = min(int_arg(call, "max_size_bytes", max_size_bytes, 0), 1 << 30)
    return PyNCCLCommunicator()._init(tp_cpu_group, tp_rank, tp_size, num_bytes, device, timeout_s)


class PyNCCLCommunicator(Closing):
    """A ``Communicator`` over NCCL, returned by ``init_pynccl``.

    Each call queues one NCCL operation on the current stream, without a copy or a synchronisation.
    CUDA graphs can capture it. Calls on several streams run in the order of the calls. Only one
    thread at a time may use a communicator.

    If the GPU has not finished a call within ``timeout_s``, or NCCL reports an error, the
    communicator is aborted: threads that wait for the GPU continue, and the tensors of that call
    hold wrong values. The next call, or ``check``, raises ``CommTimeoutError``, or ``CommError`` if
    no rank is missing. Then make a new communicator over a new group. Before ``close``, delete
    graphs that captured calls.

    Attributes: ``rank``, ``world_size``, ``device``, ``timeout_s``, and ``nccl_version``, such as
    ``"2.28.9"``.
    """

    _calls: Any = None  # the functions of csrc/comm/collectives.cc

    def _init(
        self, group: Any, rank: int, world_size: int, num_bytes: int, device: Any, timeout_s: float
    ) -> PyNCCLCommunicator:
        self.device: torch.device = device_arg("init_pynccl", "device", device)
        if self.device.type != "cuda":
            came = "none was given, and PyTorch sees no GPU" if device is None else device
            raise ValueError(f"init_pynccl: device: {came}, expected a GPU")
        self.nccl_version: str = load()
        self._failing = threading.Lock()  # held while one thread finds out why
        self._error: CommError | None = None  # the first one; every later call raises it again
        self._is_closed = False
        facts = {"nccl": self.nccl_version, "buffer_bytes": num_bytes}
        self._rendezvous = Rendezvous(
            "init_pynccl",
            group,
            rank,
            world_size,
            timeout_s=min(timeout_s, MAX_TIMEOUT_S),
            position=self._position,
            facts=facts,
        )
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        try:
            own_id = bytes(host.module()["nccl_unique_id"]()) if rank == 0 else b""
            unique_id = self._rendezvous.exchange("unique_id", own_id.decode("latin-1"), str)[0]
            self._connect(unique_id.encode("latin-1", "replace"))
            self._unused = _zeros(1, "int32", self.device)  # the tensor of calls without one
            self.buffer: Tensor = _zeros(0, "uint8", self.device)
            """The registered memory, uint8: views of it at the same offset on every rank, such as
            ``buffer[:4096].view(torch.bfloat16)``, are sent without a copy."""
            if num_bytes:
                self.buffer = as_torch(host.module()["nccl_allocate"](self.device.index, num_bytes))
                status = self._calls.register_memory(self.buffer.data_ptr(), num_bytes)
                self._settle("init_pynccl", status)
        except BaseException as error:
            self._fail("init_pynccl", error)
            self._end("has not made it")
            raise
        return self

    def _connect(self, unique_id: bytes) -> None:
        make = host.Function("make_nccl_communicator")
        calls = namespace(make(self.device.index, self.rank, self.world_size, self.timeout_s))
        for function in vars(calls).values():
            function.release_gil = True  # the thread below has to look for late calls
        try:
            status = call_with_timeout(lambda: calls.open(unique_id), self.timeout_s)
        except TimeoutError:
            calls.abort()  # NCCL's communicator, as soon as it is made
            raise self._rendezvous.diagnose("init_pynccl", 0, timeout_s=self.timeout_s) from None
        self._calls = calls
        self._settle("init_pynccl", status)
        _open_communicators.value.add(self)
        if math.isfinite(self.timeout_s):
            # Not the answering thread, which hangs if the store's server does.
            own = weakref.ref(self)
            watch("deadline", lambda: (comm := own()) is not None and comm._look())

    # -- calls -------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place. See ``Communicator.all_reduce``."""
        self._run("all_reduce", "x", (x,), (), x, _op_number("all_reduce", op))

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``, by rank. ``x`` may be its own part of it."""
        self._run("all_gather", "output x", (output,), (x,), output, x)

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, and write part ``rank`` of ``world_size`` to ``output``."""
        number = _op_number("reduce_scatter", op)
        self._run("reduce_scatter", "output x", (output,), (x,), output, x, number)

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Copy ``x`` of rank ``src`` to ``x`` of every rank."""
        self._run("broadcast", "x", (x,), (), x, src)

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``."""
        self._run("send", "x", (), (x,), x, dst)

    def recv(self, x: Tensor, src: int) -> None:
        """Receive ``x`` from rank ``src``."""
        self._run("recv", "x", (x,), (), x, src)

    def barrier(self) -> None:
        """Return after every rank has called it and the GPU has finished all earlier work.

        RuntimeError while the current stream is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("barrier: called in a graph, expected outside: the host waits in it")
        self._run("barrier", "", (), (), self._unused)
        self._settle("barrier", self._calls.wait_done())

    def watch(self) -> None:
        """Start the deadline for the work queued on the current stream, such as a graph replay.

        All ranks call it, in the same order as other calls. It queues no work.
        """
        self._run("watch", "", (), (), self._unused)

    def check(self) -> None:
        """Raise if a call has failed or was not finished in time. Does not wait."""
        self._look()
        if self._error is not None:
            raise self._error.with_traceback(None)

    # -- registered memory -------------------------------------------------------------------------

    def get_buffer(self) -> int:
        """Return the address of ``buffer``, 0 if there is none: mini-sglang's method."""
        return self.buffer.data_ptr()

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all calls and end the communicator. Collective.

        If other ranks do not call it in time, the communicator is aborted: CommTimeoutError.
        """
        if self._is_closed:
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

    def destroy(self) -> None:
        """Alias of ``close``: mini-sglang's name."""
        self.close()

    def abort(self) -> None:
        """End the communicator at once; its operations on the GPU end with wrong results."""
        if not self._is_closed:
            self._end("has aborted it")
            self._abort()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self.abort()  # the other ranks may not come to a close()

    # -- calls and their errors --------------------------------------------------------------------

    def _run(
        self, op: str, names: str, written: tuple[Any, ...], read: tuple[Any, ...], *args: Any
    ) -> None:
        """Make a call; ``names`` are those of the tensors that it writes and reads."""
        if status := call_cpp(op, getattr(self._calls, op), args, names, written, read):
            self._settle(op, status)

    def _settle(self, op: str, status: int) -> None:
        """Raise for a call that was not made, or not done in time."""
        if status == _DONE:
            return
        if status in (_LATE, _FAILED):
            self._fail(op, is_late=status == _LATE)
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._rendezvous.check(op)
        raise CommError(f"{op}: another thread has ended the communicator")

    def _look(self) -> bool:
        """Fail if a call is late, or NCCL has an error. Return whether to look again."""
        if self._is_closed or self._error is not None:
            return False
        if self._failing.locked():
            return True
        try:
            progress = self._progress()
            if progress.error or progress.waiting_s > self.timeout_s:
                self._fail("init_pynccl", is_late=not progress.error)
        except Exception as error:  # the driver's
            self._fail("init_pynccl", error)
        return True

    def _fail(self, op: str, error: Any = None, *, is_late: bool = False) -> None:
        """Keep the first error, tell the others, and free threads that wait for the GPU.

        If `error` is None, report the oldest unfinished call, or the last call of a graph replay:
        a timeout if `is_late`, else NCCL's error.
        """
        with self._failing:
            if self._error is not None or self._is_closed:
                return
            if isinstance(error, CommError):
                self._error = error
            elif error is not None:
                self._error = CommError(f"{op}: {type(error).__name__}: {error}")
            else:
                progress = self._progress()
                because = CommError(f"NCCL {self.nccl_version}: {progress.error}")
                self._error = self._rendezvous.diagnose(
                    str(progress.op) or op,
                    progress.number,
                    peer=progress.peer,
                    because=None if is_late else because,
                    timeout_s=self.timeout_s,
                )
        self._rendezvous.fail(self._error)
        self._abort()

    def _progress(self) -> Any:
        """Return this rank's progress: see csrc/comm/communicator.h."""
        return namespace(self._calls.progress())

    def _position(self) -> tuple[int, str]:
        if self._calls is None:
            return 0, ""
        progress = self._progress()
        return progress.num_calls, str(progress.last_op)

    def _abort(self) -> None:
        if self._calls is not None:
            with suppress(TimeoutError):
                call_with_timeout(self._calls.abort, _ABORT_S)

    def _free(self) -> None:
        """Free NCCL's communicator, which waits for the other ranks and for graphs."""
        progress = self._progress()
        limit_s = _GRAPHS_S if progress.num_captured else self.timeout_s
        try:
            call_with_timeout(self._calls.free, limit_s)
        except TimeoutError:
            if not progress.num_captured:
                raise self._rendezvous.diagnose("close", progress.number) from None
            raise CommError(
                "close: graphs that have captured the communicator are there, expected none: "
                "delete them before; NCCL frees it when they are gone"
            ) from None
        except RuntimeError as error:
            raise CommError(f"close: NCCL {self.nccl_version}: {error}") from error

    def _end(self, how: str) -> None:
        self._is_closed = True
        self._rendezvous.close(how)
        _open_communicators.value.discard(self)


def _op_number(call: str, op: str) -> int:
    return REDUCE_OPS.index(choice_arg(call, "op", op, REDUCE_OPS))


_open_communicators: ForkLocal[weakref.WeakSet[PyNCCLCommunicator]] = ForkLocal(weakref.WeakSet)


@atexit.register
def _at_exit() -> None:
    """End kernels that wait for other ranks: at the exit the driver would wait for them."""
    deadline = time.monotonic() + _EXIT_S
    for communicator in list(_open_communicators.value):
        with suppress(Exception):  # the driver may be gone
            while communicator._progress().waiting_s >= 0:
                if time.monotonic() > deadline:
                    communicator._abort()
                    break
                time.sleep(0.01)


def _zeros(count: int, dtype: str, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=getattr(torch, dtype), device=device)


# -- libnccl ---------------------------------------------------------------------------------------


@cache
def load() -> str:
    """Load the libnccl that PyTorch has, else the system's; return its version as 2.28.9.

    Raises UnsupportedError, which says what to install.
    """
    # A CUDA build of PyTorch has loaded its libnccl, which dlopen then finds by name.
    setting = settings().nccl
    try:
        return str(host.module()["nccl_load"](str(setting or "libnccl.so.2")))
    except RuntimeError as error:
        cure = "install a CUDA build of torch"
        if setting is not None:
            cure = "JITKERN_NCCL names it; unset that to use the one that torch brings"
        raise UnsupportedError(f"init_pynccl: no usable NCCL: {error}; {cure}") from error
