"""jitkern in sglang: HiCache's copies between host pools and the GPU, and the pools' memory.

``SGLANG_PLUGINS=jitkern`` enables it. One call of ``copy_blocks`` copies tokens in all layers.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache, partial
from inspect import signature
from itertools import combinations
from typing import Any

import torch

from jitkern import BlockBuffers, copy_blocks
from jitkern.env import process_environment
from jitkern.integrations import log_once, require_version
from jitkern.offload import PinnedPool

TRIED = ("0.5.23",)
# Not the staged copies, up to 9 % faster than ours (H100), nor "direct": the same copy engine.
NAMES = {
    "sglang.kernels.ops.kvcache.hicache.transfer_hicache_": "one_layer one_layer_mla all_layer "
    "all_layer_mla",
    "sgl_kernel.kvcacheio.transfer_kv_": "per_layer per_layer_pf_lf per_layer_ph_lf per_layer_mla "
    "per_layer_mla_pf_lf all_layer all_layer_lf_pf all_layer_lf_ph all_layer_mla "
    "all_layer_mla_lf_pf",
    "sglang.srt.mem_cache.pool_host.common.": "alloc_with_host_register",
}
TABLES = "k_ptr_* v_ptr_* ptr_* *_k_layers *_v_layers *_layers"
SIDES, POOLS = ("src", "dst"), "k_cache_* v_cache_* cache_* *_k *_v *"
_parameters = cache(lambda function: tuple(signature(function).parameters))


# Addresses are trusted, as by the engine's kernels: host memory is pinned, and all of it outlives
# the copy. An entry holds only numbers, so it stays right if the memory becomes another pool's.
@lru_cache(maxsize=4096)
def _rows(starts: tuple[int, ...], size: int, stride: int, rows: int, device: int) -> BlockBuffers:
    """Return rows at addresses; with ``rows`` 0, as many as fit before buffers overlap."""
    num_rows = rows or 1 << 31
    for low, high in combinations(() if rows else sorted(set(starts)), 2):
        if not size <= (high - low) % stride <= stride - size:  # else their rows alternate
            num_rows = min(num_rows, max(1, (high - low - size) // stride + 1))
    where, make = "cpu" if device < 0 else device, BlockBuffers.from_trusted_addresses
    return make(starts, size, num_rows, where, block_strides=[stride] * len(starts))


@lru_cache(maxsize=64)
def _heads(pools: Any, size: int, row: int, layers: range, page: int, heads: int) -> BlockBuffers:
    """Return rows of ``[pages, heads, page_size, layers, head_dim]``: a piece per head."""
    views: list[torch.Tensor] = []
    for address, num_bytes in pools:  # these tensors own nothing: an entry keeps no pool allocated
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        tokens = torch.frombuffer(memory, dtype=torch.uint8)
        tokens = tokens.view(-1, heads, page, row // size, size // heads).transpose(1, 2)
        views += (tokens[:, :, :, layer] for layer in layers)
    return BlockBuffers(views, block_dims=2)


@cache
def _names(given: tuple[str, ...], side: str) -> list[list[str]]:
    """Return a side's names: of distances of rows; of tables; of pools; of indices."""
    strides = "*_layout_dim kv_cache_*_stride_bytes cache_*_stride_bytes"
    roles = strides, TABLES, POOLS, "*_indices indices_*"
    return [[x for x in role.replace("*", side).split() if x in given] for role in roles]


