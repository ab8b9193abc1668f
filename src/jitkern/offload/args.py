"""Argument checks of this wing: each raises ``call: name: what came, expected what``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import torch


def number_arg(call: str, name: str, value: Any, most: float = math.inf) -> float:
    """Return a finite number of 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected a number")
    if not 0 <= value <= most or math.isinf(value):
        expected = "0 or more" if math.isinf(most) else f"0 to {most:g}"
        raise ValueError(f"{call}: {name}: {value}, expected {expected}")
    return float(value)


def optional_arg(call: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless it is None or of this class."""
    if value is not None and not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        expected = f"{article} {kind.__name__} or None"
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected {expected}")


def shape_arg(call: str, name: str, shape: Any) -> tuple[int, ...]:
    """Return the sizes of a shape; each is at least 1."""
    expected = "a sequence of ints"
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise TypeError(f"{call}: {name}: {type(shape).__name__}, expected {expected}")
    try:
        sizes = tuple(index(size) for size in shape if not isinstance(size, bool))
    except TypeError:
        sizes = ()
    if len(sizes) != len(shape):
        raise TypeError(f"{call}: {name}: {list(shape)}, expected {expected}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{call}: {name}: {list(shape)}, expected sizes of at least 1")
    return sizes


def dtype_arg(call: str, dtype: Any) -> torch.dtype:
    """Return a dtype of torch."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: {type(dtype).__name__}, expected a torch.dtype")
    return dtype


def device_arg(call: str, device: Any) -> torch.device:
    """Return a device of this machine; a GPU has its number."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{number}" for number in range(count))]
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{call}: device: {device}, expected {' or '.join(known)}") from None
    if found.type == "cuda" and found.index is None and count > 0:
        found = torch.device("cuda", torch.cuda.current_device())
    if str(found) not in known:
        raise ValueError(f"{call}: device: {found}, expected {' or '.join(known)}")
    return found
