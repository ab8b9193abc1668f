"""Checks of Python arguments. Each raises ``call: name: what came, expected what``.

Tensors on the way to a kernel are checked in C++: a tensor attribute costs 0.3 us in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from jitkern.names import did_you_mean

if TYPE_CHECKING:
    import torch

MAX_TIMEOUT_S = 1e6  # 12 days; poll() takes at most 24


def type_text(value: object) -> str:
    """Return the type of an argument for an error message."""
    return "None" if value is None else type(value).__name__


def int_arg(
    call: str,
    name: str,
    value: Any,
    least: int,
    most: int | None = None,
    error: type[Exception] = ValueError,
) -> int:
    """Return an int from `least` to `most`, else raise `error`.

    NumPy ints are accepted. bool is refused, and so is a tensor: reading it would wait for the GPU.
    """
    try:
        if isinstance(value, bool) or hasattr(value, "untyped_storage"):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected an int") from None
    if number < least or (most is not None and number > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise error(f"{call}: {name}: {number}, expected {expected}")
    return number


def number_arg(call: str, name: str, value: Any, most: float = math.inf) -> float:
    """Return a finite number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected a number")
    if not 0 <= value <= most or math.isinf(value):
        expected = "0 or more" if math.isinf(most) else f"0 to {most:g}"
        raise ValueError(f"{call}: {name}: {value}, expected {expected}")
    return float(value)


def seconds_arg(
    call: str, value: Any, name: str = "timeout_s", most: float = MAX_TIMEOUT_S
) -> float:
    """Return a positive number of seconds; ``most=math.inf`` accepts infinity, for no deadline."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected seconds")
    if not 0 < value <= most:
        expected = "above 0" if math.isinf(most) else f"above 0 and at most {most:g} s"
        raise ValueError(f"{call}: {name}: {value}, expected {expected}")
    return float(value)


def choice_arg(call: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`. C++ has the same in ops/common.cc."""
    *others, last = map(repr, choices)
    expected = f"{', '.join(others)} or {last}" if others else last
    if not isinstance(value, str):
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected {expected}")
    if value not in choices:
        hint = did_you_mean(value, {choice: repr(choice) for choice in choices})
        raise ValueError(f"{call}: {name}: {value!r}, expected {expected}{hint}")
    return value


def optional_arg(call: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless `value` is None or an instance of `kind`."""
    if value is not None and not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        expected = f"{article} {kind.__name__} or None"
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected {expected}")


def shape_arg(call: str, name: str, shape: Any) -> tuple[int, ...]:
    """Return the sizes of a shape; each is at least 1."""
    expected = "a sequence of ints"
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise TypeError(f"{call}: {name}: {type_text(shape)}, expected {expected}")
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
    """Return `dtype` if it is a torch.dtype."""
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: {type_text(dtype)}, expected a torch.dtype")
    return dtype


def device_arg(call: str, name: str, device: Any) -> torch.device:
    """Return the CPU, or a GPU with its number. None is the current GPU if there is one."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # torch.device(0) fails if there is no GPU.
        parsed = torch.device(f"cuda:{device}" if type(device) is int else device)
    except (RuntimeError, TypeError):
        parsed = torch.device("meta")
    if parsed.type not in ("cuda", "cpu"):
        raise ValueError(f"{call}: {name}: {device!r}, expected 'cpu', 'cuda' or 'cuda:N'")
    if parsed.type == "cpu":
        return torch.device("cpu")
    if (count := torch.cuda.device_count()) == 0:
        raise ValueError(f"{call}: {name}: {device}, expected the CPU: PyTorch sees no GPU")
    if parsed.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if parsed.index >= count:
        raise ValueError(f"{call}: {name}: {device}, expected below cuda:{count}")
    return parsed


def not_a_tensor(call: str, **arguments: object) -> TypeError | None:
    """Return an error that names the first argument that is no torch.Tensor, or None."""
    import torch

    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            expected = "a torch.Tensor" if hasattr(value, "__dlpack__") else "a tensor"
            return TypeError(f"{call}: {name}: {type_text(value)}, expected {expected}")
    return None


def refuse_lazy(op: str, **tensors: Any) -> None:
    """Raise ValueError for a lazy view, whose memory holds the values before conj() or neg()."""
    for name, tensor in tensors.items():
        if hasattr(tensor, "is_conj") and (tensor.is_conj() or tensor.is_neg()):
            raise ValueError(
                f"{op}: {name}: a lazy view of conj() or neg(), expected the values in memory; "
                ".resolve_conj().resolve_neg() makes a copy, for tensors that are only read"
            )
