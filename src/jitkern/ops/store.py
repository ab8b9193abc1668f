"""``store_cache``: write new K and V rows into the slots of a paged KV cache."""

from __future__ import annotations

from functools import cache
from typing import Any

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.common import INDEX_BYTES, RowShape, entry_name, load_entries, widest_vec_bytes
from jitkern.ops.dispatch import inference_mode

# On an H200 1 to 2 % faster than 256 threads, and than 4 vectors of a row per lane.
CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=True)
IN_FLIGHT = 2  # vectors per lane


@cache
def kernel(
    row_bytes: int,
    vec_bytes: int,
    index_bytes: int,
    first_row_bytes: int | None = None,
    paged: int = 0,
    head_bytes: int | None = None,
) -> DeviceModule:
    """Return the device module of one row size, vector width and index type.

    If rows of K and V differ in size, the shorter ones have ``first_row_bytes`` and are stored
    first. One kernel serves K and V of one size and a single cache. ``paged``: blocks of pages lie
    apart, and so do heads of ``head_bytes`` that are shorter than a row.
    """
    first = row_bytes if first_row_bytes is None else first_row_bytes
    head = row_bytes if head_bytes is None else head_bytes
    more: tuple[int | bool, ...] = ()
    kind = ""
    if paged:
        more, kind = (first, True, head), f"pages_h{head}"
    elif first != row_bytes:
        more, kind = (first,), f"{first}B_first"
    args = make_cpp_args(row_bytes, *CONFIG, vec_bytes, index_bytes, IN_FLIGHT, *more)
    name = entry_name("store", row_bytes, vec_bytes, index_bytes, kind=kind)
    entry = (name, f"StoreKernel<{args}>", CONFIG)
    return load_entries("store", "ops/store.cu", [entry], args, RowShape(IN_FLIGHT))


host.builds("store_cache", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for contiguous rows of ``row_bytes``, in both caches or in one."""
    vec_bytes = widest_vec_bytes(row_bytes)
    return [kernel(row_bytes, vec_bytes, index_bytes) for index_bytes in INDEX_BYTES]


_store = host.Function("store_cache")


def _through_torch(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    skip: int | None = None,
) -> None:
    dispatch.through_torch(
        "store_cache", k_cache=k_cache, v_cache=v_cache, indices=indices, k=k, v=v, skip=skip
    )


@dispatch.traced_as(_through_torch)
def store_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    skip: int | None = None,
) -> None:
    """Copy row ``i`` of ``k`` and ``v`` to row ``indices[i]`` of ``k_cache`` and ``v_cache``.

    One launch for both, asynchronous on the current stream; allocates nothing. Bytes are copied, so
    the result is bit-exact for every dtype; lazy views of conj() and neg() are refused. A CUDA
    graph can capture any call, also the first. After vLLM's ``reshape_and_cache`` and mini-sglang.

    Parameters
    ----------
    k_cache : Tensor
        ``[num_slots, ...]``. A row is everything after the first dimension: contiguous, 1 byte or
        more. The row stride is free; rows must not overlap. Or pages
        ``[num_blocks, page, ...]``, of one dimension more than ``k`` and its trailing shape: slot
        ``block * page + offset`` is row ``[block, offset]``, and the strides of blocks, slots and,
        in ``[num_blocks, page, heads, dim]``, heads are free.
        Pass an HND cache ``[num_blocks, heads, page, dim]`` as ``.transpose(1, 2)``.
    v_cache : Tensor or None
        Same number of slots, device and dtype as ``k_cache``; rows may have another size. K and V
        may interleave in one tensor (``kv[:, 0]``, ``kv[:, 1]``). None for a single cache, such as
        MLA's: ``store_cache(cache, None, indices, rows)``.
    indices : Tensor
        ``[num_rows]``, int32 or int64, contiguous, on the caches' device. A negative index skips
        its row. If an index repeats, its slot gets a mix of the rows.
    k, v : Tensor
        ``[num_rows, ...]``, with the device, dtype and bytes per row of their caches. ``v`` is None
        if ``v_cache`` is None.
    skip : int, optional
        One more index whose rows are not stored. sglang sends padding to slot 0: ``skip=0``.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, device, shape or stride; memory that overlaps. Nothing was written.
    RuntimeError
        An argument requires grad, or an output is an inference tensor outside of inference mode.
    IndexError
        An index of ``num_slots`` or more. On the CPU at once, with nothing written. On CUDA the row
        is skipped, and the next jitkern call on the device or ``check`` raises.
    """
    call = _store.call
    written = (k_cache,) if v_cache is None else (k_cache, v_cache)
    if inference_mode.is_enabled() or dispatch.is_plain(written, (k,) if v is None else (k, v)):
        try:
            if not call(k_cache, v_cache, indices, k, v, skip):
                dispatch.bump_versions(written)
                return
        except dispatch.UNREADABLE as error:
            tensors = {"k_cache": k_cache, "v_cache": v_cache, "indices": indices, "k": k, "v": v}
            dispatch.require_wrapper(error, "store_cache", **tensors)
    _through_torch(k_cache, v_cache, indices, k, v, skip=skip)


# -- for PyTorch -----------------------------------------------------------------------------------


def _one_by_one(k_cache: Any, v_cache: Any, indices: Any, k: Any, v: Any, skip: Any) -> None:
    _through_torch(k_cache, None, indices, k, skip=skip)
    dispatch.through_torch("store_cache", "v", v_cache=v_cache, indices=indices, v=v, skip=skip)


OVERLOADS = (
    TorchOverload(
        "store_cache(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor indices, Tensor k, "
        "Tensor? v=None, *, SymInt? skip=None) -> ()",
        run=host.Function("store_cache_now"),
        fake=no_result,
        one_by_one=_one_by_one,
    ),
    TorchOverload(
        "store_cache.v(Tensor(a!) v_cache, Tensor indices, Tensor v, *, SymInt? skip=None) -> ()",
        run=host.Function("store_v_cache_now"),
        fake=no_result,
    ),
)
