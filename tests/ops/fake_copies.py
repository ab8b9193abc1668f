"""Memory and helpers of the children that copy on the driver of fake_driver.c."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import STREAM, OnCuda, driver, log

from jitkern.jit.device import DeviceModule

SIZE = 1 << 20


def from_a_line(num_bytes: int) -> torch.Tensor:
    memory = torch.randint(0, 256, (num_bytes + 128,), dtype=torch.uint8)
    return memory[-memory.data_ptr() % 128 :][:num_bytes]


PINNED, DEVICE = from_a_line(SIZE), from_a_line(SIZE)
PAGEABLE = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
HALF = SIZE // 2  # where the second registration of PINNED begins
for begin in (0, HALF):
    driver.fake_memory(ctypes.c_uint64(PINNED.data_ptr() + begin), ctypes.c_uint64(HALF), 1, 0)


def view(memory: torch.Tensor, *shape: int, at: int = 0) -> torch.Tensor:
    return memory[at : at + torch.Size(shape).numel()].view(shape)


def on_gpu(tensor: torch.Tensor, number: int = 0) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(tensor, number))


def foreign(tensor: torch.Tensor) -> Any:
    """Return the same memory without PyTorch, whose allocator would be asked for scratch."""
    return tvm_ffi.from_dlpack(tensor)


def on_a_stream() -> Any:
    """Not the default one, on which the driver takes no batch."""
    return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), STREAM)


def lines() -> list[str]:
    """Return what the driver was asked for, apart from loading kernels."""
    return [line for line in log().splitlines() if not line.startswith("module")]


def clean() -> None:
    DEVICE.zero_()
    driver.fake_capture(0)
    log()


def main(checks: dict[str, Any]) -> None:
    """Run them with scratch memory of the driver and images that are names."""
    allocator = ctypes.cast(driver.fake_allocate, ctypes.c_void_p)
    ffi = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    ffi.TVMFFIEnvSetDLPackManagedTensorAllocator(allocator, 1, None)
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    report_checks(checks, clean)
