"""``merge_state`` and ``merge_states``: partial results of attention, merged in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from jitkern.host import module as host
from jitkern.ops import dispatch
from jitkern.ops.common import not_a_tensor
from jitkern.ops.merge_kernel import kernel as kernel
from jitkern.ops.merge_kernel import specialisations as specialisations
from jitkern.ops.merge_torch import (
    first,
    given_of,
    many_through_torch,
    named,
    new_lse,
    new_out,
    not_tensors,
    options_of,
    two_through_torch,
)

if TYPE_CHECKING:
    from torch import Tensor

Base = Literal["e", "2"]
LseLayout = Literal["tokens_heads", "heads_tokens"]


@cache
def _op() -> Callable[..., Any]:
    return host.op("merge_state", kernel)


@cache
def _op_of_many() -> Callable[..., Any]:
    return host.op("merge_states", kernel)


@dispatch.traced_as(two_through_torch)
def merge_state(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: Base = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge two partial results of attention: one over some of the keys, one over the others.

    What :func:`merge_states` does, of two. See there for dtypes, memory, empty partials, errors.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[tokens, heads, dim]``: partial results.
    lse_a, lse_b : Tensor
        ``[tokens, heads]``, or ``[heads, tokens]`` with ``lse_layout="heads_tokens"``: for each of
        their rows the logarithm of the sum of exponentials of all scores.
    out, lse, base, lse_layout, scale
        As for :func:`merge_states`.
    prefill_tokens_with_context : int, optional
        Only so many tokens, the first ones, have a partial result `a`, as in a batch of prefills of
        which the others have no context yet. The rest of `out` and `lse` is copied from `out_b` and
        `lse_b`, whatever they hold; of `out_a` and `lse_a` it is not read.

    Returns
    -------
    (Tensor, Tensor or None)
        The merged result and its lse; None with ``lse=False``.

    Examples
    --------
    >>> out_a, out_b = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    >>> lse_a, lse_b = torch.tensor([[0.0]]), torch.tensor([[0.0]])
    >>> out, lse = jitkern.merge_state(out_a, lse_a, out_b, lse_b)
    >>> out.tolist(), round(lse.item(), 4)
    ([[[0.5, 0.5, 0.5, 0.5]]], 0.6931)
    """
    given = given_of(out, lse)
    read = (out_a, lse_a, out_b, lse_b) if scale is None else (out_a, lse_a, out_b, lse_b, scale)
    if dispatch.in_inference_mode() or dispatch.may_write(given, read):
        to, to_lse = out, lse
        options = options_of("merge_state", base, lse_layout, scale, prefill_tokens_with_context)
        try:
            if to is None:
                to = new_out(out_a)
            if to_lse is None:
                to_lse = new_lse(lse_a)
            elif to_lse is False:
                to_lse = None
            if not _op()(out_a, lse_a, out_b, lse_b, to, to_lse, options):
                if given:
                    dispatch.wrote(*given)
                return to, to_lse  # type: ignore[return-value]
        except (AttributeError, TypeError) as error:
            partials = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
            raise not_a_tensor("merge_state", **partials) or error from None
        except (RuntimeError, ValueError) as error:
            partials = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
            dispatch.require_wrapper(
                error, "merge_state", **partials, out=to, lse=to_lse, scale=scale
            )
    return two_through_torch(
        out_a,
        lse_a,
        out_b,
        lse_b,
        out=out,
        lse=lse,
        base=base,
        lse_layout=lse_layout,
        scale=scale,
        prefill_tokens_with_context=prefill_tokens_with_context,
    )


