"""The kernels of ``offload.ResidencyMap``.

They are not in its module: ``jitkern warm`` imports this one without PyTorch.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, load_entries, widest_vec_bytes

CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=True)
IN_FLIGHT = 4  # vectors of a lane: a piece of 2 KiB is in flight per warp
HELD_SLOTS = 2048  # slots that the threads of a block hold in registers
RESOLVE_VEC_BYTES = 16


@cache
def kernel(vec_bytes: int, index_bytes: int) -> DeviceModule:
    """Return the device module of one width of vectors and index type."""
    args = make_cpp_args(vec_bytes, index_bytes, *CONFIG, IN_FLIGHT)
    name = f"jitkern_swap_in_v{vec_bytes}_i{8 * index_bytes}"
    entry = (name, f"SwapIn<{args}>", CONFIG)
    return load_entries("residency", "offload/residency.cu", [entry], args, (IN_FLIGHT, 1))


host.builds("residency", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for rows of ``row_bytes``, and ``resolve``'s, which copies no rows."""
    vec_sizes = dict.fromkeys((widest_vec_bytes(row_bytes), RESOLVE_VEC_BYTES))
    return [kernel(*sizes) for sizes in product(vec_sizes, INDEX_BYTES)]