def _side(call: dict[str, Any], side: str) -> BlockBuffers:
    """Return the source or destination, "src" or "dst", from the arguments' names."""
    strides, tables, pools, _ = ([call[x] for x in role] for role in _names(tuple(call), side))
    size, stride, layer = call["item_size"], sum(strides), call.get("layer_id", 0)
    if tables:
        for table in tables:
            if not hasattr(table, "_jitkern"):  # once: reading it synchronises
                table._jitkern = tuple(table.tolist())
        starts = tuple(x for table in tables for x in table._jitkern[: call.get("num_layers")])
        # The engine writes to tables of host pools. Other copies are right, but not tuned.
        return _rows(starts, size, stride or size, 0, -1 if side == "dst" else table.get_device())
    layers = range(layer, layer + call.get("num_layers", 1)) if stride else range(1)
    if stride and "head_num" in call:
        if any(one.is_cuda or not one.is_contiguous() for one in pools):
            raise ValueError("page heads that are not in host memory")
        memory = tuple((one.data_ptr(), one.nbytes) for one in pools)
        return _heads(memory, size, stride, layers, call["page_size"], call["head_num"])
    pool, num_rows = pools[0], pools[0].nbytes // (stride or size)
    if num_rows == 0 or any(one.stride() != pool.stride() for one in pools):
        raise ValueError("no rows, or pools of unlike strides")
    if not pool.is_contiguous():
        if stride or pool[0].nbytes != size or not pool[0].is_contiguous():
            raise ValueError("rows that are not contiguous")
        stride = pool.stride(0) * pool.element_size()
    starts = tuple(one.data_ptr() + i * size for one in pools for i in layers)
    return _rows(starts, size, stride or size, num_rows, pool.get_device())


def _row_bytes(call: dict[str, Any]) -> int:
    """Return the bytes of a row in a call of HiCache's, unless the engine is as fast at it."""
    from sglang.kernels.ops.kvcache import hicache

    strides = {call[name] for name in call if name.endswith("_stride_bytes")}
    pools = [call[name] for side in SIDES for name in _names(tuple(call), side)[2]]
    size = call.get("element_size") or max(strides, default=0)
    if pools:
        size = (call.get("element_dim") or pools[0].size(-1)) * pools[0].element_size()
    # Its TMA kernel loads packed rows at 45 to 50 GB/s and stores them at 52, ours at 40 to 49 and
    # 45 to 51. Rows of 656 B from a page-first pool: 23 to 26, ours 39 (H100, H200).
    if size % 128 == 0 or (strides <= {size} and all(one.is_contiguous() for one in pools)):
        quota, page = call.get("block_quota") or hicache.TMA_BLOCK_QUOTA, call.get("page_size")
        if hicache.use_hicache_tma_kernel(element_size=size, block_quota=quota, page_size=page):
            raise ValueError("its TMA kernel is as fast")
    return int(size)


def _allocate(call: dict[str, Any]) -> Any:
    """Return the memory of a host pool, which the engine would map and register."""
    is_usual = call["pin_memory"] and type(call["allocator"]).__name__ == "HostTensorAllocator"
    asks_for_pages = process_environment().get("SGLANG_HUGEPAGE_SIZE")
    if not is_usual or asks_for_pages or not torch.cuda.is_available():
        raise ValueError("memory of another kind")
    buffer: Any = PinnedPool(call["dims"], call["dtype"]).tensor()
    buffer._sglang_cuda_host_registered_ranges = []  # the pool has registered it
    return buffer


def _around(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what the engine's function does, or call it for what jitkern leaves to it."""
    call = dict(zip(_parameters(original), args, strict=False), **kwargs)
    try:
        if "allocator" in call:
            return _allocate(call)
        call["item_size"] = call["item_size"] if "item_size" in call else _row_bytes(call)
        pairs = [call[_names(tuple(call), side)[3][0]] for side in SIDES]
        if pairs[0].device != pairs[1].device:
            gpu = max(one.get_device() for one in pairs)  # -1 is the CPU
            pairs = [x if x.is_cuda else x.pin_memory().cuda(gpu, non_blocking=True) for x in pairs]
        src, dst = pairs if pairs[0].dtype == pairs[1].dtype else (x.long() for x in pairs)
        how: Any = {"method": "sm", "num_sms": call.get("block_quota")}
        return copy_blocks(_side(call, "src"), _side(call, "dst"), (src, dst), **how)
    except (TypeError, ValueError) as error:
        log_once("sglang", f"jitkern leaves calls of {name} to sglang: ", error)
        return original(*args, **kwargs)


HOOKS = {x + y: partial(_around, x + y) for x, names in NAMES.items() for y in names.split()}


def plugin() -> None:
    """Wrap the engine's functions."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    require_version("sglang", sglang.__version__, TRIED)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    log_once("sglang", f"jitkern wraps {', '.join(HOOKS)}")
