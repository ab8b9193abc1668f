"""A look-up in a table that is split over ranks: zeros for what others hold, and a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from jitkern.host.faults import is_of_earlier_call
from jitkern.nn.args import OP
from jitkern.ops import dispatch
from jitkern.ops.index import indexing

if TYPE_CHECKING:
    from jitkern.comm.protocol import Communicator
    from jitkern.nn.layout import Part


class _SumOverRanks(torch.autograd.Function):
    """In place. Every rank has the gradient of the sum, which is that of its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator) -> Tensor:
        _add_up(rows, comm)
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def look_up(weight: Tensor, ids: Tensor, part: Part, num_ids: int, comm: Communicator) -> Tensor:
    """Return the rows of all ranks: collective. `weight` holds this rank's `part` of them."""
    earlier: Exception | None = None
    while True:
        try:
            rows = indexing(
                weight,
                ids,
                vocab_range=part.vocab_range,
                added_range=part.added_range,
                vocab_size=num_ids,
            )
            break
        except Exception as error:
            if not is_of_earlier_call(error):
                raise
            # Forgotten now. Ranks come to hear of it at different calls: one that left out its sum
            # would have its next one met by this one of the others.
            earlier = earlier or error
    _refuse_tracers(rows)
    if dispatch.wants_gradient(rows):
        rows = cast("Tensor", _SumOverRanks.apply(rows, comm))  # type: ignore[no-untyped-call]
    else:
        _add_up(rows, comm)
    if earlier is not None:
        raise earlier
    return rows


def _add_up(rows: Tensor, comm: Communicator) -> None:
    """Sum over ranks, of which one at most has bits that are not zero: exact for any bits.

    A sum of floats would make 0.0 of -0.0, and another NaN of some. NCCL and gloo both have sums of
    int32 and uint8, and neither of int16.
    """
    if rows.numel() == 0:
        return  # on every rank
    flat = rows.detach().view(-1)
    comm.all_reduce(flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8))


def _refuse_tracers(rows: Tensor) -> None:
    """Raise where the sum would be dropped from what is traced, or be of what is no memory."""
    if (
        type(rows).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or torch._C._functorch.is_functorch_wrapped_tensor(rows)
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_tracing_state() is not None
    ):
        raise RuntimeError(
            f"{OP}: ids: traced or transformed, expected a plain call: the sum over ranks has no "
            "place in torch.export, make_fx, torch.jit.trace and torch.func; torch.compile ends a "
            "graph here"
        )
