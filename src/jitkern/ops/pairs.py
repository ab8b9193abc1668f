"""Shared by the ops between host and device memory: how kernels are launched, named, sorted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import CppArgs, KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, RowShape, entry_name, load_entries, widest_vec_bytes

# A large call runs on a few full blocks, each lane with several vectors in flight. A small call is
# spread over the GPU, one vector per thread.
LARGE_CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
SMALL_CONFIG = KernelConfig(num_threads=256, max_occupancy=4, use_pdl=False)
SMALL_IN_FLIGHT = 1
# The kernels that list the pairs of a large call: one thread per pair; the scan of the regions'
# counts is one block with four regions per thread.
LIST_CONFIG = KernelConfig(num_threads=256, max_occupancy=4, use_pdl=False)
SCAN_CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
_LINE_BYTES = 128


def pair_config(large: int) -> KernelConfig:
    """Return how a call of that size is launched."""
    return LARGE_CONFIG if large else SMALL_CONFIG


def pair_copy_args(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int, in_flight: int
) -> CppArgs:
    """Return the template arguments of a copy between host and device memory."""
    rest = (vec_bytes, index_bytes, bool(line_aligned), bool(large), in_flight)
    return make_cpp_args(row_bytes, *pair_config(large)[:2], *rest)


def pair_kernels(
    op: str,
    copy: str,
    large_in_flight: int,
    row_bytes: int,
    vec_bytes: int,
    index_bytes: int,
    line_aligned: int,
    large: int,
    *,
    file: str = "ops/pairs.cuh",
) -> DeviceModule:
    """Return the device module of an op on pairs, whose kernel is ``jitkern::<copy>``."""
    in_flight = large_in_flight if large else SMALL_IN_FLIGHT
    sizes = (row_bytes, vec_bytes, index_bytes)
    args = pair_copy_args(*sizes, line_aligned, large, in_flight)
    name = entry_name(op, *sizes, kind="large" if large else "small")
    entry = (name, f"{copy}<{args}>", pair_config(large))
    return load_entries(op, file, [entry], args, RowShape(in_flight))


def load_sort(
    op: str,
    file: str,
    rows: str,
    label: str,
    spec: Sequence[int],
    side: str = "",
) -> DeviceModule:
    """Return the device module that sorts the rows of large calls by their place in host memory.

    One module serves all row sizes: compiling one for each, 100 ms, would double a first large
    call. `rows` is part of the kernels' C++ types, `label` of their names; ``spec[0]`` is the bytes
    of an index.
    """
    index_bytes, threads, scan_threads = spec[0], LIST_CONFIG[:2], SCAN_CONFIG[:2]
    listed = f"{make_cpp_args(index_bytes, *threads)}{side}"
    bits = 8 * index_bytes
    entries = [
        (f"jitkern_list_{label}_i{bits}", f"List{rows}<{listed}>", LIST_CONFIG),
        ("jitkern_scan_regions", f"ScanRegions<{make_cpp_args(*scan_threads)}>", SCAN_CONFIG),
        (f"jitkern_place_{label}_i{bits}", f"Place{rows}<{listed}>", LIST_CONFIG),
    ]
    args = make_cpp_args(*spec, *threads, *scan_threads)
    return load_entries(op, file, entries, args, RowShape(in_flight=1))


HOST_SIDES = ((", jitkern::kHostSource", "sources"), (", jitkern::kHostTarget", "targets"))
"""Template argument and name of kernels that sort by source rows, or by destination rows."""


@cache
def list_kernel(index_bytes: int, host_target: int) -> DeviceModule:
    """Return the device module that sorts pairs, by source rows or by destination rows."""
    side, label = HOST_SIDES[host_target]
    spec = (index_bytes, host_target)
    return load_sort("pair_lists", "ops/sort.cuh", "Pairs", label, spec, side)


host.builds("pair_lists", list_kernel)


def list_kernels(host_target: int) -> list[DeviceModule]:
    """Return the kernels that large calls of any row size need."""
    return [list_kernel(index_bytes, host_target) for index_bytes in INDEX_BYTES]


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that contiguous rows of ``row_bytes`` need.

    Both index types, small and large calls.
    """
    vec_bytes = widest_vec_bytes(row_bytes)
    line_aligned = int(row_bytes % _LINE_BYTES == 0 or _LINE_BYTES % row_bytes == 0)
    return [
        (row_bytes, vec_bytes, index_bytes, line_aligned, large)
        for index_bytes in INDEX_BYTES
        for large in (0, 1)
    ]
