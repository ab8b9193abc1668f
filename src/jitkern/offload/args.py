"""Arguments of what is in this room: what came, and what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _int_arg(call: str, name: str, value: Any) -> int:
    """Return what is an int, or counts as one, such as NumPy's."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{call}: {name}: {type(value).__name__}, expected an int")


def count_arg(call: str, name: str, value: Any, most: int = 0) -> int:
    """Return an int of 1 to `most`; 0: of any size."""
    count = _int_arg(call, name, value)
    if count < 1 or (most and count > most):
        expected = f"1 to {most}" if most else "at least 1"
        raise ValueError(f"{call}: {name}: {count}, expected {expected}")
    return count


def natural_arg(call: str, name: str, value: Any) -> int:
    """Return an int of 0 or more."""
    number = _int_arg(call, name, value)
    if number < 0:
        raise ValueError(f"{call}: {name}: {number}, expected 0 or more")
    return number


def number_arg(call: str, name: str, value: Any, most: float = math.inf) -> float:
    """Return a number of 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected a number")
    if not 0 <= value <= most or math.isinf(value):
        expected = "0 or more" if math.isinf(most) else f"0 to {most:g}"
        raise ValueError(f"{call}: {name}: {value}, expected {expected}")
    return float(value)


def function_arg(call: str, name: str, value: Any) -> None:
    """Raise TypeError for what cannot be called."""
    if not callable(value):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected a function")


def iterable_arg(call: str, name: str, value: Any) -> None:
    """Raise TypeError for what cannot be gone over."""
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected an iterable")


def optional_arg(call: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError for what is neither None nor of this class."""
    if value is not None and not isinstance(value, kind):
        what = type(value).__name__
        raise TypeError(f"{call}: {name}: {what}, expected an {kind.__name__} or None")


def shape_arg(call: str, name: str, shape: Any) -> tuple[int, ...]:
    """Return the sizes of a shape that is not empty."""
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
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: {type(dtype).__name__}, expected a torch.dtype")
    return dtype


def device_arg(call: str, device: Any) -> torch.device:
    """Return a device of this machine, with its number if it is a GPU."""
    import torch

    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        what = type(device).__name__
        raise TypeError(f"{call}: device: {what}, expected a torch.device, a str or an int")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        found = None
    if found is not None and found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found is not None and found.type == "cuda" and (found.index or 0) < count:
        number = torch.cuda.current_device() if found.index is None else found.index
        return torch.device("cuda", number)
    there = "cpu" if count == 0 else f"cpu or cuda:0 to cuda:{count - 1}"
    raise ValueError(f"{call}: device: {device!s}, expected {there}")


def int64_arg(call: str, name: str, given: Any) -> torch.Tensor:
    """Return the numbers of a tensor or another buffer, such as a NumPy array, as a tensor."""
    import torch

    if isinstance(given, torch.Tensor):
        return given
    expected = "a tensor or an array of int64"
    try:
        buffer = memoryview(given)
    except TypeError:
        what = type(given).__name__
        raise TypeError(f"{call}: {name}: {what}, expected {expected}") from None
    if buffer.format not in ("l", "q"):
        text = f"items of format {buffer.format!r}, expected int64"
        raise TypeError(f"{call}: {name}: {text}")
    shape = buffer.shape or ()
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=torch.int64, device="cpu")  # whatever torch's default
    # torch takes no memory that cannot be written, and none with gaps.
    in_place = buffer.c_contiguous and not buffer.readonly
    flat = torch.frombuffer(buffer if in_place else bytearray(buffer), dtype=torch.int64)
    return flat.view(shape)
