"""The gradient of ``indexing``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jitkern.ops import dispatch

if TYPE_CHECKING:
    from torch import Tensor


def _indexing(weights: Tensor, indices: Tensor, *vocabulary: Any) -> Tensor:
    names = ("weights", "indices", "vocab_range", "added_range", "vocab_size")
    given = zip(names, (weights, indices, *vocabulary), strict=True)
    result: Tensor = dispatch.through_torch("indexing", **dict(given))
    return result


def _rows_of(indices: Tensor, num_rows: int, vocab_range: Any, added_range: Any) -> Tensor:
    """Return the row of the table that each index reads; `num_rows` where it reads none."""
    import torch

    numbers = indices.reshape(-1).long()
    rows = torch.full_like(numbers, num_rows)
    first_row = 0
    for start, length in (vocab_range or (0, num_rows), added_range or (0, 0)):
        offsets = numbers - start
        # Both checks: the difference may overflow into the range.
        inside = (numbers >= start) & (offsets < length)
        rows = torch.where(inside, offsets + first_row, rows)
        first_row += length
    return rows


def _add_up(gradients: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the sum of the gradients of each row except the last, which the caller drops.

    Gradients of 16 bits are summed in 32 bits: a sum of bfloat16 ones would stop at 256, of halves
    at 2048. Under ``torch.use_deterministic_algorithms(True)`` equal calls give equal bits.
    """
    import torch

    # On a GPU index_add sums 16 bits in 16 bits, by atomics; the embedding's gradient does not. It
    # sorts the rows (few long ones only if deterministic: PyTorch's #172454), has no complex
    # numbers, and fails if there is nothing to add.
    if gradients.is_cuda and gradients.is_floating_point() and gradients.numel() != 0:
        backward: Any = torch.ops.aten.embedding_dense_backward
        total: Tensor = backward(gradients, rows, num_rows, num_rows - 1, False)
        return total
    return gradients.new_zeros(num_rows, gradients.shape[1]).index_add(0, rows, gradients)


def differentiable(operator: Callable[..., Tensor]) -> Any:
    """Return the ``torch.autograd.Function`` of the operator, given it without a gradient."""
    import torch

    class Indexing(torch.autograd.Function):
        @staticmethod
        def forward(
            weights: Tensor, indices: Tensor, vocab_range: Any, added_range: Any, vocab_size: Any
        ) -> Tensor:
            rest = {"added_range": added_range, "vocab_size": vocab_size}
            return operator(weights, indices, vocab_range=vocab_range, **rest)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            weights, indices, *ctx.vocabulary = inputs
            ctx.save_for_backward(indices)
            ctx.save_for_forward(indices)
            ctx.weights_shape, ctx.weights_device = weights.shape, weights.device

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
            """Add up the gradients of equal rows; a last row takes those of zeros, and goes."""
            (indices,) = ctx.saved_tensors
            num_rows, *row_shape = ctx.weights_shape
            vocab_range, added_range, _ = ctx.vocabulary
            # A table in host memory may be larger than the GPU: its gradient is there, too.
            rows = _rows_of(indices, num_rows, vocab_range, added_range).to(ctx.weights_device)
            gradients = gradient.reshape(rows.shape[0], math.prod(row_shape))
            total = _add_up(gradients.to(ctx.weights_device), rows, num_rows + 1)
            return total[:num_rows].reshape(num_rows, *row_shape), None, None, None, None

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
            (indices,) = ctx.saved_tensors
            return _indexing(tangent.contiguous(), indices, *ctx.vocabulary)

        @staticmethod
        def vmap(
            info: Any, in_dims: Any, weights: Tensor, indices: Tensor, *vocabulary: Any
        ) -> tuple[Tensor, int]:
            """One call for a table that all share, else one for each table."""
            in_weights, in_indices, *_ = in_dims
            if in_weights is None:
                return _indexing(weights, indices.movedim(in_indices, 0), *vocabulary), 0
            tables = weights.unbind(in_weights)
            each = [indices] * len(tables) if in_indices is None else indices.unbind(in_indices)
            results = [
                _indexing(table, where, *vocabulary)
                for table, where in zip(tables, each, strict=True)
            ]
            return torch.stack(results), 0

    return Indexing
