"""What a ``TPEmbedding`` may be asked for."""

from __future__ import annotations

from typing import Any, Literal, cast

from jitkern.ops.common import type_text

OP = "TPEmbedding"

Method = Literal["auto", "peer", "all_reduce"]
_METHODS = ("auto", "peer", "all_reduce")


def int_arg(name: str, value: Any, *, at_least: int) -> int:
    """Return a count."""
    if type(value) is not int:
        raise TypeError(f"{OP}: {name}: {type_text(value)}, expected an int")
    if value < at_least:
        raise ValueError(f"{OP}: {name}: {value}, expected at least {at_least}")
    return value


def padding_arg(value: Any, num_ids: int) -> int | None:
    """Return an id, counted from the front, or None."""
    if value is None:
        return None
    if type(value) is not int:
        raise TypeError(f"{OP}: padding_idx: {type_text(value)}, expected an int")
    if not -num_ids <= value < num_ids:
        expected = f"expected {-num_ids} to {num_ids - 1}"
        raise ValueError(f"{OP}: padding_idx: {value}, {expected}")
    return value % num_ids


def method_arg(value: Any, group: Any, size: int) -> Method:
    """Return how rows are to come from other ranks; ``"auto"`` only where that is open."""
    if not isinstance(value, str):
        raise TypeError(f"{OP}: method: {type_text(value)}, expected a str")
    if value not in _METHODS:
        expected = ", ".join(map(repr, _METHODS[:-1])) + f" or {_METHODS[-1]!r}"
        raise ValueError(f"{OP}: method: {value!r}, expected {expected}")
    if size == 1:
        return "all_reduce"  # there is nobody to read from
    if group is None and value == "peer":
        raise ValueError(
            f"{OP}: group: None, expected the ranks' gloo group or store for method='peer'"
        )
    return cast("Method", "all_reduce" if group is None else value)


def shape_of(weight: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of safetensors."""
    try:
        return tuple(weight.shape if hasattr(weight, "shape") else weight.get_shape())
    except (AttributeError, TypeError):
        raise TypeError(f"{OP}: weight: {type_text(weight)}, expected a tensor") from None
