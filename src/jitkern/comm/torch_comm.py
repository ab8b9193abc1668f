"""``TorchCommunicator``: the protocol over ``torch.distributed``, of any backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.comm.args import (
    apart_args,
    gather_args,
    pair_args,
    rank_arg,
    reduction_args,
    splits_args,
    tensor_arg,
)
from jitkern.comm.protocol import ReduceOp
from jitkern.comm.rendezvous import Rendezvous, store_of
from jitkern.errors import CommError
from jitkern.ops import dispatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

_TAG = 0x6A6B21  # nothing is ever sent under it
_SOON_S = 0.001  # 0 would mean for ever
_LEFT_S = 1.0
_LOOK_S = 1.0  # between two looks whether a rank of this machine has ended


class _Call(NamedTuple):
    """A call that has begun."""

    op: str
    number: int  # among those of all ranks
    peer: int  # of a call between two ranks, else -1
    start_s: float


class TorchCommunicator:
    """Ranks that compute together over a group of ``torch.distributed``, of any backend.

    See :class:`Communicator` for what the calls do and raise. Making one is collective: all ranks
    of the group do, in the same order, and meet within `timeout_s`.

    Tensors are on the CPU where that is the group's ``gloo``, else on this process's current GPU.
    With gloo a call returns when it is done, at the latest when its deadline is over, or that of
    the group where it is shorter; after that the connections of the group are closed, since that
    is the only way out of gloo, and others that use it fail as well. With NCCL a call is queued on
    the current stream, and the deadline is that of torch's own watchdog, which ends the process:
    give it to ``init_process_group(timeout=...)``. :meth:`barrier` waits for the GPU. Ranks that
    give gloo different sizes do not get an error: gloo ends their processes (SIGABRT).

    It is used by one thread at a time; :meth:`abort` may be called by another.

    Parameters
    ----------
    group
        Such as one of ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``. Default: torch's default group.
    timeout_s
        Seconds that each call, and this one, waits for other ranks; above 0.

    Raises
    ------
    CommTimeoutError
        Ranks did not come, or have ended; it names them.
    CommError
        torch.distributed is not initialised, or the ranks have different versions of jitkern.
    TypeError, ValueError
        An argument makes no sense.

    Examples
    --------
    >>> from torch import distributed as dist  # doctest: +SKIP
    >>> dist.init_process_group("gloo")  # doctest: +SKIP
    >>> with TorchCommunicator(timeout_s=60) as comm:  # doctest: +SKIP
    ...     comm.all_reduce(x)
    """

    def __init__(self, group: ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        import torch
        from torch import distributed as dist

        self._group, self._issued, self._op = group, 0, ""
        store_of("TorchCommunicator", group, None, None)
        backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
        self._devices: list[torch.device] = []
        if "cpu" in backends:
            self._devices.append(torch.device("cpu"))
        if backends.get("cuda", "gloo") != "gloo" and torch.cuda.is_available():
            self._devices.append(torch.device("cuda", torch.cuda.current_device()))
        self._rendezvous = Rendezvous(
            *("TorchCommunicator", group, None, None),
            timeout_s=timeout_s,
            position=self._position,
            facts={"backends": backends},
        )

    @property
    def rank(self) -> int:
        """This process's number in the group, 0 to ``size - 1``."""
        return self._rendezvous.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._rendezvous.size

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._devices)
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, devices=[{devices}])"

    # -- the calls ---------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place; see :meth:`Communicator.all_reduce`."""
        self._check("all_reduce", x=x)
        reduction_args("all_reduce", x, op)
        begun = self._begin("all_reduce")
        if x.numel():
            self._reduce(begun, x.detach().view(-1), op)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``; see :meth:`Communicator.all_gather`."""
        from torch import distributed as dist

        self._check("all_gather", output=output, x=x)
        pair_args("all_gather", output, x)
        gather_args("all_gather", output, x, self.rank, self.size, "output x")
        begun = self._begin("all_gather")
        if x.numel():
            args = _bytes(output), _bytes(x), self._group
            self._do(begun, x, lambda is_async: dist.all_gather_into_tensor(*args, is_async))

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` and write part ``rank`` of it; see :meth:`Communicator.reduce_scatter`."""
        from torch import distributed as dist

        self._check("reduce_scatter", output=output, x=x)
        pair_args("reduce_scatter", output, x)
        reduction_args("reduce_scatter", x, op)
        gather_args("reduce_scatter", x, output, self.rank, self.size, "x output")
        begun = self._begin("reduce_scatter")
        if x.numel() and x.device.type == "cpu":
            # As gloo does it, but that its own wait has no deadline.
            whole = x.detach().view(-1).clone()
            self._reduce(begun, whole, op)
            output.detach().view(-1).copy_(whole.view(self.size, -1)[self.rank])
        elif x.numel():
            args = output.detach().view(-1), x.detach().view(-1), _reduce_op(op), self._group
            self._do(begun, x, lambda is_async: dist.reduce_scatter_tensor(*args, is_async))

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Write rank ``src``'s ``x`` to all ranks'; see :meth:`Communicator.broadcast`."""
        from torch import distributed as dist

        self._check("broadcast", x=x)
        rank_arg("broadcast", "src", src, self.size)
        begun = self._begin("broadcast")
        if x.numel():
            args = _bytes(x), self._world_rank(src), self._group
            self._do(begun, x, lambda is_async: dist.broadcast(*args, is_async))

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``; see :meth:`Communicator.send`."""
        self._check("send", x=x)
        rank_arg("send", "dst", dst, self.size, other_than=self.rank)
        self._move("send", x, dst)

    def recv(self, x: Tensor, src: int) -> None:
        """Write to ``x`` what rank ``src`` sends; see :meth:`Communicator.recv`."""
        self._check("recv", x=x)
        rank_arg("recv", "src", src, self.size, other_than=self.rank)
        self._move("recv", x, src)

    def all_to_all(
        self,
        output: Tensor,
        x: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> None:
        """Send part r of ``x`` to rank r, and so on; see :meth:`Communicator.all_to_all`."""
        from torch import distributed as dist

        call = "all_to_all"
        self._check(call, output=output, x=x)
        pair_args(call, output, x)
        apart_args(call, output, x, "no memory in common")
        outs, ins = splits_args(call, output, x, output_splits, input_splits, self.size)
        begun = self._begin(call)
        row_bytes = x.element_size() * prod(x.shape[1:])
        if row_bytes:
            # Also where this rank has no rows: others may have some for each other.
            sizes = [out * row_bytes for out in outs], [in_ * row_bytes for in_ in ins]
            args = _bytes(output), _bytes(x), *sizes, self._group
            self._do(begun, x, lambda is_async: dist.all_to_all_single(*args, is_async))

    def barrier(self) -> None:
        """Return when every rank has come to it; see :meth:`Communicator.barrier`."""
        import torch

        self._rendezvous.check("barrier")
        # A sum rather than torch's barrier: that of gloo has no deadline in all versions.
        x = torch.zeros(1, dtype=torch.int32, device=self._devices[-1])
        begun = self._begin("barrier")
        self._reduce(begun, x, "sum")
        if x.device.type != "cpu":
            torch.cuda.current_stream(x.device).synchronize()

    # -- the end -----------------------------------------------------------------------------------

    def abort(self) -> None:
        """End what goes on at once, here and in the other ranks; any thread may.

        The connections of the group are closed. Calls that wait, and later ones, raise CommError.
        Once is enough.
        """
        self._rendezvous.close("has aborted it")
        if self._devices[0].type == "cpu":
            self._break_connections()
        if self._devices[-1].type != "cpu":
            from torch import distributed as dist

            group: Any = self._group or dist.group.WORLD
            group.abort()

    def close(self) -> None:
        """Make no call any more, which the others are told should they wait. The group stays.

        It waits for nobody, and once is enough.
        """
        self._rendezvous.close()

    destroy = close

    def __enter__(self) -> TorchCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one call ----------------------------------------------------------------------------------

    def _check(self, call: str, **tensors: Any) -> None:
        self._rendezvous.check(call)
        for name, tensor in tensors.items():
            tensor_arg(call, name, tensor, self._devices)
        # No gradient goes from rank to rank: it would be lost without a word.
        if not dispatch.in_inference_mode() and not dispatch.may_write((), tuple(tensors.values())):
            dispatch.refuse(call, {}, tensors)

    def _begin(self, op: str, peer: int = -1) -> _Call:
        """Count a call whose arguments are right, unless it is between two ranks."""
        self._op = op
        self._issued += peer < 0
        return _Call(op, self._issued, peer, time.monotonic())

    def _position(self) -> tuple[int, str]:
        return self._issued, self._op

    def _do(self, call: _Call, x: Tensor, issue: Callable[[bool], Any]) -> None:
        """Make torch's call, and on the CPU wait for it."""
        work = None
        try:
            if x.device.type == "cpu":
                work = issue(True)
                self._wait(call, work)
            else:
                issue(False)
        except RuntimeError as error:
            if x.device.type == "cpu":
                self._break_connections()
                if work is not None:
                    _leave(work)
            raise self._failure(call, error) from error

    def _wait(self, call: _Call, work: Any) -> None:
        """Wait for a call of gloo, which may not hear of the end of a rank's process."""
        deadline = call.start_s + self._rendezvous.timeout_s
        while call.peer < 0:  # who waits for a message in vain would close all connections
            try:
                _wait(work, min(deadline, time.monotonic() + _LOOK_S))
                return
            except RuntimeError as error:
                if not _is_timeout(error) or work.is_completed() or time.monotonic() >= deadline:
                    raise
            ended = [one for one in self._rendezvous.peers if one.trouble(is_late=False)]
            if ended:
                raise RuntimeError(f"{ended[0]} has ended")
        _wait(work, deadline)

    def _reduce(self, call: _Call, x: Tensor, op: ReduceOp) -> None:
        from torch import distributed as dist

        # Gloo has no average, at least not in all versions; whole numbers are cut as NCCL does it.
        is_divided = op == "avg" and x.device.type == "cpu"
        torch_op = _reduce_op("sum" if is_divided else op)
        self._do(call, x, lambda is_async: dist.all_reduce(x, torch_op, self._group, is_async))
        if is_divided:
            x.div_(self.size, rounding_mode=None if x.is_floating_point() else "trunc")

    def _move(self, op: str, x: Tensor, peer: int) -> None:
        from torch import distributed as dist

        begun = self._begin(op, peer)
        if x.numel():
            args = _bytes(x), self._world_rank(peer), self._group
            wait, queue = (dist.isend, dist.send) if op == "send" else (dist.irecv, dist.recv)
            self._do(begun, x, lambda is_async: (wait if is_async else queue)(*args))

    def _world_rank(self, rank: int) -> int:
        from torch import distributed as dist

        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    # -- when it fails -----------------------------------------------------------------------------

    def _failure(self, call: _Call, error: RuntimeError) -> CommError:
        """Return what to raise for an error of torch."""
        rendezvous = self._rendezvous
        try:
            rendezvous.check(call.op)  # aborted by another thread
        except CommError as aborted:
            return aborted
        because: BaseException = error
        timeout_s = rendezvous.timeout_s
        if _is_timeout(error):
            because = TimeoutError(str(error))
            # Of the group, where that is shorter.
            timeout_s = min(timeout_s, round(time.monotonic() - call.start_s, 1))
        return rendezvous.timed_out(
            call.op, call.number, peer=call.peer, because=because, timeout_s=timeout_s
        )

    def _break_connections(self) -> None:
        """Have gloo close the connections of the group, which ends what waits on them.

        It closes all of them when a message does not come in time, whoever it was to come from.
        ``Work.wait(timeout)`` only stops to look: gloo's thread goes on for as long as the group's
        own timeout, 30 minutes by default, and the destructor of the group waits for it.
        """
        import torch
        from torch import distributed as dist

        for rank in range(self.size):
            if rank == self.rank:
                continue
            nothing = torch.empty(1, dtype=torch.uint8)
            try:
                work = dist.irecv(nothing, self._world_rank(rank), group=self._group, tag=_TAG)
                _wait(work, time.monotonic())
            except RuntimeError as error:
                if _is_timeout(error):
                    return


def _wait(work: Any, deadline: float) -> None:
    """Wait for torch's work until ``time.monotonic()`` is `deadline`; RuntimeError after that."""
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SOON_S)))


def _is_timeout(error: RuntimeError) -> bool:
    """Tell whether it is gloo's, or torch's, that a time is over."""
    return "imed out" in str(error)


def _leave(work: Any) -> None:
    """Return when gloo's thread has left a call whose connections are closed.

    Until then it may write to the tensors; and a process that ends at this moment aborts, since the
    thread then drops tensors of an interpreter that is no more.
    """
    until = time.monotonic() + _LEFT_S
    with suppress(RuntimeError):
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(_SOON_S)


def _bytes(x: Tensor) -> Tensor:
    # What is only moved: no backend then needs to know its dtype.
    import torch

    return x.detach().view(-1).view(torch.uint8)


def _reduce_op(op: ReduceOp) -> Any:
    from torch import distributed as dist

    names = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN", "avg": "AVG"}
    return getattr(dist.ReduceOp, names[op])
