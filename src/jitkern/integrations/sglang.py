"""jitkern in sglang: HiCache's copies and host pools, and stores of MLA rows.

``SGLANG_PLUGINS=jitkern`` enables it. One call of ``copy_blocks`` copies tokens in all layers.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import signature
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jitkern import BlockBuffers, copy_blocks, store_rows
from jitkern.env import process_environment
from jitkern.integrations import log_once, require_version
from jitkern.offload import PinnedPool

TRIED = ("0.5.23",)
HICACHE = "sglang.kernels.ops.kvcache.hicache.transfer_hicache_"
KVCACHEIO = "sgl_kernel.kvcacheio.transfer_kv_"
ALLOCATE = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"
STORE_MLA = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._write_mla_kv_buffer"


class LeftToEngineError(Exception):
    """Why the engine's own function has to do a call. No other error is left to the engine."""


class Call(dict[str, Any]):
    """The arguments of a call, by the names of the engine's parameters."""

    def __missing__(self, name: str) -> Any:
        raise LeftToEngineError(f"no argument {name}")

    def tensor(self, name: str) -> Tensor:
        value = self[name]
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise LeftToEngineError(f"argument {name} is no tensor of rows")
        return value

    def size(self, name: str, least: int = 1) -> int:
        value = self[name]
        if type(value) is not int or value < least:
            raise LeftToEngineError(f"argument {name} is no int from {least} on")
        return value


# -- the parameters of the engine's functions ------------------------------------------------------


@dataclass(frozen=True)
class Side(ABC):
    """The parameters that describe the source or the destination of a copy.

    `indices` are the tokens' places. `tensors` are one for K and one for V, or the one of MLA.
    `stride` is the number of bytes from a token to the next.
    """

    indices: str
    tensors: tuple[str, ...]
    stride: str = ""

    @abstractmethod
    def blocks(self, call: Call, row_bytes: int) -> BlockBuffers:
        """Return a buffer for each layer of each tensor; a block is a token or a page."""

    def is_packed(self, call: Call, row_bytes: int) -> bool:
        """Tell whether no bytes lie between one row and the next."""
        if self.stride:
            return call.size(self.stride) == row_bytes
        return all(call.tensor(name).is_contiguous() for name in self.tensors)


class Rows(Side):
    """Tensors of one layer; a row is a token."""

    def blocks(self, call: Call, row_bytes: int) -> BlockBuffers:
        pools = [call.tensor(name) for name in self.tensors]
        pool, num_rows, stride = pools[0], _num_rows(pools, row_bytes), row_bytes
        if not pool.is_contiguous():
            if pool[0].nbytes != row_bytes or not pool[0].is_contiguous():
                raise LeftToEngineError("rows that are not contiguous")
            stride = pool.stride(0) * pool.element_size()
        starts = tuple(pool.data_ptr() for pool in pools)
        return _buffers(starts, row_bytes, stride, num_rows, pool.get_device())


class PageFirst(Side):
    """Tensors of all layers; `stride` bytes of a token are its rows in one layer after another."""

    def blocks(self, call: Call, row_bytes: int) -> BlockBuffers:
        pools, stride = [call.tensor(name) for name in self.tensors], call.size(self.stride)
        num_rows = _num_rows(pools, stride)
        if not pools[0].is_contiguous():
            raise LeftToEngineError("a page-first pool that is not contiguous")
        layers = _layers(call)
        starts = tuple(pool.data_ptr() + i * row_bytes for pool in pools for i in layers)
        return _buffers(starts, row_bytes, stride, num_rows, pools[0].get_device())


class PageHead(Side):
    """Host tensors of all layers: ``[pages, heads, page_size, layers, head_dim]``."""

    def blocks(self, call: Call, row_bytes: int) -> BlockBuffers:
        pools = [call.tensor(name) for name in self.tensors]
        if any(pool.is_cuda or not pool.is_contiguous() for pool in pools):
            raise LeftToEngineError("page heads that are not contiguous, or not in host memory")
        memory = tuple((pool.data_ptr(), pool.nbytes) for pool in pools)
        shape = call.size("page_size"), call.size("head_num")
        return _head_buffers(memory, row_bytes, call.size(self.stride), _layers(call), *shape)


