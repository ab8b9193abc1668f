"""Tensors that say they are on a GPU, and kernels that the driver of fake_driver.c is told of."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi
from fake_gpu import OnCuda

from jitkern.jit import device as launch
from jitkern.jit.device import CpuForm, DeviceModule
from jitkern.jit.params import parse_params
from jitkern.jit.record import Specialisation

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_log.restype = ctypes.c_char_p
STREAM = 4711


def log() -> str:
    return bytes(driver.fake_log()).decode()


def cuda(*shape: int, dtype: torch.dtype = torch.float32, number: int = 0) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(torch.zeros(*shape, dtype=dtype), number))


def pinned(tensor: torch.Tensor, memory_type: int = 1) -> torch.Tensor:
    """Return the tensor, whose memory the driver knows: pinned, or of another type."""
    begin, num_bytes = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes)
    driver.fake_memory(begin, num_bytes, memory_type, 0)
    return tensor


class Fault(ctypes.Structure):
    """FaultRecord of types.h: what kernels write to, at an address."""

    _fields_ = (
        ("state", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("position", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("bound", ctypes.c_int64),
    )

    def be(self, *fields: int) -> None:
        self.state, self.site, self.position, self.value, self.bound = fields


def module_of(*names: str, **declared: Any) -> DeviceModule:
    wrappers = [(name, "Toy") for name in names]
    options = {"device_files": [], "device_wrappers": wrappers}
    return DeviceModule()._init(Specialisation("load_jit", ("toy",), options, ""), **declared)


def user(name: str, params_bytes: int, threads: int = 1024) -> DeviceModule:
    driver.fake_kernel(name.encode(), ctypes.c_uint64(params_bytes), threads)
    return module_of(name)


def declared(name: str, text: str, cpu: CpuForm = CpuForm()) -> DeviceModule:  # noqa: B008
    """A kernel whose Params are declared; the driver knows nothing of them, as before 12.4."""
    return module_of(name, params={name: parse_params(name, text)}, cpu=cpu)


def params(line: str) -> bytes:
    return bytes.fromhex(line.split(" ")[-1])


def raises(kind: type[Exception], text: str, call: Callable[..., object], *args: Any, **how: Any):
    """Return the error that a call raises, whose whole text is as given."""
    try:
        call(*args, **how)
    except kind as error:
        assert re.fullmatch(text, str(error), re.DOTALL), f"{error!r} is not {text!r}"
        return error
    raise AssertionError(f"no {kind.__name__}: {text}")


def refused(kind: type[Exception], text: str, call: Callable[..., object], *args: Any, **how: Any):
    raises(kind, text, call, *args, **how)
    assert "grid" not in log(), "launched all the same"


real_device_and_stream = launch.device_and_stream
