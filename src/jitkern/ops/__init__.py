"""The ops: one module per op, each with its public function and its cached kernel builder."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from jitkern.ops._ops import OPS


def device_ops() -> dict[str, ModuleType]:
    """Return the modules of all ops that have a CUDA kernel, by the op's short name.

    Each has ``kernel(*spec) -> DeviceModule`` and ``specialisations(size)``, the template
    arguments that ``jitkern warm`` builds for that row size, or what else the table says that it is
    sized by; and where calls of any size need more, ``shared_kernels()``, which returns it.
    """
    return {op.stem: import_module(f"jitkern.ops.{op.stem}") for op in OPS if op.has_kernels}
