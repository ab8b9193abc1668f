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
    output: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: Base = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge two partial results of attention: one over some of the keys, one over the others.

    :func:`merge_states` of two; see there for dtypes, memory, empty partials and errors. After
    vLLM's ``merge_attn_states`` and FlashInfer's ``merge_state``.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[tokens, heads, dim]``: partial results.
    lse_a, lse_b : Tensor
        ``[tokens, heads]``, or ``[heads, tokens]`` with ``lse_layout="heads_tokens"``: the log of
        the sum of exponentials of the scores, for each row.
    output, lse, base, lse_layout, scale
        See :func:`merge_states`.
    prefill_tokens_with_context : int, optional
        Only the first N tokens have a partial result `a`. The rest of `output` and `lse` is copied
        from `out_b` and `lse_b`.

    Returns
    -------
    (Tensor, Tensor or None)
        The merged result and its LSE; None with ``lse=False``.

    Examples
    --------
    >>> out_a, out_b = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    >>> lse_a, lse_b = torch.tensor([[0.0]]), torch.tensor([[0.0]])
    >>> out, lse = jitkern.merge_state(out_a, lse_a, out_b, lse_b)
    >>> out.tolist(), round(lse.item(), 4)
    ([[[0.5, 0.5, 0.5, 0.5]]], 0.6931)
    """
    given = given_of(output, lse)
    read = (out_a, lse_a, out_b, lse_b) if scale is None else (out_a, lse_a, out_b, lse_b, scale)
    if dispatch.in_inference_mode() or dispatch.may_write(given, read):
        to, to_lse = output, lse
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
        except dispatch.UNREADABLE as error:
            partials = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
            rest = {"output": to, "lse": to_lse, "scale": scale}
            prefill = {"prefill_tokens_with_context": prefill_tokens_with_context}
            ints = dict.fromkeys(prefill, "an int")
            dispatch.require_wrapper(error, "merge_state", ints, **partials, **rest, **prefill)
    return two_through_torch(
        out_a,
        lse_a,
        out_b,
        lse_b,
        output=output,
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
    output: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: Base = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge partial results of attention over parts of the keys into the result over all.

    For each token and head, with ``w_i = exp(lse_i - max)``: the result is ``sum(w_i * out_i) /
    sum(w_i)`` and its LSE ``max + log(sum(w_i))``. One launch, asynchronous on the current stream;
    each partial is read once. Computed in fp32 and summed in the order of the partials, so that
    ranks get the same bits. A CUDA graph may capture any call. Differentiable in `outs` and `lses`,
    unless `output` or a tensor as `lse` is given.

    Parameters
    ----------
    outs : sequence of Tensor, or Tensor
        1 to 64 tensors ``[tokens, heads, dim]``, fp32, fp16 or bf16, of one dtype; `dim`
        contiguous, other strides free. Or one tensor ``[n, tokens, heads, dim]``. On one device;
        some may lie in pinned host memory if the result is on a GPU.
    lses : sequence of Tensor, or Tensor
        As many ``[tokens, heads]``, fp32, fp16 or bf16, of one dtype, any strides: the log of the
        sum of exponentials of the scores. Or one tensor ``[n, tokens, heads]``.
    output : Tensor, optional
        ``[tokens, heads, dim]``, fp32, fp16, bf16 or float8_e4m3fn, `dim` contiguous. May be one of
        `outs`; otherwise it overlaps none. Default: a new tensor of their dtype.
    lse : Tensor or False, optional
        Where the merged LSE goes: fp32, fp16 or bf16. May be one of `lses`. Default: a new fp32
        tensor; False leaves it out.
    base : {"e", "2"}
        Base of the exponentials. FlashInfer's kernels use 2.
    lse_layout : {"tokens_heads", "heads_tokens"}
        Order of dimensions of `lses` and `lse`. vLLM uses ``[heads, tokens]``. Never guessed.
    scale : Tensor, optional
        For a float8 `output`: one fp32 on its device. `output` is the result divided by it, clamped
        to 448.
    count : Tensor, optional
        int32 or int64, on the device of `output`, one element or one for each token: only the first
        ``count`` partials are merged. Clamped to 0 and their number.

    Returns
    -------
    (Tensor, Tensor or None)
        The merged result and its LSE; None with ``lse=False``.

    Notes
    -----
    An LSE of -inf, or of +inf as FlashAttention 2 and vLLM have it, means no keys: that partial
    does not count, even if it holds NaN. If all are empty the result is zeros and the LSE -inf. NaN
    in an LSE gives NaN.

    Raises
    ------
    TypeError, ValueError
        Wrong or mixed dtypes, shapes or devices; `dim` not contiguous; none or more than 64
        partials; pageable memory; memory that overlaps; a float8 `output` without `scale`. Nothing
        was written.
    RuntimeError
        `output` or `lse` is given, and an argument requires grad, or it is an inference tensor
        outside of inference mode.

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
    given = given_of(output, lse)
    if dispatch.in_inference_mode() or dispatch.may_write(given, read):
        to, to_lse = output, lse
        options = options_of("merge_states", base, lse_layout, scale, count)
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
        except dispatch.UNREADABLE as error:
            rest = {"output": to, "lse": to_lse, "scale": scale, "count": count}
            partials = named(outs=outs, lses=lses)
            dispatch.require_wrapper(error, "merge_states", {}, **partials, **rest)
    return many_through_torch(
        outs,
        lses,
        output=output,
        lse=lse,
        base=base,
        lse_layout=lse_layout,
        scale=scale,
        count=count,
    )
