"""``h2d_gather``: bring scattered rows of pinned host memory into a GPU cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from jitkern.jit import host
from jitkern.jit.loader import DeviceModule, load_jit
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, name_unreadable, widest_vec_bytes

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
_LINE_BYTES = 128
# Vectors in flight per thread, as in csrc/ops/h2d_gather.h: of small calls, and of large ones.
_IN_FLIGHT = (1, 8)


@cache
def kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, in_flight: int
) -> DeviceModule:
    """Return the device module of one row size, vector width, index type, alignment and depth."""
    args = make_cpp_args(
        row_bytes,
        vec_bytes,
        index_bytes,
        bool(line_aligned),
        in_flight,
        CONFIG.num_threads,
        CONFIG.max_occupancy,
    )
    return load_jit(
        "h2d_gather",
        *args,
        device_files=["ops/h2d_gather.cu"],
        device_wrappers=[("h2d_gather", f"jitkern::H2DGather<{args}>")],
    )


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    vec_bytes = widest_vec_bytes(row_bytes)
    line_aligned = int(row_bytes % _LINE_BYTES == 0)
    return [
        (row_bytes, vec_bytes, index_bytes, line_aligned, in_flight)
        for index_bytes in INDEX_BYTES
        for in_flight in _IN_FLIGHT
    ]


@cache
def _op() -> Callable[..., Any]:
    return host.op("h2d_gather", kernel)


def h2d_gather(
    src: Tensor,
    dst: Tensor,
    pairs: Tensor,
    *,
    slot_map: Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst`` for every ``i``.

    On a GPU one persistent kernel of a few blocks reads ``src`` over PCIe, on the current stream,
    without a synchronisation or an allocation; the source must stay allocated and unchanged until
    the stream has come past the call. May be captured in a CUDA graph.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]`` in host memory, pinned if ``dst`` is on a GPU. Rows contiguous, row
        stride free, any row size from 1 byte up.
    dst : Tensor
        ``[num_dst_rows, ...]``, dtype and bytes per row as in ``src``, on a GPU or the CPU.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``dst``. A pair with a negative member is skipped. Destinations should be distinct: where
        one appears twice, either row may win.
    slot_map : Tensor, optional
        ``[num_src_rows]``, int32 or int64, on the device of ``dst``: where each source row now
        lives. Ends with ``slot_map[source row] == destination row`` for every copied pair; other
        entries keep their value.
    num_sms : int, optional
        Blocks of 1024 threads that a large call may use, at most one an SM, clamped to the GPU's
        SMs. Two are enough for the bus, and leave the others to the model; that is the default.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, or a pageable source. Nothing was launched or written.
    IndexError
        A row number past the end of ``src`` or ``dst``. On the CPU at once, and nothing was
        written. On CUDA the row is skipped, and the next jitkern call on the device or
        :func:`jitkern.check` raises.

    Examples
    --------
    >>> src = torch.randn(300_000, 328, dtype=torch.bfloat16).pin_memory()
    >>> dst = torch.empty(300_000, 328, dtype=torch.bfloat16, device="cuda")
    >>> pairs = torch.tensor([[7, 0], [299_999, 1]], device="cuda")
    >>> jitkern.h2d_gather(src, dst, pairs)
    """
    try:
        _op()(src, dst, pairs, slot_map, num_sms)
    except RuntimeError as error:
        name_unreadable(error, "h2d_gather", src=src, dst=dst, pairs=pairs, slot_map=slot_map)
        raise
