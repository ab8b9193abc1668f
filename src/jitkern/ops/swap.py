"""``swap_rows``: exchange rows of a GPU cache for rows of pinned host memory, both ways at once."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Literal

from jitkern.host import module as host_module
from jitkern.jit.device import DeviceModule, warm_hint
from jitkern.ops import pairs
from jitkern.ops.common import INDEX_BYTES, entry_name, load_entries
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

# Vectors, of the new row and as many of the old one: 8 * 4 of the 64 registers that 1,024 threads
# leave to each. 8 of each spill, and two rows of 656 bytes in flight are 76 GB/s, four 55.
LARGE_IN_FLIGHT = 4
PLACE_IN_FLIGHT = 8  # of rows that go from staging to their slots, as for h2d_gather


@cache
def kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int, in_order: int
) -> DeviceModule:
    """Return the device module of one specialisation; ``in_order``: sorted by host memory."""
    sizes = (row_bytes, vec_bytes, index_bytes)
    spec, file = (*sizes, line_aligned, large), "ops/swap.cu"
    if not in_order:
        return pairs.pair_kernels("swap", "SwapRows", LARGE_IN_FLIGHT, *spec, file=file)
    args = pairs.pair_copy_args(*spec, LARGE_IN_FLIGHT)
    place = pairs.pair_copy_args(*sizes, 1, 1, PLACE_IN_FLIGHT)
    config = pairs.pair_config(large)
    entries = [
        (entry_name("swap", *sizes, kind="in_order"), f"SwapRows<{args}, true>", config),
        (entry_name("place", *sizes, kind="in_order"), f"H2DGather<{place}>", config),
    ]
    hint = partial(warm_hint, "swap", str(row_bytes))
    return load_entries("swap_in_order", file, entries, args, LARGE_IN_FLIGHT, hint)


@cache
def list_kernel(index_bytes: int) -> DeviceModule:
    """Return the device module that sorts the triples of calls in order."""
    return pairs.load_sort("swap_lists", "ops/sort.cuh", "Triples", "triples", (index_bytes,))


host_module.builds("swap_lists", list_kernel)


def shared_kernels() -> list[DeviceModule]:
    """Return what calls of any row size also need."""
    return [list_kernel(index_bytes) for index_bytes in INDEX_BYTES]


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    specs = pairs.specialisations(row_bytes)
    return [*((*spec, 0) for spec in specs), *((*spec, 1) for spec in specs if spec[-1])]


@op(kernel, writes=("host", "device"))
def swap_rows(
    host: Tensor,
    device: Tensor,
    triples: Tensor,
    *,
    num_sms: int | None = None,
    order: Literal["auto", "given", "host"] = "auto",
) -> None:
    """Write row ``triples[i, 1]`` of ``device`` to ``host`` and fetch another row into its place.

    For every ``i`` the old content of ``device[triples[i, 1]]`` goes to ``host[triples[i, 2]]``,
    and ``host[triples[i, 0]]`` into ``device[triples[i, 1]]``. One kernel on a few SMs keeps both
    directions of the link busy, asynchronously on the current stream. Keep ``host`` allocated until
    the stream has passed the call. Calls in the order of ``host`` take scratch memory: the rows'
    bytes and 28 or 48 per triple, at most 512 MiB. A CUDA graph may capture any call.

    Parameters
    ----------
    host : Tensor
        ``[num_host_rows, ...]`` in host memory, pinned if ``device`` is on a GPU. Rows contiguous,
        row stride free, 1 byte or more. Rows share no memory with each other or with ``device``.
    device : Tensor
        ``[num_slots, ...]`` on a GPU or the CPU, dtype and bytes per row of ``host``; no overlap.
    triples : Tensor
        ``[..., 3]`` of (host row to fetch, slot, host row to write to), int32 or int64, contiguous,
        on the device of ``device``. A negative host row leaves out that half; a negative slot skips
        the triple. Equal host rows exchange the two. Slots are distinct, and so are rows that are
        written; no triple fetches a row that another one writes. Otherwise the CPU raises
        ValueError, and on a GPU those rows end undefined.
    num_sms : int, optional
        As of ``h2d_gather``. Default: 2; 4 to 8 fill the link.
    order : {"auto", "given", "host"}
        Order in which rows cross the link, "host" by place in ``host``; see ``h2d_gather``.

    Raises
    ------
    TypeError, ValueError, RuntimeError, IndexError
        As ``h2d_gather``, for a triple instead of a pair.
    """
