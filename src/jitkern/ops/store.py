"""``store_cache``: write new K and V rows into the slots of a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host
from jitkern.jit.device import DeviceModule, load_own
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, TorchOverload, name_unreadable, widest_vec_bytes

if TYPE_CHECKING:
    from torch import Tensor

# On an H200 1 to 2 % faster than 256 threads, and than 4 vectors of a row per lane.
CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=True)
IN_FLIGHT = 2  # vectors that a lane moves at a time


@cache
def kernel(row_bytes: int, vec_bytes: int, index_bytes: int) -> DeviceModule:
    """Return the device module of one row size, vector width and index type."""
    args = make_cpp_args(row_bytes, *CONFIG, vec_bytes, index_bytes, IN_FLIGHT)
    module = load_own(
        "store",
        *args,
        device_files=["ops/store.cu"],
        device_wrappers=[("store", f"jitkern::StoreKernel<{args}>")],
    )
    return module.launched_with(CONFIG, in_flight=IN_FLIGHT)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    vec_bytes = widest_vec_bytes(row_bytes)
    return [(row_bytes, vec_bytes, index_bytes) for index_bytes in INDEX_BYTES]


@cache
def _op() -> Callable[..., Any]:
    return host.op("store_cache", kernel)


def store_cache(k_cache: Tensor, v_cache: Tensor, indices: Tensor, k: Tensor, v: Tensor) -> None:
    """Copy row ``i`` of ``k`` and ``v`` to row ``indices[i]`` of ``k_cache`` and ``v_cache``.

    K and V go in one launch, on the current stream, without a synchronisation or an allocation. The
    copy is bit-exact for every dtype, of the bytes as they lie in memory: call ``resolve_conj()``
    or ``resolve_neg()`` on lazy views first. May be captured in a CUDA graph, also by its first
    call.

    Parameters
    ----------
    k_cache, v_cache : Tensor
        ``[num_slots, ...]``, on one device. The dimensions behind the first form the row and must
        be contiguous; the row stride is free, so K and V may be interleaved in one tensor
        (``kv[:, 0]`` and ``kv[:, 1]``). Rows of any size from 1 byte up; the same size for K and V.
    indices : Tensor
        ``[num_rows]``, int32 or int64, contiguous, in memory of their own. A negative index skips
        its row. Where an index appears twice, the slot ends as a mix of both rows.
    k, v : Tensor
        ``[num_rows, ...]``, dtype and bytes per row as in the caches; their trailing shape may
        differ from the caches'.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, or indices in a row of the caches. Nothing was
        launched or written.
    IndexError
        ``indices`` holds a value of ``num_slots`` or more. On the CPU at once, and nothing was
        written. On CUDA the row is skipped, and the next jitkern call on the device or
        :func:`jitkern.check` raises.

    Examples
    --------
    >>> k_cache, v_cache = torch.zeros(2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16)
    >>> k, v = torch.randn(2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    >>> slots = torch.randperm(1024, device="cuda")[:16]
    >>> jitkern.store_cache(k_cache, v_cache, slots, k, v)
    """
    try:
        _op()(k_cache, v_cache, indices, k, v)
    except RuntimeError as error:
        name_unreadable(
            error, "store_cache", k_cache=k_cache, v_cache=v_cache, indices=indices, k=k, v=v
        )
        raise


TORCH_OVERLOADS = (
    TorchOverload(
        "store_cache(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, Tensor k, Tensor v)"
        " -> ()",
        store_cache,
    ),
)
