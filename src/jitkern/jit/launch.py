"""The arguments of a user's kernel that C++ cannot read by itself, and torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from jitkern.errors import UnsupportedError

PLAIN: set[type] = {int, float, bool}
"""What C++ takes as it is. The classes of torch join when they are first seen."""

TORCH: set[type] = set()
"""Those classes of torch: tensors, parameters, ..."""


def readable(args: Sequence[Any]) -> list[Any]:
    """Return `args` as C++ reads them: tensors, numbers, and bytes or pointers for all else."""
    return [arg if type(arg) in PLAIN else _readable(arg, i) for i, arg in enumerate(args)]


def _readable(arg: Any, position: int) -> Any:
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
    raise TypeError(
        f"launch: args[{position}]: {type(arg).__name__}, "
        "expected a tensor, int, float, bool or a ctypes value"
    )


def device_and_stream(device: int) -> tuple[int, int]:
    """Return a device and torch's current stream on it; of the current device for -1."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("launch: there is no CUDA device")
    number = torch.cuda.current_device() if device < 0 else device
    return number, torch.cuda.current_stream(number).cuda_stream
