"""``write_twice``: write every row of a table twice. An op for tests/test_table.py."""

from __future__ import annotations

from functools import cache

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.common import RowShape, load_entries, widest_vec_bytes
from jitkern.ops.dispatch import inference_mode

CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=False)
IN_FLIGHT = 2


@cache
def kernel(row_bytes: int, vec_bytes: int) -> DeviceModule:
    """Return the device module of one row size and vector width."""
    args = make_cpp_args(row_bytes, *CONFIG, vec_bytes, IN_FLIGHT)
    name = f"jitkern_twice_{row_bytes}B_v{vec_bytes}"
    entry = (name, f"TwiceKernel<{args}>", CONFIG)
    return load_entries("twice", "ops/twice.cu", [entry], args, RowShape(IN_FLIGHT))


host.builds("write_twice", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for contiguous rows of ``row_bytes``."""
    return [kernel(row_bytes, widest_vec_bytes(row_bytes))]


_twice = host.Function("write_twice")


def _through_torch(rows: torch.Tensor, output: torch.Tensor) -> None:
    dispatch.through_torch("write_twice", rows=rows, output=output)


@dispatch.traced_as(_through_torch)
def write_twice(rows: torch.Tensor, output: torch.Tensor) -> None:
    """Copy row ``i`` of ``rows`` to rows ``2 * i`` and ``2 * i + 1`` of ``output``."""
    call = _twice.call
    if inference_mode.is_enabled() or dispatch.is_plain((output,), (rows,)):
        try:
            if not call(rows, output):
                dispatch.bump_versions((output,))
                return
        except dispatch.UNREADABLE as error:
            dispatch.require_wrapper(error, "write_twice", rows=rows, output=output)
    _through_torch(rows, output)


OVERLOADS = (
    TorchOverload(
        "write_twice(Tensor rows, Tensor(a!) output) -> ()",
        run=host.Function("write_twice_now"),
        fake=no_result,
    ),
)
