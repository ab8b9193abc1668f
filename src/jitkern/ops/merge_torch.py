"""``merge_states`` where PyTorch traces or differentiates, and what that shares with a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host
from jitkern.ops import dispatch
from jitkern.ops.common import not_a_tensor, type_text
from jitkern.ops.merge_kernel import kernel
from jitkern.ops.register import OVERLOADS, TorchOverload

if TYPE_CHECKING:
    from torch import Tensor

BASE = ("base", "e", "2")
LAYOUT = ("lse_layout", "tokens_heads", "heads_tokens")


def is_second(op: str, words: tuple[str, str, str], value: Any) -> bool:
    """Tell which of two words an argument is. Not in C++: a str on its way there takes 60 ns."""
    name, *known = words
    if isinstance(value, str) and value in known:
        return value == known[1]
    expected = f'expected "{known[0]}" or "{known[1]}"'
    if isinstance(value, str):
        raise ValueError(f'{op}: {name}: "{value}", {expected}')
    raise TypeError(f"{op}: {name}: {type_text(value)}, {expected}")


def options_of(
    op: str, base: Any, lse_layout: Any, scale: Any, last: Any
) -> tuple[bool, bool, Any, Any] | None:
    """Return what a call says beside its tensors, `last` as the op has it; None: nothing.

    One argument on the way to C++, each of which takes 50 ns.
    """
    is_plain = scale is None and last is None and isinstance(base, str)
    if is_plain and isinstance(lse_layout, str) and (base, lse_layout) == ("e", "tokens_heads"):
        return None
    return is_second(op, BASE, base), is_second(op, LAYOUT, lse_layout), scale, last


def given_of(output: Any, lse: Any) -> tuple[Any, ...]:
    if lse is None or lse is False:
        return () if output is None else (output,)
    return (lse,) if output is None else (output, lse)


def first(many: Any) -> Any:
    try:
        return many[0]
    except (LookupError, RuntimeError):
        return None  # C++ says what is wrong with them


# Not in C++: see _new_output of jitkern.ops.index.
def new_out(like: Tensor) -> Tensor:
    return like.new_empty(*like.shape or ((),))


def new_lse(like: Tensor) -> Tensor:
    import torch

    if like.dtype is torch.float32:
        return like.new_empty(*like.shape or ((),))
    return like.new_empty(*like.shape or ((),), dtype=torch.float32)


def named(**lists: Any) -> dict[str, Any]:
    """Return tensors of lists by their names, such as ``outs[3]``."""
    found: dict[str, Any] = {}
    for name, value in lists.items():
        if isinstance(value, (list, tuple)):
            found |= {f"{name}[{i}]": one for i, one in enumerate(value)}
        else:
            found[name] = value
    return found


def not_tensors(**lists: Any) -> TypeError | None:
    import torch

    for name, value in lists.items():
        if not isinstance(value, (list, tuple, torch.Tensor)):
            expected = "a list of tensors, or one stacked tensor"
            return TypeError(f"merge_states: {name}: {type_text(value)}, expected {expected}")
    return not_a_tensor("merge_states", **named(**lists))


def _through_torch(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: str = "e",
    lse_layout: str = "tokens_heads",
    scale: Tensor | None = None,
    count: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    op, rest = "merge_states", {"base": base, "lse_layout": lse_layout, "count": count}
    prefill = {"prefill_tokens_with_context": prefill_tokens_with_context}
    if output is None and scale is None and (lse is None or lse is False):
        merged, merged_lse = dispatch.through_torch(
            op, outs=list(outs), lses=list(lses), **rest, **prefill
        )
        return merged, None if lse is False else merged_lse
    if output is None:
        output = new_out(outs[0])
    to_lse = new_lse(lses[0]) if lse is None else None if lse is False else lse
    arguments = {"output": output, "lse": to_lse, "scale": scale, **rest, **prefill}
    dispatch.through_torch(op, "out", outs=list(outs), lses=list(lses), **arguments)
    return output, to_lse  # type: ignore[return-value]


def two_through_torch(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    wrong = not_a_tensor("merge_state", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if wrong is not None:
        raise wrong
    return _through_torch((out_a, out_b), (lse_a, lse_b), **rest)


def many_through_torch(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, **rest: Any
) -> tuple[Tensor, Tensor | None]:
    wrong = not_tensors(outs=outs, lses=lses)
    if wrong is not None:
        raise wrong
    return _through_torch(_unstacked("outs", outs), _unstacked("lses", lses), **rest)


def _unstacked(name: str, many: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    if not isinstance(many, (list, tuple)):
        try:
            many = many.unbind(0) if many.ndim > 0 else ()  # type: ignore[union-attr]
        except RuntimeError as error:
            came = f"a tensor without readable memory ({error})"
            raise ValueError(f"merge_states: {name}: {came}, expected a plain tensor") from error
    if len(many) == 0:
        raise ValueError(f"merge_states: {name}: a list of 0, expected 1 to 64 partial results")
    return many


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
        options = options_of("merge_states", base, lse_layout, scale, count)
        host.op_now("merge_states", kernel)(outs, lses, output, lse, options)
    else:
        last = prefill_tokens_with_context
        options = options_of("merge_state", base, lse_layout, scale, last)
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
    return new_out(outs[0]), new_lse(lses[0])


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
