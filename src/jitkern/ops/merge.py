"""``merge_state`` and ``merge_states``: partial results of attention, merged in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from jitkern.host import module as host
from jitkern.ops import dispatch
from jitkern.ops.common import not_a_tensor, type_text
from jitkern.ops.merge_kernel import kernel as kernel
from jitkern.ops.merge_kernel import specialisations as specialisations
from jitkern.ops.register import OVERLOADS, TorchOverload

if TYPE_CHECKING:
    from torch import Tensor

Base = Literal["e", "2"]
LseLayout = Literal["tokens_heads", "heads_tokens"]
Results = tuple["Tensor", "Tensor | None"]

_NAMES = {"merge_state": ("out_a", "lse_a", "out_b", "lse_b"), "merge_states": ("outs", "lses")}
_LAST = {"merge_state": "prefill_tokens_with_context", "merge_states": "count"}
_BASE = ("base", "e", "2")
_LAYOUT = ("lse_layout", "tokens_heads", "heads_tokens")


@cache
def _op(name: str) -> Callable[..., Any]:
    return host.op(name, kernel)


def _traced_two(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, **rest: Any) -> Results:
    return _through_torch("merge_state", (out_a, lse_a, out_b, lse_b), **rest)


def _traced_many(outs: Any, lses: Any, **rest: Any) -> Results:
    return _through_torch("merge_states", (outs, lses), **rest)


@dispatch.traced_as(_traced_two)
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
    partials = (out_a, lse_a, out_b, lse_b)
    last = prefill_tokens_with_context
    return _merge("merge_state", partials, partials, output, lse, base, lse_layout, scale, last)


@dispatch.traced_as(_traced_many)
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
    is_list = isinstance(outs, (list, tuple)) and isinstance(lses, (list, tuple))
    partials = (outs, lses)
    read = (*outs, *lses) if is_list else partials
    return _merge("merge_states", partials, read, output, lse, base, lse_layout, scale, count)


def _merge(
    op: str,
    partials: tuple[Any, ...],
    read: tuple[Any, ...],
    output: Any,
    lse: Any,
    base: Any,
    lse_layout: Any,
    scale: Any,
    last: Any,
) -> Results:
    given = () if output is None else (output,)
    if lse is not None and lse is not False:
        given += (lse,)
    if scale is not None:
        read += (scale,)
    if dispatch.in_inference_mode() or dispatch.may_write(given, read):
        to, to_lse = output, None if lse is False else lse
        options = _options(op, base, lse_layout, scale, last)
        try:
            if output is None and (like := _first(op, partials[0])) is not None:
                to = _new_out(like)
            if lse is None and (like := _first(op, partials[1])) is not None:
                to_lse = _new_lse(like)
            if not _op(op)(*partials, to, to_lse, options):
                if given:
                    dispatch.wrote(*given)
                return to, to_lse
        except (AttributeError, TypeError) as error:
            raise _not_tensors(op, partials) or error from None
        except dispatch.UNREADABLE as error:
            words = {"prefill_tokens_with_context": "an int"}
            rest = {"output": to, "lse": to_lse, "scale": scale, _LAST[op]: last}
            dispatch.require_wrapper(error, op, words, **_named(op, partials), **rest)
    how = {"base": base, "lse_layout": lse_layout, "scale": scale, _LAST[op]: last}
    return _through_torch(op, partials, output=output, lse=lse, **how)


def _options(
    op: str, base: Any, lse_layout: Any, scale: Any, last: Any
) -> tuple[bool, bool, Any, Any] | None:
    """Return all options as one argument, since each takes 50 ns on its way; None for defaults.

    `last` is the option that :data:`_LAST` names.
    """
    # "is": two comparisons of strings, after checks of their types, take 0.3 us more.
    if scale is None and last is None and base is _BASE[1] and lse_layout is _LAYOUT[1]:
        return None
    return _is_second(op, _BASE, base), _is_second(op, _LAYOUT, lse_layout), scale, last


def _is_second(op: str, words: tuple[str, str, str], value: Any) -> bool:
    """Tell which of two words an argument is. Not in C++: a str on its way there takes 60 ns."""
    name, *known = words
    if isinstance(value, str) and value in known:
        return value == known[1]
    expected = f'expected "{known[0]}" or "{known[1]}"'
    if isinstance(value, str):
        raise ValueError(f'{op}: {name}: "{value}", {expected}')
    raise TypeError(f"{op}: {name}: {type_text(value)}, {expected}")


def _first(op: str, values: Any) -> Any:
    """Return the first partial's; None if there is none, which C++ refuses."""
    if op == "merge_state":
        return values
    try:
        return values[0]
    except (LookupError, RuntimeError):
        return None


# Not in C++: see _new_output of jitkern.ops.index.
def _new_out(like: Tensor) -> Tensor:
    return like.new_empty(*like.shape or ((),))


