"""What the children share that copy on the driver of fake_driver.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import OnCuda, driver

from jitkern.jit.device import DeviceModule


def from_a_line(num_bytes: int) -> torch.Tensor:
    memory = torch.randint(0, 256, (num_bytes + 128,), dtype=torch.uint8)
    return memory[-memory.data_ptr() % 128 :][:num_bytes]


def on_gpu(tensor: torch.Tensor, number: int = 0) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(tensor, number))


def foreign(tensor: torch.Tensor) -> Any:
    """Return the same memory without PyTorch, whose allocator would be asked for scratch."""
    return tvm_ffi.from_dlpack(tensor)


def tvm_ffi_library() -> ctypes.CDLL:
    return ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())


def main(checks: dict[str, Any], clean: Callable[[], None]) -> None:
    """Run them with scratch memory of the driver and images that are names."""
    allocator = ctypes.cast(driver.fake_allocate, ctypes.c_void_p)
    tvm_ffi_library().TVMFFIEnvSetDLPackManagedTensorAllocator(allocator, 1, None)
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    report_checks(checks, clean)