@dataclass(frozen=True)
class Table(Side):
    """Tables of addresses, one for each layer. Rows are packed if there is no `stride`."""

    is_on_host: bool = False  # the memory that the addresses are of; tables may be on the GPU

    def blocks(self, call: Call, row_bytes: int) -> BlockBuffers:
        tables = [call.tensor(name) for name in self.tensors]
        count = call.size("num_layers") if "num_layers" in call else None
        starts = tuple(address for table in tables for address in _addresses(table)[:count])
        device = -1 if self.is_on_host else tables[0].get_device()
        stride = call.size(self.stride) if self.stride else row_bytes
        return _table_buffers(starts, row_bytes, stride, device)


@dataclass(frozen=True)
class Copy:
    """The parameters of a function that copies tokens. `size` is the one of a row's size."""

    src: Side
    dst: Side
    size: str


SRC, DST = "src_indices", "dst_indices"
SRC_KV, DST_KV = ("src_k", "src_v"), ("dst_k", "dst_v")
SRC_TABLES = Table(SRC, ("src_k_layers", "src_v_layers"))
SRC_TABLE = Table(SRC, ("src_layers",))
# HiCache writes to tables of host pools. Tables of GPU memory are copied to correctly, too, but
# with the number of SMs that suits host memory.
DST_TABLES = Table(DST, ("dst_k_layers", "dst_v_layers"), is_on_host=True)
DST_TABLE = Table(DST, ("dst_layers",), is_on_host=True)
# The staged copies are not here: they are up to 9 % faster than ours (H100). Neither is "direct":
# it uses the copy engine, as ours would.
COPIES = {
    f"{HICACHE}one_layer": Copy(
        Rows("indices_src", ("k_cache_src", "v_cache_src")),
        Rows("indices_dst", ("k_cache_dst", "v_cache_dst")),
        "element_dim",
    ),
    f"{HICACHE}one_layer_mla": Copy(
        Rows("indices_src", ("cache_src",)), Rows("indices_dst", ("cache_dst",)), "element_dim"
    ),
    f"{HICACHE}all_layer": Copy(
        Table("indices_src", ("k_ptr_src", "v_ptr_src"), "kv_cache_src_stride_bytes"),
        Table(
            "indices_dst", ("k_ptr_dst", "v_ptr_dst"), "kv_cache_dst_stride_bytes", is_on_host=True
        ),
        "element_size",
    ),
    f"{HICACHE}all_layer_mla": Copy(
        Table("indices_src", ("ptr_src",), "cache_src_stride_bytes"),
        Table("indices_dst", ("ptr_dst",), "cache_dst_stride_bytes", is_on_host=True),
        "element_size",
    ),
    f"{KVCACHEIO}per_layer": Copy(Rows(SRC, SRC_KV), Rows(DST, DST_KV), "item_size"),
    f"{KVCACHEIO}per_layer_pf_lf": Copy(
        PageFirst(SRC, SRC_KV, "src_layout_dim"), Rows(DST, DST_KV), "item_size"
    ),
    f"{KVCACHEIO}per_layer_ph_lf": Copy(
        PageHead(SRC, SRC_KV, "src_layout_dim"), Rows(DST, DST_KV), "item_size"
    ),
    f"{KVCACHEIO}per_layer_mla": Copy(Rows(SRC, ("src",)), Rows(DST, ("dst",)), "item_size"),
    f"{KVCACHEIO}per_layer_mla_pf_lf": Copy(
        PageFirst(SRC, ("src",), "src_layout_dim"), Rows(DST, ("dst",)), "item_size"
    ),
    f"{KVCACHEIO}all_layer": Copy(SRC_TABLES, DST_TABLES, "item_size"),
    f"{KVCACHEIO}all_layer_lf_pf": Copy(
        SRC_TABLES, PageFirst(DST, DST_KV, "dst_layout_dim"), "item_size"
    ),
    f"{KVCACHEIO}all_layer_lf_ph": Copy(
        SRC_TABLES, PageHead(DST, DST_KV, "dst_layout_dim"), "item_size"
    ),
    f"{KVCACHEIO}all_layer_mla": Copy(SRC_TABLE, DST_TABLE, "item_size"),
    f"{KVCACHEIO}all_layer_mla_lf_pf": Copy(
        SRC_TABLE, PageFirst(DST, ("dst",), "dst_layout_dim"), "item_size"
    ),
}


# -- from arguments to buffers ---------------------------------------------------------------------