def _new_lse(like: Tensor) -> Tensor:
    import torch

    if like.dtype is torch.float32:
        return like.new_empty(*like.shape or ((),))
    return like.new_empty(*like.shape or ((),), dtype=torch.float32)


def _named(op: str, partials: tuple[Any, ...]) -> dict[str, Any]:
    """Return tensors by their names, such as ``out_a`` or ``outs[3]``."""
    found: dict[str, Any] = {}
    for name, value in zip(_NAMES[op], partials, strict=True):
        if op == "merge_states" and isinstance(value, (list, tuple)):
            found |= {f"{name}[{i}]": one for i, one in enumerate(value)}
        else:
            found[name] = value
    return found


def _not_tensors(op: str, partials: tuple[Any, ...]) -> TypeError | None:
    import torch

    for name, value in zip(_NAMES[op], partials, strict=True):
        if op == "merge_states" and not isinstance(value, (list, tuple, torch.Tensor)):
            expected = "a list of tensors, or one stacked tensor"
            return TypeError(f"merge_states: {name}: {type_text(value)}, expected {expected}")
    return not_a_tensor(op, **_named(op, partials))


# -- for PyTorch -----------------------------------------------------------------------------------


def _through_torch(
    function: str,
    partials: tuple[Any, ...],
    *,
    output: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: str = "e",
    lse_layout: str = "tokens_heads",
    scale: Tensor | None = None,
    count: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> Results:
    if (wrong := _not_tensors(function, partials)) is not None:
        raise wrong
    if function == "merge_state":
        outs, lses = list(partials[::2]), list(partials[1::2])
    else:
        outs, lses = _unstacked("outs", partials[0]), _unstacked("lses", partials[1])
    op, rest = "merge_states", {"base": base, "lse_layout": lse_layout, "count": count}
    prefill = {"prefill_tokens_with_context": prefill_tokens_with_context}
    if output is None and scale is None and (lse is None or lse is False):
        merged, merged_lse = dispatch.through_torch(op, outs=outs, lses=lses, **rest, **prefill)
        return merged, None if lse is False else merged_lse
    if output is None:
        output = _new_out(outs[0])
    to_lse: Any = _new_lse(lses[0]) if lse is None else None if lse is False else lse
    arguments = {"output": output, "lse": to_lse, "scale": scale, **rest, **prefill}
    dispatch.through_torch(op, "out", outs=outs, lses=lses, **arguments)
    return output, to_lse


def _unstacked(name: str, many: Sequence[Tensor] | Tensor) -> list[Tensor]:
    if not isinstance(many, (list, tuple)):
        try:
            many = many.unbind(0) if many.ndim > 0 else ()  # type: ignore[union-attr]
        except RuntimeError as error:
            came = f"a tensor without readable memory ({error})"
            raise ValueError(f"merge_states: {name}: {came}, expected a plain tensor") from error
    if len(many) == 0:
        raise ValueError(f"merge_states: {name}: a list of 0, expected 1 to 64 partial results")
    return list(many)


def _now(
    outs: list[Tensor],
    lses: list[Tensor],
    *,
    output: Tensor,
    lse: Tensor | None,
    base: str = "e",
    lse_layout: str = "tokens_heads",
    scale: Tensor | None = None,
    count: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    if prefill_tokens_with_context is None:
        options = _options("merge_states", base, lse_layout, scale, count)
        host.op_now("merge_states", kernel)(outs, lses, output, lse, options)
    else:
        last = prefill_tokens_with_context
        options = _options("merge_state", base, lse_layout, scale, last)
        two = [one for pair in zip(outs, lses, strict=True) for one in pair]
        host.op_now("merge_state", kernel)(*two, output, lse, options)


def _new(
    outs: list[Tensor], lses: list[Tensor], *, prefill_tokens_with_context: Any = None, **rest: Any
) -> tuple[Tensor, Tensor]:
    made = _fake(outs, lses)
    rest["prefill_tokens_with_context"] = prefill_tokens_with_context
    _now(outs, lses, output=made[0], lse=made[1], **rest)
    return made


def _differentiable(operator: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    from jitkern.ops.merge_gradient import differentiable

    return differentiable(operator)


def _fake(outs: list[Tensor], lses: list[Tensor], **_: Any) -> tuple[Tensor, Tensor]:
    return _new_out(outs[0]), _new_lse(lses[0])


_REST = (
    'str base="e", str lse_layout="tokens_heads", {}Tensor? count=None, '
    "int? prefill_tokens_with_context=None"
)

OVERLOADS["merge_states"] = [
    TorchOverload(
        f"merge_states(Tensor[] outs, Tensor[] lses, *, {_REST.format('')}) -> (Tensor, Tensor)",
        _new,
        _fake,
        _differentiable,
    ),
    TorchOverload(
        "merge_states.out(Tensor[] outs, Tensor[] lses, *, Tensor(a!) output, Tensor(b!)? lse, "
        f"{_REST.format('Tensor? scale=None, ')}) -> ()",
        _now,
    ),
]
