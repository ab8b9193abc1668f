"""What the ops on pairs of rows (``h2d_gather``, ``d2h_scatter``) share."""

from __future__ import annotations

from jitkern.jit.template import CppArgs, KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, entry_name, widest_vec_bytes

# A large call runs on a few full blocks, each lane with several vectors on their way; in a small
# one, spread over the GPU, vectors are spread over threads instead.
LARGE_CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
SMALL_CONFIG = KernelConfig(num_threads=256, max_occupancy=4, use_pdl=False)
SMALL_IN_FLIGHT = 1
_LINE_BYTES = 128


def pair_config(large: int) -> KernelConfig:
    """Return how a call of that size is launched."""
    return LARGE_CONFIG if large else SMALL_CONFIG


def pair_copy_args(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int, in_flight: int
) -> CppArgs:
    """Return the template arguments of a copy between host and device memory."""
    num_threads, max_occupancy, _ = pair_config(large)
    flags = (bool(line_aligned), bool(large))
    return make_cpp_args(
        row_bytes, num_threads, max_occupancy, vec_bytes, index_bytes, *flags, in_flight
    )


def pair_entry_name(stem: str, row_bytes: int, vec_bytes: int, index_bytes: int, large: int) -> str:
    """Return the kernel's name, which says whether it is that of large calls."""
    kind = "large" if large else "small"
    return entry_name(stem, row_bytes, vec_bytes, index_bytes, kind=kind)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need.

    Both index types, small and large calls, as far as rows are contiguous.
    """
    vec_bytes = widest_vec_bytes(row_bytes)
    line_aligned = int(row_bytes % _LINE_BYTES == 0)
    return [
        (row_bytes, vec_bytes, index_bytes, line_aligned, large)
        for index_bytes in INDEX_BYTES
        for large in (0, 1)
    ]
