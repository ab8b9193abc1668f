"""The arguments of a user's kernel that C++ cannot read by itself, and torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitkern.errors import UnsupportedError

if TYPE_CHECKING:
    from jitkern.jit.params import Param

_ANY = "a tensor, int, float, bool or a ctypes value"

PLAIN: set[type] = {int, float, bool}
"""What C++ takes as it is. The classes of torch join when they are first seen."""

ON_CPU = -2
"""What C++ answers instead of a launch where all tensors are on the CPU, having checked all."""

TORCH: set[type] = set()
"""Those classes of torch: tensors, parameters, ..."""


def readable(kernel: str, params: Sequence[Param], args: Sequence[Any]) -> list[Any]:
    """Return `args` as C++ reads them: tensors, numbers, and bytes or pointers for all else.

    Raises TypeError for what is none of these, naming it as one of `params` if these are known.
    """
    made = []
    for position, arg in enumerate(args):
        read = arg if type(arg) in PLAIN else _readable(arg)
        if read is None:
            param = params[position] if position < len(params) else None
            what = f"launch: args[{position}]" if param is None else f"{kernel}: {param.name}"
            expected = _ANY if param is None else param.expected
            raise TypeError(f"{what}: {type(arg).__name__}, expected {expected}")
        made.append(read)
    return made


def _readable(arg: Any) -> Any:
    """Return None for what C++ cannot read."""
    import torch
    import tvm_ffi

    if isinstance(arg, torch.Tensor):
        PLAIN.add(type(arg))
        TORCH.add(type(arg))
        return arg
    if isinstance(arg, (ctypes._SimpleCData, ctypes.Structure)):
        return bytes([ctypes.alignment(arg)]) + bytes(arg)
    if hasattr(arg, "__dlpack__"):
        return tvm_ffi.from_dlpack(arg)
    if hasattr(arg, "data_ptr"):
        return ctypes.c_void_p(arg.data_ptr())
    if hasattr(arg, "__cuda_array_interface__"):
        return ctypes.c_void_p(arg.__cuda_array_interface__["data"][0])
    return None


def for_cpu(args: Sequence[Any], members: Sequence[Any]) -> list[Any]:
    """Return the arguments of a launch for a C++ function: numbers of ctypes are plain ones."""
    return [
        arg.value
        if isinstance(arg, ctypes._SimpleCData) and not isinstance(arg, ctypes.c_void_p)
        else member
        for arg, member in zip(args, members, strict=True)
    ]


def device_and_stream(device: int) -> tuple[int, int]:
    """Return a device and torch's current stream on it; of the current device for -1."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("launch: there is no CUDA device")
    number = torch.cuda.current_device() if device < 0 else device
    return number, torch.cuda.current_stream(number).cuda_stream
