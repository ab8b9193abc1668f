"""The gradient of ``merge_states``, in PyTorch's own operations: inference does not come here."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def differentiable(operator: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """Return the operator with a gradient, as `TorchOverload.differentiable` wants it.

    With ``w_i = base^(lse_i - lse)``, what partial `i` weighs:

    - of ``out_i``: ``w_i * g_out``
    - of ``lse_i``: ``w_i * (ln(base) * <g_out, out_i - out> + g_lse)``

    An empty partial gets zeros. A row that is copied has the weight 1.
    """

    class Merge(torch.autograd.Function):
        @staticmethod
        def forward(
            num: int, base: str, layout: str, count: Tensor | None, prefill: Any, *both: Tensor
        ) -> tuple[Tensor, Tensor]:
            how = {"base": base, "lse_layout": layout, "count": count}
            outs, lses = list(both[:num]), list(both[num:])
            return operator(outs, lses, **how, prefill_tokens_with_context=prefill)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            ctx.num, base, ctx.layout, count, ctx.prefill, *both = inputs
            ctx.log_base = 1.0 if base == "e" else math.log(2)
            ctx.save_for_backward(count, *both, *output)

        @staticmethod
        def backward(ctx: Any, g_out: Tensor, g_lse: Tensor) -> tuple[Tensor | None, ...]:
            count, *both, out, lse = ctx.saved_tensors
            outs, lses = both[: ctx.num], both[ctx.num :]
            turned = ctx.layout == "heads_tokens"
            if turned:
                lses, lse, g_lse = [one.t() for one in lses], lse.t(), g_lse.t()
            tokens = torch.arange(lse.shape[0], device=lse.device)[:, None]
            is_merged = tokens < (lse.shape[0] if ctx.prefill is None else ctx.prefill)
            of_outs: list[Tensor] = []
            of_lses: list[Tensor] = []
            for number, (one, log) in enumerate(zip(outs, lses, strict=True)):
                merged = is_merged & ~log.isinf()  # inf - inf is NaN
                if count is not None:
                    merged = merged & (number < count.reshape(-1, 1))
                counts = merged if number == 0 else merged | ~is_merged
                below = (log.float() - lse).where(merged, 0.0)
                weight = torch.exp(below * ctx.log_base).where(counts, 0.0)
                of_out = (weight[..., None] * g_out).where(counts[..., None], 0.0)
                of_outs.append(of_out.to(one.dtype))
                apart = (one.float() - out).where(merged[..., None], 0.0)
                along = ctx.log_base * (g_out.float() * apart).sum(-1) + g_lse
                of_log = (weight * along).where(counts, 0.0).to(log.dtype)
                of_lses.append(of_log.t() if turned else of_log)
            return (None,) * 5 + (*of_outs, *of_lses)

    def apply(outs: list[Tensor], lses: list[Tensor], *how: Any) -> Any:
        # Of tensors in a list a Function sees nothing.
        call: Any = Merge.apply
        return call(len(outs), *how, *outs, *lses)

    return SimpleNamespace(apply=apply)
