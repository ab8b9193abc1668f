"""``TorchCommunicator``: the protocol over a gloo group of ``torch.distributed``, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from jitkern.args import choice_arg, int_arg
from jitkern.comm.args import store_of
from jitkern.comm.protocol import REDUCE_OPS, Closing, ReduceOp
from jitkern.comm.rendezvous import Rendezvous
from jitkern.errors import UnsupportedError
from jitkern.ops import dispatch

dist: Any = torch.distributed
_CPU = torch.device("cpu")
_DTYPES = "float16, bfloat16, float32, float64, uint8, int8, int32, int64"  # that gloo reduces


class TorchCommunicator(Closing):
    """A ``Communicator`` over a gloo group of ``torch.distributed``, for tensors on the CPU.

    Making one is collective. Only one thread at a time may use it. For GPUs use ``init_pynccl``.

    A call returns when it is done, or raises after the timeout of the group, which
    ``init_process_group(timeout=)`` sets (default 30 minutes). Then gloo closes the connections of
    the group. If ranks pass tensors of different sizes, gloo aborts their processes (SIGABRT).

    Parameters
    ----------
    group
        A group with backend ``"gloo"`` or ``"cpu:gloo,..."``. Default: torch's default group.
    timeout_s
        Seconds to wait for the other ranks when it is made.

    Raises
    ------
    UnsupportedError
        The group has no gloo backend.
    CommTimeoutError, CommError
        Ranks did not arrive or have ended, and it names them; or there is no group.
    """

    def __init__(self, group: ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        call, self._group, self._num_calls, self._op = "TorchCommunicator", group, 0, ""
        store_of(call, group, None, None)
        backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
        if backends.get("cpu") != "gloo":
            cure = "over NCCL use init_pynccl"
            raise UnsupportedError(f"{call}: group: {backends}, expected cpu:gloo; {cure}")
        self._rendezvous = Rendezvous(
            call, group, None, None, timeout_s=timeout_s, position=self._position
        )
        self.rank: int = self._rendezvous.rank
        self.world_size: int = self._rendezvous.world_size

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place; see ``Communicator.all_reduce``."""
        self._check("all_reduce", x=x)
        _check_reduction("all_reduce", x, op)
        self._reduce("all_reduce", x.detach().view(-1), op)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``; see ``Communicator.all_gather``."""
        self._check("all_gather", output=output, x=x)
        self._check_items("all_gather", "output", output, x)
        gather = partial(dist.all_gather, [*_bytes(output).chunk(self.world_size)])
        self._run("all_gather", gather, _bytes(x))

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` and write part ``rank`` of it; see ``Communicator.reduce_scatter``."""
        self._check("reduce_scatter", output=output, x=x)
        _check_reduction("reduce_scatter", x, op)
        self._check_items("reduce_scatter", "x", x, output)
        # Gloo's own reduce_scatter does the same, without a deadline in torch 2.8.
        whole = x.detach().clone().view(-1)
        self._reduce("reduce_scatter", whole, op)
        output = output.detach().view(-1)
        output.copy_(whole.view(self.world_size, output.numel())[self.rank])

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Copy ``x`` of rank ``src`` to all ranks; see ``Communicator.broadcast``."""
        self._check("broadcast", x=x)
        src = int_arg("broadcast", "src", src, 0, self.world_size - 1)
        self._run("broadcast", dist.broadcast, _bytes(x), group_src=src)

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``; see ``Communicator.send``."""
        self._check("send", x=x)
        dst = self._other_rank("send", "dst", dst)
        self._run("send", dist.send, _bytes(x), peer=dst, group_dst=dst)

    def recv(self, x: Tensor, src: int) -> None:
        """Receive ``x`` from rank ``src``; see ``Communicator.recv``."""
        self._check("recv", x=x)
        src = self._other_rank("recv", "src", src)
        self._run("recv", dist.recv, _bytes(x), peer=src, group_src=src)

    def barrier(self) -> None:
        """Return after every rank has called it; see ``Communicator.barrier``."""
        self._rendezvous.check("barrier")
        # A sum: the barrier of torch's gloo has a deadline in some versions only.
        self._reduce("barrier", torch.zeros(1, dtype=torch.int32, device=_CPU), "sum")

    def close(self) -> None:
        """End the communicator and tell the other ranks, without waiting. The group stays open."""
        self._rendezvous.close()

    # -- arguments ---------------------------------------------------------------------------------

    def _check(self, call: str, **tensors: Any) -> None:
        self._rendezvous.check(call)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{call}: {name}: {type(tensor).__name__}, expected a tensor")
            if tensor.device != _CPU:
                raise ValueError(f"{call}: {name}: on {tensor.device}, expected on cpu")
            if tensor.layout != torch.strided:
                raise ValueError(f"{call}: {name}: {tensor.layout}, expected a dense tensor")
            if not tensor.is_contiguous():
                raise ValueError(f"{call}: {name}: not contiguous, expected contiguous")
        if not (
            dispatch.inference_mode.is_enabled() or dispatch.is_plain((), tuple(tensors.values()))
        ):
            dispatch.refuse(call, {}, tensors)
        x, output = tensors["x"], tensors.get("output", tensors["x"])
        if output.dtype != x.dtype:
            raise TypeError(f"{call}: output: {output.dtype}, expected {x.dtype} as x")

    def _check_items(self, call: str, name: str, whole: Tensor, part: Tensor) -> None:
        """Raise unless `whole`, the argument `name`, has the items of `world_size` parts."""
        if whole.numel() != part.numel() * self.world_size:
            count, each = part.numel() * self.world_size, part.numel()
            expected = f"{count}, {each} for each of {self.world_size} ranks"
            raise ValueError(f"{call}: {name}: {whole.numel()} items, expected {expected}")

    def _other_rank(self, call: str, name: str, value: Any) -> int:
        rank = int_arg(call, name, value, 0, self.world_size - 1)
        if rank == self.rank:
            raise ValueError(f"{call}: {name}: {rank}, expected another rank than this one")
        return rank

    # -- calls -------------------------------------------------------------------------------------

    def _position(self) -> tuple[int, str]:
        return self._num_calls, self._op

    def _reduce(self, call: str, x: Tensor, op: ReduceOp) -> None:
        # Gloo has no average. Quotients of ints are truncated, as by NCCL.
        name = {"avg": "SUM", "prod": "PRODUCT"}.get(op, op.upper())
        self._run(call, dist.all_reduce, x, op=getattr(dist.ReduceOp, name))
        if op == "avg":
            x.div_(self.world_size, rounding_mode=None if x.is_floating_point() else "trunc")

    def _run(
        self, call: str, function: Callable[..., Any], x: Tensor, peer: int = -1, **options: Any
    ) -> None:
        """Make torch's call and wait for it. `peer` is the other rank of a send or recv."""
        if x.numel() == 0:
            return
        self._op = call
        if peer < 0:
            self._num_calls += 1  # all ranks count the same calls
        begin_s = time.monotonic()
        try:
            function(x, group=self._group, **options)
        except RuntimeError as error:
            # Before the group's deadline, a connection was closed.
            limit_s = self._deadline_s()
            is_late = time.monotonic() - begin_s >= limit_s
            because = TimeoutError(str(error)) if is_late else error
            raise self._rendezvous.diagnose(
                call, self._num_calls, peer=peer, because=because, timeout_s=limit_s
            ) from error

    def _deadline_s(self) -> float:
        gloo = (self._group or dist.group.WORLD)._get_backend(_CPU)
        timeout_s: float = gloo.options._timeout.total_seconds()
        return timeout_s


def _check_reduction(call: str, x: Tensor, op: Any) -> None:
    choice_arg(call, "op", op, REDUCE_OPS)
    if str(x.dtype).removeprefix("torch.") not in _DTYPES.split(", "):
        raise TypeError(f"{call}: x: {x.dtype}, expected one of {_DTYPES}")


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor that is only moved, so that gloo need not know its dtype."""
    return x.detach().view(-1).view(torch.uint8)
