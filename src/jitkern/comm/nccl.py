"""``init_pynccl``: NCCL without PyTorch in between, and with a deadline for each call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jitkern.comm import nccl_library
from jitkern.comm.args import MAX_TIMEOUT_S, deadline_arg, device_arg, rows_arg
from jitkern.comm.guard import Guard
from jitkern.comm.nccl_buffer import Buffer
from jitkern.comm.nccl_calls import NcclCalls
from jitkern.comm.protocol import REDUCE_OPS, ReduceOp
from jitkern.env import settings
from jitkern.errors import CommError
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OPS = {name: number for number, name in enumerate(REDUCE_OPS)}  # as NCCL numbers them


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
    version = nccl_library.load()
    num_bytes = min(max_size_bytes, settings().pynccl_max_buffer_bytes)
    made = PyNCCLCommunicator.__new__(PyNCCLCommunicator)
    calls = NcclCalls(nccl_library.version_name(version), timeout_s)
    guard = Guard(
        *("init_pynccl", tp_cpu_group, tp_rank, tp_size),
        timeout_s=min(timeout_s, MAX_TIMEOUT_S),
        position=calls.position,
        facts=_facts(num_bytes, device),
    )
    made._open(guard, calls, device, num_bytes)
    return made


def _facts(num_bytes: int, device: torch.device) -> dict[str, Any]:
    """Return what all ranks have to have in common, and the GPU, which they must not."""
    import torch

    return {
        "nccl": nccl_library.version_name(nccl_library.load()),
        "buffer_bytes": num_bytes,
        "_gpu": str(torch.cuda.get_device_properties(device).uuid),
    }


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

    def __init__(self) -> None:
        raise TypeError("PyNCCLCommunicator: made by init_pynccl(tp_rank=..., ...)")

    def _open(self, guard: Guard, calls: NcclCalls, device: torch.device, num_bytes: int) -> None:
        self._guard, self._calls = guard, calls
        calls.guard = guard
        self.rank, self.size, self.timeout_s = guard.rank, guard.size, calls.timeout_s
        self.device = device
        self.nccl_version = nccl_library.version_name(nccl_library.load())
        try:
            self._refuse_shared_gpus()
            own_id = nccl_library.unique_id() if self.rank == 0 else b""
            ids = guard.exchange("unique_id", own_id.hex(), op=guard.name)
            calls.open(device.index, bytes.fromhex(ids[0]))
            self._functions, self._run = calls.functions, calls.run
            self._word = _new_word(device)
            self._buffer = Buffer(device, num_bytes)
            if self._buffer.is_of_nccl:
                status = self._functions.register_memory(self._buffer.address, num_bytes)
                calls.settle(guard.name, status)
        except BaseException as error:
            calls.fail(error)
            calls.close("not made")
            raise

    def _refuse_shared_gpus(self) -> None:
        seen: dict[str, int] = {}
        for card in self._guard.cards:
            gpu = card.facts["_gpu"]
            other = seen.setdefault(gpu, card.rank)
            if other != card.rank:
                self._guard.wait_read()  # all are to see the reason, not that this one ended
                raise CommError(
                    f"{self._guard.name}: ranks {other} and {card.rank} are on one GPU ({gpu}), "
                    "expected one for each; call torch.cuda.set_device(rank) first, or give device="
                )

    # -- calls -------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place. See :meth:`Communicator.all_reduce`."""
        code = _code("all_reduce", op)
        self._run("all_reduce", self._functions.all_reduce, (x,), (), (x, code))

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``, by rank. ``x`` may be its own part of it."""
        self._run("all_gather", self._functions.all_gather, (output,), (x,), (output, x))

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, and write part ``rank`` of ``size`` to ``output``."""
        code = _code("reduce_scatter", op)
        function = self._functions.reduce_scatter
        self._run("reduce_scatter", function, (output,), (x,), (output, x, code))

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Write rank ``src``'s ``x`` to that of every rank."""
        self._run("broadcast", self._functions.broadcast, (x,), (), (x, src))

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``."""
        self._run("send", self._functions.send, (), (x,), (x, dst))

    def recv(self, x: Tensor, src: int) -> None:
        """Write to ``x`` what rank ``src`` sends."""
        self._run("recv", self._functions.recv, (x,), (), (x, src))

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
        self._run("all_to_all", self._functions.all_to_all, (output,), (x,), args)

    def barrier(self) -> None:
        """Return when every rank has come to it, and the GPU is done with all before it.

        Raises RuntimeError while the current stream is being captured, or in a group.
        """
        import torch

        if self._calls.is_in_group or torch.cuda.is_current_stream_capturing():
            where = "a group" if self._calls.is_in_group else "a graph"
            raise RuntimeError(
                f"barrier: called in {where}, expected outside: the host waits in it"
            )
        self._run("barrier", self._functions.barrier, (), (), (self._word,))
        if math.isfinite(self.timeout_s):
            self._calls.settle("barrier", self._functions.wait_done())
        else:
            torch.cuda.current_stream(self.device).synchronize()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Send the calls of the body as one when it ends: sends and receives that cross, too.

        Nothing is sent where the body raises. Tensors are read when the group is sent.
        """
        self._calls.begin_group()
        try:
            yield
        except BaseException:
            self._calls.end_group(False)
            raise
        self._calls.end_group(True)

    def watch(self) -> None:
        """Put all that is queued on the current stream under the deadline, such as a graph replay.

        Every rank calls it, as any other call; it queues nothing.
        """
        self._run("watch", self._functions.watch, (), (), (self._word,))

    def check(self) -> None:
        """Raise if a call has failed, or was not done in time; look at once, wait for nothing."""
        self._calls.look()
        if self._calls.error is not None:
            raise self._calls.error.with_traceback(None)

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
        calls = self._calls
        if calls.ended is not None:
            return
        try:
            if calls.error is None:
                calls.settle("close", self._functions.finish())
                calls.free()
        except BaseException:
            calls.end()
            raise
        finally:
            calls.close("closed")

    destroy = close  # as mini-sglang calls it

    def abort(self) -> None:
        """End the communicator at once: its operations on the GPU return, with wrong results."""
        if self._calls.ended is None:
            self._calls.close("aborted")
            self._calls.end()

    def shrink(
        self, exclude: Sequence[int], *, timeout_s: float | None = None
    ) -> PyNCCLCommunicator:
        """Abort, and return a communicator of the ranks that are not excluded, in their order.

        All of them call it with the same list. It begins anew with NCCL, which takes as long as
        :func:`init_pynccl`; tensors of :meth:`empty` stay the old one's.

        Raises
        ------
        CommTimeoutError
            Not all of them came within ``timeout_s``, by default that of the communicator.
        TypeError, ValueError
            ``exclude`` holds what is no rank, or this rank, or ``timeout_s`` makes no sense; the
            communicator is as it was.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        limit_s = deadline_arg("shrink", "timeout_s", limit_s)
        excluded = list(exclude)
        for one in excluded:
            if type(one) is not int:
                raise TypeError(f"shrink: exclude: {type_text(one)} in it, expected ranks")
            if not 0 <= one < self.size or one == self.rank:
                raise ValueError(
                    f"shrink: exclude: rank {one}, expected ranks from 0 to {self.size - 1} other "
                    f"than {self.rank}, which is this one"
                )
        self.abort()
        made = PyNCCLCommunicator.__new__(PyNCCLCommunicator)
        calls = NcclCalls(self.nccl_version, limit_s)
        num_bytes = self._buffer.num_bytes
        guard = self._guard.among(
            "shrink",
            [one for one in range(self.size) if one not in excluded],
            timeout_s=min(limit_s, MAX_TIMEOUT_S),
            position=calls.position,
            facts=_facts(num_bytes, self.device),
        )
        made._open(guard, calls, self.device, num_bytes)
        return made

    def __enter__(self) -> PyNCCLCommunicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()  # the other ranks may not come to a close()


def _code(call: str, op: str) -> int:
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        expected = f"{', '.join(REDUCE_OPS[:-1])} or {REDUCE_OPS[-1]}"
        raise ValueError(f"{call}: op: {op!r}, expected {expected}") from None
