"""The ops: one module per op, each with its public function and its cached kernel builder."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from jitkern.ops._ops import KERNEL_OPS


def device_ops() -> dict[str, ModuleType]:
    """Return the modules of all ops that have a CUDA kernel, by their stems.

    Each has ``kernels(size)``: the DeviceModules that ``jitkern warm`` builds for a row size, or
    for the size that the table names.
    """
    return {op.stem: import_module(f"jitkern.ops.{op.stem}") for op in KERNEL_OPS}
