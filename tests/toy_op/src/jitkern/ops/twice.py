"""``write_twice``: write every row of a table twice. An op for tests/test_table.py."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import load_entries, widest_vec_bytes
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=False)
IN_FLIGHT = 2


@cache
def kernel(row_bytes: int, vec_bytes: int) -> DeviceModule:
    """Return the device module of one row size and vector width."""
    args = make_cpp_args(row_bytes, *CONFIG, vec_bytes, IN_FLIGHT)
    name = f"jitkern_twice_{row_bytes}B_v{vec_bytes}"
    entry = (name, f"TwiceKernel<{args}>", CONFIG)
    return load_entries("twice", "ops/twice.cu", [entry], args, IN_FLIGHT)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    return [(row_bytes, widest_vec_bytes(row_bytes))]


@op(kernel, writes=("output",), reads=("rows",))
def write_twice(rows: Tensor, output: Tensor) -> None:
    """Copy row ``i`` of ``rows`` to rows ``2 * i`` and ``2 * i + 1`` of ``output``."""
