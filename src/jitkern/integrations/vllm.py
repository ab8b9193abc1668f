"""jitkern in vLLM: KV cache offloading, stores in the KV cache, and merges of attention states.

vLLM's settings `spec_name` and `kv_connector` name classes of this module.
"""

from __future__ import annotations

import sys
from typing import Any

import vllm

from jitkern.integrations import log_once, require_version

TRIED = ("0.33.0",)
require_version("vllm", vllm.__version__, TRIED)  # first: other versions lack names below

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as engine_ops
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from jitkern import BlockBuffers, LayerSignals, copy_blocks, merge_state, store_rows

STORE_METHOD, LOAD_METHOD = "auto", "sm"  # the model runs beside stores; requests wait for loads
# Formats of rows by vLLM's kv_cache_dtype; None is for rows as they are.
AS_THEY_ARE = {"auto": None, "float16": None, "bfloat16": None}
MLA_FORMATS: dict[str, Any] = {**AS_THEY_ARE, "fp8_ds_mla": "fp8_ds_mla"}
KV_FORMATS: dict[str, Any] = {**AS_THEY_ARE, "fp8": "fp8", "fp8_e4m3": "fp8"}
# They import reshape_and_cache_flash by name, and may be imported before the plug-in.
IMPORTERS = ("vllm.v1.attention.backends.fa_utils", "vllm.v1.attention.backends.flash_attn")
_engine_merge = engine_ops.merge_attn_states
_engine_store_mla = engine_ops.concat_and_cache_mla
_engine_store_kv = engine_ops.reshape_and_cache_flash


class _Handler(gpu_worker.SingleDirectionOffloadingHandler):  # type: ignore[misc]
    """Copies each group of a job in one launch. vLLM calls `_add`, then `_copy`."""

    by_layer = False  # True: layers wait for new jobs on the GPU. False: the host waits

    def __init__(self, *args: Any, host_memory_is_pinned: bool = True, **rest: Any) -> None:
        super().__init__(*args, host_memory_is_pinned=host_memory_is_pinned, **rest)
        self.groups: list[tuple[BlockBuffers, BlockBuffers, LayerSignals]] = []
        self.awaited: dict[int, LayerSignals] = {}  # by group: copies that layers still wait for
        self.stream: Any = current_platform.Stream()  # all jobs: LayerSignals allow one stream
        self._added: list[tuple[int, slice]] = []
        try:
            if self._canonical_copy_plans is not None or not host_memory_is_pinned:
                raise ValueError("the canonical layout, or pageable host memory")
            self.groups = [self._group(refs) for refs in self.layer_refs_per_group]
            self._fill_group_ops, self._swap_blocks_batch = self._add, self._copy
        except (TypeError, ValueError) as error:
            log_once("vllm", "jitkern leaves copies of the KV cache to vLLM: ", error)

    def _group(self, refs: list[Any]) -> tuple[BlockBuffers, BlockBuffers, LayerSignals]:
        src = self._list(self.src_tensors, self.src_blocks_per_chunk, refs)
        dst = self._list(self.dst_tensors, self.dst_blocks_per_chunk, refs)
        signals = LayerSignals(len(refs), device=self.stream.device)
        with current_platform.stream(self.stream):  # padding only: checks memory and compiles
            padding = torch.full((1,), -1, device=self.stream.device)
            copy_blocks(src, dst, (padding, padding), method="sm", signals=signals)
        return src, dst, signals

    def _list(self, side: list[Tensor], n: int, refs: list[Any]) -> BlockBuffers:
        pages = [side[r.tensor_idx].unflatten(1, (n, -1))[..., : r.page_size_bytes] for r in refs]
        if n > 1 or pages[0].is_cuda:
            return BlockBuffers(pages, num_block_dims=2)
        # Trusted: ranks share the region, and a rank may have pinned only its own slots.
        addresses, sizes = [page.data_ptr() for page in pages], [page.shape[2] for page in pages]
        strides = [page.stride(0) for page in pages]
        return BlockBuffers.from_trusted_addresses(
            addresses, sizes, len(pages[0]), device="cpu", block_stride_bytes=strides
        )

    def _add(self, group: int, *, op_idx: int, group_size: int, **job: Any) -> tuple[int, int]:
        """Record the blocks of a group. On the CPU side a block is a part of a chunk."""
        part = slice(op_idx, op_idx + group_size)
        for side, parts in ("src", self.src_blocks_per_chunk), ("dst", self.dst_blocks_per_chunk):
            ids = (job[f"group_{side}"][:, None] * parts + np.arange(parts)).ravel()
            job[f"all_{side}"][part] = ids[job[f"{side}_skip_count"] :][:group_size]
        self._added.append((group, part))
        self._stream_pool[:] = [self.stream]  # vLLM takes the job's stream from there
        sizes = (ref.page_size_bytes for ref in self.layer_refs_per_group[group])
        return part.stop, group_size * sum(sizes)

    def _copy(self, src_ids: Tensor, dst_ids: Tensor, *_: Any, **__: Any) -> None:
        # With pairs on the CPU, copy_blocks would give blocks of 64 KiB to the copy engine, at 4 ms
        # of host time.
        ids = [side.to(self.stream.device, non_blocking=True) for side in (src_ids, dst_ids)]
        options: Any = {"method": STORE_METHOD if self.gpu_to_cpu else LOAD_METHOD}
        added, self._added = self._added, []
        for group, part in added:
            src, dst, signals = self.groups[group]
            if self.by_layer:
                options["signals"] = self.awaited[group] = signals
            copy_blocks(src, dst, (ids[0][part], ids[1][part]), **options)

    def wait(self, job_ids: set[int]) -> None:
        if not self.by_layer:
            super().wait(job_ids)

    def wait_on_stream(self) -> None:
        if self.awaited:
            current_platform.current_stream().wait_stream(self.stream)
            self.awaited.clear()

    def shutdown(self) -> None:
        self.groups = []  # they keep tensors of the region, which vLLM unmaps
        super().shutdown()


class JitkernOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's offloading to host memory that its ranks share, with jitkern's copies."""

    def create_worker(self, kv_caches: Any) -> Any:
        gpu_worker.SingleDirectionOffloadingHandler = _Handler
        try:
            return super().create_worker(kv_caches)
        finally:
            gpu_worker.SingleDirectionOffloadingHandler = _Handler.__base__


class JitkernOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's connector; each layer waits only for its own part of the loads of a step."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        config = self.connector_worker.kv_cache_config
        names = [config.kv_cache_groups[i].layer_names for i in get_offloading_group_ids(config)]
        self._places = {
            name: (group, layer)
            for group, layers in enumerate(names)
            for layer, name in enumerate(layers)
        }
        self._unseen = set(self._places)  # layers that have not waited in any step, e.g. Mamba
        if not isinstance(spec := self.connector_worker.spec, JitkernOffloadingSpec):
            raise ValueError(f"spec_name: {type(spec).__name__}, expected JitkernOffloadingSpec")
        self._loads = self.connector_worker.worker._expedited_load_handler

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._loads.by_layer = bool(self._loads.groups)
        super().start_load_kv(forward_context, **kwargs)
        self._loads.by_layer = False
        mode = forward_context.cudagraph_runtime_mode.name  # in a full graph, layers do not wait
        if self._unseen or mode == "FULL" or forward_context.attn_metadata is None:
            self._loads.wait_on_stream()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._unseen.discard(layer_name)
        group, layer = self._places.get(layer_name, (-1, 0))
        if signals := self._loads.awaited.get(group):
            signals.wait(min(layer, signals.num_layers - 1))

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._loads.wait_on_stream()


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    partials = prefix_output, prefix_lse, suffix_output, suffix_lse
    count = prefill_tokens_with_context
    try:
        merge_state(
            *partials,
            output=output,
            lse=False if output_lse is None else output_lse,
            lse_layout="heads_tokens",
            scale=output_scale,
            prefill_tokens_with_context=count,
        )
    except (TypeError, ValueError) as error:
        log_once("vllm", "jitkern leaves some calls of merge_attn_states to vLLM: ", error)
        _engine_merge(output, *partials, output_lse, count, output_scale)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    count = len(slot_mapping)  # the rows that follow are padding
    try:
        store_rows(
            kv_cache,
            slot_mapping,
            (kv_c[:count], k_pe[:count]),
            format=_format(MLA_FORMATS, kv_cache_dtype),
        )
    except (TypeError, ValueError) as error:
        log_once("vllm", "jitkern leaves some calls of concat_and_cache_mla to vLLM: ", error)
        _engine_store_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    count, caches, scales = len(slot_mapping), (key_cache, value_cache), (k_scale, v_scale)
    try:
        name = _format(KV_FORMATS, kv_cache_dtype)
        store_rows(
            caches,
            slot_mapping,
            (key[:count], value[:count]),
            format=name,
            scales=scales if name else None,
        )
    except (TypeError, ValueError) as error:
        log_once("vllm", "jitkern leaves some calls of reshape_and_cache_flash to vLLM: ", error)
        _engine_store_kv(key, value, *caches, slot_mapping, kv_cache_dtype, *scales)


def _format(formats: dict[str, Any], kv_cache_dtype: str) -> Any:
    if kv_cache_dtype not in formats:
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype}")
    return formats[kv_cache_dtype]


REPLACED = (merge_attn_states, concat_and_cache_mla, reshape_and_cache_flash)


def plugin() -> None:
    """Replace functions. vLLM looks them up where it calls them, but for those of IMPORTERS."""
    for function in REPLACED:
        setattr(engine_ops, function.__name__, function)
    for name in IMPORTERS:
        if module := sys.modules.get(name):
            setattr(module, reshape_and_cache_flash.__name__, reshape_and_cache_flash)
    names = ", ".join(function.__name__ for function in REPLACED)
    log_once("vllm", f"jitkern replaces {names}")
