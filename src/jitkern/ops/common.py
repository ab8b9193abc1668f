"""Shared by the ops: the module of an op's kernels, their names, checks of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jitkern.jit.device import DeviceModule, load_own
from jitkern.jit.template import CppArgs, KernelConfig

INDEX_BYTES = (4, 8)
"""Bytes of int32 and int64, the index types of every op."""


def widest_vec_bytes(row_bytes: int) -> int:
    """Return the widest vector (16, 8, 4, 2 or 1 bytes) that divides a row.

    Used if base addresses and strides are multiples of it, as those of contiguous tensors are.
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes: {row_bytes}, expected at least 1")
    return min(16, row_bytes & -row_bytes)


def entry_name(stem: str, row_bytes: int, vec_bytes: int, index_bytes: int, kind: str = "") -> str:
    """Return a kernel's name for profilers, such as ``jitkern_index_656B_v16_i64``."""
    name = f"jitkern_{stem}_{row_bytes}B_v{vec_bytes}_i{8 * index_bytes}"
    return f"{name}_{kind}" if kind else name


Entry = tuple[str, str, KernelConfig]
"""An entry point of a module: its name, its type in ``jitkern::``, its launch configuration."""


class RowShape(NamedTuple):
    """How the threads of a kernel share rows."""

    in_flight: int  # vectors that a thread has in flight
    splits: int = 1  # parts of a row, one warp each


def load_entries(
    op: str,
    file: str,
    entries: Sequence[Entry],
    args: CppArgs,
    shape: tuple[int, int],
) -> DeviceModule:
    """Return the device module of some entry points in a file of csrc.

    `args` tell it from the op's others. `shape` are two ints for the op's C++, which launches the
    kernels: a `RowShape`, or what the op names them.
    """
    wrappers = [(name, f"jitkern::{type_name}") for name, type_name, _ in entries]
    module = load_own(op, *args, device_files=[file], device_wrappers=wrappers)
    configs = [config for *_, config in entries]
    return module._launched_with(*configs, shape=shape)
