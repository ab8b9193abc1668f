"""Launching users' device kernels from Python: arguments to a parameter struct, and off it goes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from jitkern.errors import UnsupportedError
from jitkern.host import module as host

Dim = int | Sequence[int]

# How a Python value lies in the kernel's Params; other widths are given as ctypes instances.
_C_TYPES: dict[type, Any] = {
    bool: ctypes.c_bool,
    int: ctypes.c_int64,
    float: ctypes.c_double,
}


def pack(args: Sequence[Any]) -> bytes:
    """Return `args` as the bytes of a C struct with these members, in order.

    A tensor is its data pointer, an int is ``long long``, a float ``double``, a bool ``bool``;
    ctypes instances such as ``ctypes.c_float(0.5)`` are what they say.

    Raises
    ------
    TypeError
        Anything else.

    Examples
    --------
    >>> pack([1, ctypes.c_float(0.5)]).hex()
    '01000000000000000000003f00000000'
    """
    fields: list[tuple[str, Any]] = []
    values: list[Any] = []
    for position, arg in enumerate(args):
        kind = type(arg)
        if kind in _C_TYPES:
            fields.append((f"a{position}", _C_TYPES[kind]))
            values.append(arg)
        elif hasattr(arg, "data_ptr"):
            fields.append((f"a{position}", ctypes.c_void_p))
            values.append(arg.data_ptr())
        elif isinstance(arg, (ctypes._SimpleCData, ctypes.Structure)):
            fields.append((f"a{position}", kind))
            values.append(arg)
        else:
            raise TypeError(
                f"launch: args[{position}]: {kind.__name__}, "
                "expected a tensor, int, float, bool or a ctypes value"
            )
    struct = type("Params", (ctypes.Structure,), {"_fields_": fields})
    return bytes(struct(*values))


def dim3(argument: str, value: Dim) -> tuple[int, int, int]:
    """Return `value` as three sizes; ValueError names `argument` where it is none."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"launch: {argument}: {value}, expected one to three positive ints")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def cuda_device(args: Sequence[Any]) -> int:
    """Return the CUDA device of the tensors in `args`, the current one where there are none."""
    import torch

    devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
    if any(device.type != "cuda" for device in devices) or len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"launch: args: tensors on {names}, expected all on one CUDA device")
    if not torch.cuda.is_available():
        raise UnsupportedError("launch: there is no CUDA device")
    if not devices:
        return torch.cuda.current_device()
    index = devices.pop().index
    return torch.cuda.current_device() if index is None else index


def load_function(image: bytes, name: str, device: int) -> int:
    """Load kernel `name` of `image` on `device`; return the driver's handle."""
    return int(host.module()["load_raw"](image, name, device))


def launch(
    function: int, device: int, params: bytes, grid: Dim, block: Dim, shared_bytes: int
) -> None:
    """Launch a loaded kernel on the current torch stream of `device`."""
    import torch

    if shared_bytes < 0:
        raise ValueError(f"launch: shared_bytes: {shared_bytes}, expected 0 or more")
    stream = torch.cuda.current_stream(device).cuda_stream
    host.module()["launch_raw"](
        function,
        device,
        stream,
        params,
        *dim3("grid", grid),
        *dim3("block", block),
        shared_bytes,
    )


def device_arch(device: int) -> tuple[int, int]:
    """Return the compute capability of CUDA device number `device`."""
    major, minor = divmod(int(host.module()["device_arch"](device)), 10)
    return major, minor