def _layers(call: Call) -> range:
    """Return the layers that a call copies of a pool of all layers."""
    if "layer_id" in call:
        layer = call.size("layer_id", 0)
        return range(layer, layer + 1)
    return range(call.size("num_layers"))


def _num_rows(pools: list[Tensor], row_bytes: int) -> int:
    """Return the number of rows of each pool."""
    num_rows = pools[0].nbytes // row_bytes
    if num_rows == 0 or any(pool.stride() != pools[0].stride() for pool in pools):
        raise LeftToEngineError("no rows, or pools of different strides")
    return num_rows


def _num_rows_apart(starts: tuple[int, ...], row_bytes: int, stride: int) -> int:
    """Return how many rows fit at each address before they reach another address's rows."""
    num_rows = 1 << 31
    for low, high in combinations(sorted(set(starts)), 2):
        if not row_bytes <= (high - low) % stride <= stride - row_bytes:  # else they alternate
            num_rows = min(num_rows, max(1, (high - low - row_bytes) // stride + 1))
    return num_rows


_tables: Any = WeakTensorKeyDictionary()  # addresses, by table


def _addresses(table: Tensor) -> tuple[int, ...]:
    """Return the addresses in a table. It is read once: reading synchronises with the GPU."""
    addresses: tuple[int, ...] | None = _tables.get(table)
    if addresses is None:
        addresses = _tables[table] = tuple(table.tolist())
    return addresses


# Addresses are trusted, as the engine's kernels trust them: host memory is pinned, and all of it
# outlives the copy. An entry holds only numbers, so it stays right if the memory becomes another
# pool's.
@lru_cache(maxsize=4096)
def _buffers(
    starts: tuple[int, ...], row_bytes: int, stride: int, num_rows: int, device: int
) -> BlockBuffers:
    """Return a buffer at each address, on a GPU or, with `device` -1, in host memory."""
    place: Any = "cpu" if device < 0 else device
    strides = [stride] * len(starts)
    return BlockBuffers.from_trusted_addresses(
        starts, row_bytes, num_rows, device=place, block_stride_bytes=strides
    )


@lru_cache(maxsize=4096)
def _table_buffers(
    starts: tuple[int, ...], row_bytes: int, stride: int, device: int
) -> BlockBuffers:
    """As ``_buffers``, with as many rows as fit: a table does not say how many there are."""
    num_rows = _num_rows_apart(starts, row_bytes, stride)
    return _buffers(starts, row_bytes, stride, num_rows, device)


@lru_cache(maxsize=64)
def _head_buffers(
    pools: tuple[tuple[int, int], ...],
    row_bytes: int,
    stride: int,
    layers: range,
    page_size: int,
    num_heads: int,
) -> BlockBuffers:
    """Return a buffer for each layer of pools ``[pages, heads, page_size, layers, head_dim]``.

    A pool is an address and a number of bytes. A row has a piece in each head.
    """
    views: list[Tensor] = []
    for address, num_bytes in pools:  # these tensors own nothing: an entry keeps no pool allocated
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        shape = -1, num_heads, page_size, stride // row_bytes, row_bytes // num_heads
        tokens = torch.frombuffer(memory, dtype=torch.uint8).view(shape).transpose(1, 2)
        views += (tokens[:, :, :, layer] for layer in layers)
    return BlockBuffers(views, num_block_dims=2)


# -- calls -----------------------------------------------------------------------------------------


def _row_bytes(copy: Copy, call: Call) -> int:
    """Return the bytes of a token in one layer."""
    if copy.size == "item_size":
        return call.size("item_size")
    if copy.size == "element_size":
        return call.size(copy.dst.stride if call.get("element_size") is None else "element_size")
    pool = call.tensor(copy.dst.tensors[0])
    dim = pool.size(-1) if call.get("element_dim") is None else call.size("element_dim")
    return dim * pool.element_size()


def _leave_to_tma(copy: Copy, call: Call, row_bytes: int) -> None:
    """Raise LeftToEngineError if the engine has a kernel that is as fast as ours.

    Its TMA kernel loads packed rows at 47 to 50 GB/s and stores them at 52, ours at 46 to 50 and 51
    to 52. Rows of 656 bytes from a page-first pool: 27 GB/s, ours 44 (H200).
    """
    from sglang.kernels.ops.kvcache import hicache

    sides = copy.src, copy.dst
    if row_bytes % 128 == 0 or all(side.is_packed(call, row_bytes) for side in sides):
        block_quota = call.get("block_quota") or hicache.TMA_BLOCK_QUOTA
        options = {"block_quota": block_quota, "page_size": call.get("page_size")}
        if hicache.use_hicache_tma_kernel(element_size=row_bytes, **options):
            raise LeftToEngineError("its TMA kernel is as fast")


def _on_one_device(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices with one device, the GPU if either is there, and one dtype."""
    if src.device != dst.device:
        gpu = max(src.get_device(), dst.get_device())  # -1 is the CPU
        src, dst = (
            x if x.is_cuda else x.pin_memory().cuda(gpu, non_blocking=True) for x in (src, dst)
        )
    return (src, dst) if src.dtype == dst.dtype else (src.long(), dst.long())


def _copy(copy: Copy, call: Call) -> None:
    row_bytes = _row_bytes(copy, call)
    if copy.size != "item_size":
        _leave_to_tma(copy, call, row_bytes)
    src, dst = copy.src.blocks(call, row_bytes), copy.dst.blocks(call, row_bytes)
    pairs = _on_one_device(call.tensor(copy.src.indices), call.tensor(copy.dst.indices))
    copy_blocks(src, dst, pairs, method="sm", num_sms=call.get("block_quota"))


def _allocate(call: Call) -> Tensor:
    """Return the memory of a host pool, which the engine would map and register."""
    is_usual = call["pin_memory"] and type(call["allocator"]).__name__ == "HostTensorAllocator"
    asks_for_pages = process_environment().get("SGLANG_HUGEPAGE_SIZE")
    if not is_usual or asks_for_pages or not torch.cuda.is_available():
        raise LeftToEngineError("memory of another kind")
    shape, dtype = call["dims"], call["dtype"]
    pool = PinnedPool(math.prod(shape) * dtype.itemsize)
    buffer: Any = pool.tensor(shape, dtype)
    # What the engine would unregister when it frees the pool: nothing, the PinnedPool does.
    buffer._sglang_cuda_host_registered_ranges = []
    return buffer  # type: ignore[no-any-return]


def _store_mla(call: Call) -> None:
    """Store the latent and RoPE parts of rows. The engine quantises in a launch of its own.

    A tile of zeros gets scale 1; the engine's becomes NaN.
    """
    pool, rope = call["self"], call["cache_k_rope"]
    if pool._write_loc_dcp_span > 1 or (pool.use_dsa and pool.write_loc_is_dcp_resolved):
        raise LeftToEngineError("slots that context parallelism splits over ranks")
    parts = [call.tensor("cache_k_nope")]
    if rope is not None and rope.numel() > 0:
        parts.append(rope)
    options: dict[str, Any] = {}
    if pool.dsa_kv_cache_store_fp8:
        if any(part.dtype != torch.bfloat16 for part in parts[1:]):
            raise LeftToEngineError("RoPE parts that are not bf16")
        options = {"format": "fp8_ds_mla", "scale_rule": "fp32"}
    elif {pool.store_dtype, *(part.dtype for part in parts)} != {pool.dtype}:
        raise LeftToEngineError("values of another dtype than the cache's")
    # Padding goes to slot 0. The engine's kernel for rows without a RoPE part stores it.
    skip = 0 if len(parts) == 2 else None
    store_rows(call.tensor("dst_buffer"), call.tensor("loc"), parts, skip=skip, **options)


_parameters = cache(lambda function: tuple(signature(function).parameters))


@dataclass(frozen=True)
class Hook:
    """Called in place of a function of the engine, with that function as its first argument."""

    name: str
    run: Callable[[Call], Any]

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = Call(zip(_parameters(original), args, strict=False), **kwargs)
        try:
            return self.run(call)
        except LeftToEngineError as reason:
            log_once("sglang", f"jitkern leaves calls of {self.name} to sglang: ", reason)
            return original(*args, **kwargs)


HOOKS = {name: Hook(name, partial(_copy, copy)) for name, copy in COPIES.items()}
HOOKS[ALLOCATE] = Hook(ALLOCATE, _allocate)
HOOKS[STORE_MLA] = Hook(STORE_MLA, _store_mla)


def plugin() -> None:
    """Wrap the engine's functions."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    require_version("sglang", sglang.__version__, TRIED)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    log_once("sglang", f"jitkern asks sglang to wrap {', '.join(HOOKS)}")
