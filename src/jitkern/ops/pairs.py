"""What the ops on pairs of rows (``h2d_gather``, ``d2h_scatter``) share."""

from __future__ import annotations

from jitkern.jit.template import CppArgs, KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, widest_vec_bytes

CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
_LINE_BYTES = 128


def pair_copy_args(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, in_flight: int
) -> CppArgs:
    """Return the template arguments of a copy between host and device memory."""
    return make_cpp_args(
        row_bytes,
        vec_bytes,
        index_bytes,
        bool(line_aligned),
        in_flight,
        CONFIG.num_threads,
        CONFIG.max_occupancy,
    )


def pair_specialisations(row_bytes: int, in_flight: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return what contiguous rows need: both index types, each number of vectors in flight."""
    vec_bytes = widest_vec_bytes(row_bytes)
    line_aligned = int(row_bytes % _LINE_BYTES == 0)
    return [
        (row_bytes, vec_bytes, index_bytes, line_aligned, depth)
        for index_bytes in INDEX_BYTES
        for depth in in_flight
    ]
