"""``Communicator``: the calls between ranks that model code needs, over any transport."""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar, get_args, runtime_checkable

from torch import Tensor

ReduceOp = Literal["sum", "prod", "max", "min", "avg"]
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)  # in NCCL's order

C = TypeVar("C", bound="Closing")


class Closing:
    """``with`` closes it at its end."""

    def close(self) -> None:
        """Make no more calls."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@runtime_checkable
class Communicator(Protocol):
    """The protocol of collectives between ranks.

    All ranks make the same calls in the same order, with tensors of the same dtype and size.
    Tensors are contiguous, on the communicator's device. On GPUs a call is asynchronous on the
    current stream; on the CPU it returns when it is done.

    Each call raises TypeError, ValueError or RuntimeError for a wrong or traced argument, before
    anything is sent; CommError if the communicator is closed or has failed; CommTimeoutError, which
    names the missing ranks, if they did not arrive in time.
    """

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``world_size - 1``."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place."""

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``, in the order of ranks.

        ``output`` is ``world_size`` times as large as ``x``.
        """

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, and write part ``rank`` of ``world_size`` to ``output``."""

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Copy ``x`` of rank ``src`` to ``x`` of every rank."""

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which calls ``recv``."""

    def recv(self, x: Tensor, src: int) -> None:
        """Receive ``x`` from rank ``src``, which calls ``send``."""

    def barrier(self) -> None:
        """Return after every rank has called it and all earlier calls have finished."""
