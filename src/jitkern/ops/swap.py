"""``swap_rows``: exchange rows of a GPU cache for rows of pinned host memory, both ways at once."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Literal

from jitkern.host import module as host_module
from jitkern.jit.device import DeviceModule, warm_hint
from jitkern.ops.common import INDEX_BYTES, entry_name
from jitkern.ops.pairs import (
    SMALL_IN_FLIGHT,
    load_entries,
    load_sort,
    pair_config,
    pair_copy_args,
    pair_entry_name,
)
from jitkern.ops.pairs import specialisations as pair_specialisations
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
    """Return the device module of one row size, vector width, index type, alignment and size.

    Or of large calls in the order of the host's memory.
    """
    in_flight = LARGE_IN_FLIGHT if large else SMALL_IN_FLIGHT
    config = pair_config(large)
    args = pair_copy_args(row_bytes, vec_bytes, index_bytes, line_aligned, large, in_flight)
    if not in_order:
        name = pair_entry_name("swap", row_bytes, vec_bytes, index_bytes, large)
        entries = [(name, f"SwapRows<{args}>", config)]
        return load_entries("swap", "swap.cu", entries, args, in_flight)
    place = pair_copy_args(row_bytes, vec_bytes, index_bytes, 1, 1, PLACE_IN_FLIGHT)
    swap_name, place_name = (
        entry_name(stem, row_bytes, vec_bytes, index_bytes, kind="in_order")
        for stem in ("swap", "place")
    )
    entries = [
        (swap_name, f"SwapRows<{args}, true>", config),
        (place_name, f"PlaceStaged<{place}>", config),
    ]
    module = load_entries("swap_in_order", "swap.cu", entries, args, in_flight)
    module.hint = partial(warm_hint, "swap", str(row_bytes))
    return module


@cache
def list_kernel(index_bytes: int) -> DeviceModule:
    """Return the device module that sorts the triples of calls in order."""
    return load_sort("swap_lists", "Triples", "triples", (index_bytes,))


host_module.builds("swap_lists", list_kernel)


def shared_kernels() -> list[DeviceModule]:
    """Return what calls of any row size need besides."""
    return [list_kernel(index_bytes) for index_bytes in INDEX_BYTES]


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    specs = pair_specialisations(row_bytes)
    return [*((*spec, 0) for spec in specs), *((*spec, 1) for spec in specs if spec[-1])]


@op(kernel, writes=("host", "gpu"))
def swap_rows(
    host: Tensor,
    gpu: Tensor,
    triples: Tensor,
    *,
    num_sms: int | None = None,
    order: Literal["auto", "host", "given"] = "auto",
) -> None:
    """Write row ``triples[i, 1]`` of ``gpu`` to ``host`` and fetch another into its place.

    For every ``i`` the old content of ``gpu[triples[i, 1]]`` goes to ``host[triples[i, 2]]``, and
    ``host[triples[i, 0]]`` into ``gpu[triples[i, 1]]``: a :func:`jitkern.d2h_scatter` and a
    :func:`jitkern.h2d_gather` in one kernel, which keeps both directions of the link busy. It runs
    on a few SMs, on the current stream and without a synchronisation; ``host`` must stay allocated,
    and the host may read what was written back, once the stream has come past the call. A call in
    the order of ``host`` takes scratch memory from PyTorch's caching allocator, the bytes of the
    rows and 28 or 48 for each triple, at most 512 MiB; another allocates nothing. May be captured
    in a CUDA graph, also by its first call.

    Parameters
    ----------
    host : Tensor
        ``[num_host_rows, ...]`` in host memory, pinned if ``gpu`` is on a GPU. Rows contiguous, row
        stride free, any row size from 1 byte up. Its rows share no memory with each other or with
        those of ``gpu``.
    gpu : Tensor
        ``[num_slots, ...]``, dtype and bytes per row as in ``host``, on a GPU or the CPU. Its rows
        share no memory with each other.
    triples : Tensor
        ``[..., 3]`` of (host row to fetch, slot, host row to write the slot's old content to),
        int32 or int64, contiguous, on the device of ``gpu``, in memory of their own. Of a triple
        with a negative host row only the other half is done, one with a negative slot is skipped.
        One that fetches the row which it writes back to exchanges the two. Otherwise slots should
        be distinct, rows to write back to as well, and none of these fetched by another triple.
        Several may fetch the same row. On the CPU anything else is a ValueError; on a GPU the rows
        that such triples write have undefined content (where one fetches a row that another writes
        back to, each part of the old or of the new). No other memory is ever touched.
    num_sms : int, optional
        Blocks of 1024 threads that work on the bus, at most one an SM, clamped to the GPU's SMs; by
        default as many as keep it busy: 4 for rows of more than 512 bytes, 8 for shorter ones,
        where alignment forbids 16-byte loads and in the order of ``host``. A small call is
        spread over the GPU for its few microseconds.
    order : {"auto", "host", "given"}
        In which order rows cross the bus: that of their places in ``host``, rows to fetch and rows
        to write back each in their own, or as they come; the result is the same. By default that of
        ``host`` where it is larger than what the link's address translation reaches and the call is
        large enough to win by it; see :func:`jitkern.h2d_gather`.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, pageable host memory, or memory that the call would
        write twice, or write and read. Nothing was launched or written.
    RuntimeError
        With gradients enabled: an argument requires one. Outside of inference mode: what is written
        to was made in it. Nothing was written.
    IndexError
        A row number past the end of ``host`` or ``gpu``, in a triple that is not padding. On the
        CPU at once, and nothing was written. On CUDA the triple is skipped, and the next jitkern
        call on the device or :func:`jitkern.check` raises.

    Examples
    --------
    >>> host = torch.randn(300_000, 328).bfloat16().pin_memory()
    >>> cache = torch.randn(4096, 328, device="cuda").bfloat16()
    >>> triples = torch.tensor([[7, 0, 299_999], [8, 1, -1], [-1, 2, 9]], device="cuda")
    >>> jitkern.swap_rows(host, cache, triples)
    """