@dispatch.traced_as(many_through_torch)
def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: Base = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: Tensor | None = None,
    num_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge partial results of attention over parts of the keys into the result over all.

    Of each token and head, with ``w_i = exp(lse_i - max)``, the result is ``sum(w_i * out_i) /
    sum(w_i)`` and its lse ``max + log(sum(w_i))``: in one launch, on the current stream and without
    a synchronisation, each partial read once. It is computed in fp32, and added up in the order of
    the partials, whatever the number of tokens: ranks that merge the same get the same bits. A CUDA
    graph can capture the call, also the first one. Differentiable in `outs` and `lses`, unless
    `out` or a tensor as `lse` is given.

    Parameters
    ----------
    outs : sequence of Tensor, or Tensor
        1 to 64 tensors ``[tokens, heads, dim]``, fp32, fp16 or bf16, all of one dtype: `dim`
        contiguous, other strides free, each tensor's its own. Or one tensor ``[n, tokens, heads,
        dim]``. On one device; beside a result on a GPU some may lie in pinned host memory, and stay
        allocated and unchanged until the stream has come past the call.
    lses : sequence of Tensor, or Tensor
        As many ``[tokens, heads]``, fp32, fp16 or bf16, of one dtype, any strides: the logarithm of
        the sum of exponentials of the scores that each row of `outs` is the result of. Or one
        tensor ``[n, tokens, heads]``.
    out : Tensor, optional
        ``[tokens, heads, dim]``, fp32, fp16, bf16 or float8_e4m3fn, `dim` contiguous. It may be one
        of `outs` itself, and else shares no memory with them. By default a new tensor of their
        dtype, on the device of the first.
    lse : Tensor or False, optional
        Where the merged lse goes: fp32, fp16 or bf16, of the shape of `lses`. It may be one of
        `lses` itself. By default a new fp32 tensor; with False it is left out.
    base : "e" or "2"
        What the exponentials are of. FlashInfer's kernels give sums of powers of 2.
    lse_layout : "tokens_heads" or "heads_tokens"
        The order of dimensions of `lses` and `lse`, each of which may be ``[heads, tokens]``, as in
        vLLM. It is never guessed: with as many tokens as heads both would fit.
    scale : Tensor, optional
        For a float8 `out`: fp32, 1 element, on its device. `out` is the result divided by it,
        clamped to 448.
    num_valid : Tensor, optional
        int32 or int64, on the device of `out`, 1 element or one for each token: only so many of the
        partials count, the first ones, the others are not read. Below 0 it means 0, above their
        number all.

    Returns
    -------
    (Tensor, Tensor or None)
        The merged result and its lse; None with ``lse=False``.

    Notes
    -----
    A partial over no keys has an lse of -inf, or of +inf as from FlashAttention 2 and in vLLM. It
    counts nothing, whatever its values, NaN included. Where all are empty, the result is zeros and
    the lse -inf. NaN in an lse gives NaN.

    Raises
    ------
    TypeError, ValueError
        Wrong or mixed dtypes, shapes or devices, a `dim` that is not contiguous, no partial or more
        than 64, pageable host memory, memory that would be written and read, a float8 `out` without
        `scale`. Nothing was launched or written.
    RuntimeError
        `out` or `lse` is given, and with gradients enabled an argument requires one, or outside of
        inference mode it was made in it. Nothing was written.

    Examples
    --------
    >>> outs = [torch.full((1, 1, 2), float(i)) for i in range(3)]
    >>> lses = [torch.zeros(1, 1), torch.zeros(1, 1), torch.full((1, 1), -torch.inf)]
    >>> out, lse = jitkern.merge_states(outs, lses, base="2")
    >>> out.tolist(), lse.tolist()
    ([[[0.5, 0.5]]], [[1.0]])
    """
    is_list = isinstance(outs, (list, tuple))
    read = (*outs, *lses) if is_list and isinstance(lses, (list, tuple)) else (outs, lses)
    if scale is not None:
        read += (scale,)
    given = given_of(out, lse)
    if dispatch.in_inference_mode() or dispatch.may_write(given, read):
        to, to_lse = out, lse
        options = options_of("merge_states", base, lse_layout, scale, num_valid)
        try:
            if to is None and (like := first(outs)) is not None:
                to = new_out(like)
            if to_lse is None:
                to_lse = None if (like := first(lses)) is None else new_lse(like)
            elif to_lse is False:
                to_lse = None
            if not _op_of_many()(outs, lses, to, to_lse, options):
                if given:
                    dispatch.wrote(*given)
                return to, to_lse  # type: ignore[return-value]
        except (AttributeError, TypeError) as error:
            raise not_tensors(outs=outs, lses=lses) or error from None
        except (RuntimeError, ValueError) as error:
            rest = {"out": to, "lse": to_lse, "scale": scale, "num_valid": num_valid}
            dispatch.require_wrapper(error, "merge_states", **named(outs=outs, lses=lses), **rest)
    return many_through_torch(
        outs,
        lses,
        out=out,
        lse=lse,
        base=base,
        lse_layout=lse_layout,
        scale=scale,
        num_valid=num_valid,
    )
