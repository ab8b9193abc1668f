"""``TorchCommunicator``: the protocol over ``torch.distributed``, of any backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from jitkern.comm import args
from jitkern.comm.protocol import Closing, ReduceOp, Splits
from jitkern.comm.rendezvous import Rendezvous
from jitkern.ops import dispatch

dist: Any = torch.distributed
_TAG = 0x6A6B21  # nothing is ever sent under it
_SOON_S = 0.001  # 0 would mean no deadline
_LEFT_S = 1.0  # for a thread of gloo to leave a call after its connections are closed
_LOOK_S = 0.25  # between two looks whether a rank of this machine has ended


class TorchCommunicator(Closing):
    """A ``Communicator`` over a group of ``torch.distributed``, of any backend.

    Making one is collective. One thread at a time uses it; any thread may call ``abort``.

    With gloo, tensors are on the CPU, and a call returns when it is done or at its deadline (the
    group's own if that is shorter), which closes the group's connections: gloo has no other way
    out. If ranks give gloo different sizes, it ends their processes (SIGABRT).

    With NCCL, tensors are on the current GPU, and calls are queued on the current stream. Their
    deadline is that of ``init_process_group(timeout=...)``, after which torch ends the process.

    Parameters
    ----------
    group
        Such as one of ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``. Default: torch's default group.
    timeout_s
        Seconds that each call, and this one, waits for other ranks.

    Raises
    ------
    CommTimeoutError, CommError
        Ranks did not come, or have ended, and it names them; there is no group.
    """

    def __init__(self, group: ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        call, self._group, self._issued, self._op = "TorchCommunicator", group, 0, ""
        args.store_of(call, group, None, None)
        backends = dict(one.split(":") for one in str(dist.get_backend_config(group)).split(","))
        self._devices: list[torch.device] = []
        if "cpu" in backends:
            self._devices.append(torch.device("cpu"))
        if backends.get("cuda", "gloo") != "gloo" and torch.cuda.is_available():
            self._devices.append(torch.device("cuda", torch.cuda.current_device()))
        facts = {"backends": backends}
        self._rendezvous = Rendezvous(
            call, group, None, None, timeout_s=timeout_s, position=self._position, facts=facts
        )
        self.rank: int = self._rendezvous.rank
        self.size: int = self._rendezvous.size

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place; see ``Communicator.all_reduce``."""
        self._check("all_reduce", x=x)
        args.reduced_args("all_reduce", x, op)
        self._reduce("all_reduce", x.detach().view(-1), op)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``; see ``Communicator.all_gather``."""
        self._check("all_gather", output=output, x=x)
        args.gather_args("all_gather", output, x, self.size, "output")
        self._run("all_gather", dist.all_gather_into_tensor, _bytes(output), _bytes(x))

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` and write part ``rank`` of it; see ``Communicator.reduce_scatter``."""
        call = "reduce_scatter"
        self._check(call, output=output, x=x)
        args.reduced_args(call, x, op)
        args.gather_args(call, x, output, self.size, "x")
        output, x = output.detach().view(-1), x.detach().view(-1)
        if x.device.type == "cpu":  # what gloo does; its own wait has no deadline
            whole = x.clone()
            self._reduce(call, whole, op)
            output.copy_(whole.view(self.size, output.numel())[self.rank])
        else:
            self._run(call, dist.reduce_scatter_tensor, output, x, op=self._reduce_op(op))

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Write rank ``src``'s ``x`` to all ranks'; see ``Communicator.broadcast``."""
        self._check("broadcast", x=x)
        args.rank_arg("broadcast", "src", src, self.size)
        self._run("broadcast", dist.broadcast, _bytes(x), group_src=src)

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``; see ``Communicator.send``."""
        self._check("send", x=x)
        args.rank_arg("send", "dst", dst, self.size, other_than=self.rank)
        self._run("send", dist.isend, _bytes(x), peer=dst, group_dst=dst)

    def recv(self, x: Tensor, src: int) -> None:
        """Write to ``x`` what rank ``src`` sends; see ``Communicator.recv``."""
        self._check("recv", x=x)
        args.rank_arg("recv", "src", src, self.size, other_than=self.rank)
        self._run("recv", dist.irecv, _bytes(x), peer=src, group_src=src)

    def all_to_all(
        self, output: Tensor, x: Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> None:
        """Send part r of ``x`` to rank r, and so on; see ``Communicator.all_to_all``."""
        call = "all_to_all"
        self._check(call, output=output, x=x)
        if output.shape[1:] != x.shape[1:]:
            given, expected = list(output.shape[1:]), list(x.shape[1:])
            raise ValueError(f"{call}: output: rows of {given}, expected {expected} as x")
        row_bytes = x.element_size() * prod(x.shape[1:])
        outs = args.splits_arg(call, "output_splits", output_splits, output, self.size)
        ins = args.splits_arg(call, "input_splits", input_splits, x, self.size)
        sizes = [rows * row_bytes for rows in outs], [rows * row_bytes for rows in ins]
        if row_bytes:  # also if this rank has no rows: others may have some for each other
            self._run(call, dist.all_to_all_single, _bytes(output), _bytes(x), *sizes)

    def barrier(self) -> None:
        """Return when every rank has come to it; see ``Communicator.barrier``."""
        self._rendezvous.check("barrier")
        # A sum, since the barrier of torch's gloo has no deadline in all versions.
        x = torch.zeros(1, dtype=torch.int32, device=self._devices[-1])
        self._reduce("barrier", x, "sum")
        if x.device.type != "cpu":
            torch.cuda.current_stream(x.device).synchronize()

    def abort(self) -> None:
        """Abort running calls, here and in the other ranks; any thread may.

        The group's connections are closed. Calls that wait, and later ones, raise CommError.
        """
        self._rendezvous.close("has aborted it")
        if self._devices[0].type == "cpu":
            self._break_connections()
        if self._devices[-1].type != "cpu":
            (self._group or dist.group.WORLD).abort()

    def close(self) -> None:
        """Make no more calls, and tell the others; does not wait for them. The group stays."""
        self._rendezvous.close()

    destroy = close

    def _check(self, call: str, **tensors: Any) -> None:
        self._rendezvous.check(call)
        for name, tensor in tensors.items():
            args.tensor_arg(call, name, tensor, self._devices)
        if not dispatch.in_inference_mode() and not dispatch.may_write((), tuple(tensors.values())):
            dispatch.refuse(call, {}, tensors)
        x, output = tensors["x"], tensors.get("output", tensors["x"])
        if output.dtype != x.dtype:
            raise TypeError(f"{call}: output: {output.dtype}, expected {x.dtype} as x")
        if output.device != x.device:
            raise ValueError(f"{call}: output: on {output.device}, expected on {x.device} as x")

    def _position(self) -> tuple[int, str]:
        return self._issued, self._op

    def _reduce_op(self, op: ReduceOp) -> Any:
        return getattr(dist.ReduceOp, "PRODUCT" if op == "prod" else op.upper())

    def _reduce(self, call: str, x: Tensor, op: ReduceOp) -> None:
        # Gloo has no average; whole numbers are truncated as by NCCL.
        is_divided = op == "avg" and x.device.type == "cpu"
        reduce_op = self._reduce_op("sum" if is_divided else op)
        self._run(call, dist.all_reduce, x, op=reduce_op)
        if is_divided:
            x.div_(self.size, rounding_mode=None if x.is_floating_point() else "trunc")

    def _run(
        self, call: str, function: Callable[..., Any], x: Tensor, *more: Any,
        peer: int = -1, **how: Any,
    ) -> None:  # fmt: skip
        """Make torch's call, and wait for it on the CPU. `peer`: of a call between two ranks."""
        if not x.numel() and call != "all_to_all":
            return
        self._op = call
        self._issued += peer < 0  # all ranks count the same calls
        start_s, is_cpu, work = time.monotonic(), x.device.type == "cpu", None
        if peer < 0:
            how["async_op"] = is_cpu
        try:
            work = function(x, *more, group=self._group, **how)
            if is_cpu:
                self._wait(work, start_s + self._rendezvous.timeout_s, peer)
            elif work is not None:
                work.wait()  # on the stream
        except RuntimeError as error:
            if is_cpu:
                self._break_connections()
                until = time.monotonic() + _LEFT_S
                # Until gloo's thread has left the call it may write to the tensors.
                while work is not None and not work.is_completed() and time.monotonic() < until:
                    time.sleep(_SOON_S)
            self._rendezvous.check(call)  # aborted by another thread
            raise self._rendezvous.diagnose(
                *(call, self._issued),
                peer=peer, because=TimeoutError(str(error)) if _is_timeout(error) else error,
                timeout_s=min(self._rendezvous.timeout_s, round(time.monotonic() - start_s, 1)),
            ) from error  # fmt: skip

    def _wait(self, work: Any, deadline: float, peer: int) -> None:
        """Wait for a call of gloo, which may not hear of the end of a rank's process."""
        while peer < 0:  # in a send or recv a wait that times out closes all connections
            try:
                _wait_until(work, min(deadline, time.monotonic() + _LOOK_S))
                return
            except RuntimeError as error:
                if not _is_timeout(error) or work.is_completed() or time.monotonic() >= deadline:
                    raise
            if any(one.trouble(is_late=False) for one in self._rendezvous.peers):
                raise RuntimeError("gloo has not heard of it")
        _wait_until(work, deadline)

    def _break_connections(self) -> None:
        """Have gloo close the group's connections, which ends the calls that wait on them.

        It does so when a message does not come in time. ``Work.wait(timeout)`` alone leaves gloo's
        thread waiting for the group's own timeout, and so would the group's destructor.
        """
        for rank in range(self.size):
            if rank != self.rank:
                nothing = torch.empty(1, dtype=torch.uint8)
                try:
                    work = dist.irecv(nothing, group=self._group, tag=_TAG, group_src=rank)
                    _wait_until(work, time.monotonic())
                except RuntimeError as error:
                    if _is_timeout(error):
                        return


def _wait_until(work: Any, deadline: float) -> None:
    """Wait for torch's work until ``time.monotonic()`` is `deadline`; RuntimeError after that."""
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SOON_S)))


def _is_timeout(error: RuntimeError) -> bool:
    return "imed out" in str(error)  # gloo's, or torch's


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor that is only moved: no backend then needs to know its dtype."""
    return x.detach().view(-1).view(torch.uint8)
