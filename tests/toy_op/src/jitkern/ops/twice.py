"""``write_twice``: write every row of a table twice. An op for tests/test_table.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host
from jitkern.jit.device import DeviceModule, load_own
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops import dispatch
from jitkern.ops.common import TorchOverload, widest_vec_bytes

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=False)
IN_FLIGHT = 2


@cache
def kernel(row_bytes: int, vec_bytes: int) -> DeviceModule:
    """Return the device module of one row size and vector width."""
    args = make_cpp_args(row_bytes, *CONFIG, vec_bytes, IN_FLIGHT)
    name = f"jitkern_twice_{row_bytes}B_v{vec_bytes}"
    wrappers = [(name, f"jitkern::TwiceKernel<{args}>")]
    module = load_own("twice", *args, device_files=["ops/twice.cu"], device_wrappers=wrappers)
    return module.launched_with(CONFIG, in_flight=IN_FLIGHT)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    return [(row_bytes, widest_vec_bytes(row_bytes))]


@cache
def _op() -> Callable[..., Any]:
    return host.op("write_twice", kernel)


def _through_torch(rows: Tensor, output: Tensor) -> None:
    dispatch.through_torch("write_twice", rows=rows, output=output)


@dispatch.traced_as(_through_torch)
def write_twice(rows: Tensor, output: Tensor) -> None:
    """Copy row ``i`` of ``rows`` to rows ``2 * i`` and ``2 * i + 1`` of ``output``."""
    if dispatch.in_inference_mode() or dispatch.may_write((output,), (rows,)):
        try:
            if not _op()(rows, output):
                dispatch.wrote(output)
                return
        except (RuntimeError, ValueError) as error:
            dispatch.require_wrapper(error, "write_twice", rows=rows, output=output)
    _through_torch(rows, output)


TORCH_OVERLOADS = (
    TorchOverload(
        "write_twice(Tensor rows, Tensor(a!) output) -> ()",
        lambda *args: host.op_now("write_twice", kernel)(*args),
    ),
)
