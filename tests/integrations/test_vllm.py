"""``integrations.vllm`` in a stand-in for vLLM 0.33.0, whose copies are the reference."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs_cxx
from torch import Tensor

from jitkern import integrations
from jitkern.errors import UnsupportedError
from jitkern.integrations import plug_into_vllm

sys.path.append(str(Path(__file__).parents[1] / "ops"))
from format_reference import e4m3_bits, quantised, ref_store_row
from merge_reference import assert_merged

pytestmark = needs_cxx
CPU, KV = "v1.kv_offload.cpu", "distributed.kv_transfer.kv_connector.v1"
ATTENTION = "vllm.v1.attention.backends.flash_attn"
OURS = {f"{CPU}.gpu_worker": "_Handler", f"{CPU}.spec": "JitkernOffloadingSpec"}
OURS[f"{KV}.offloading_connector"] = "JitkernOffloadingConnector"
# The plug-in points of vLLM 0.33.0: the parameters of functions of its modules.
POINTS = {
    "_custom_ops merge_attn_states": "output prefix_output prefix_lse suffix_output suffix_lse "
    "output_lse prefill_tokens_with_context output_scale",
    "_custom_ops concat_and_cache_mla": "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale "
    "skip_scale",
    "_custom_ops reshape_and_cache_flash": "key value key_cache value_cache slot_mapping "
    "kv_cache_dtype k_scale v_scale",
    f"{CPU}.spec create_worker": "self kv_caches",
    f"{CPU}.gpu_worker _fill_direct_ops": "self g_idx group_src group_dst group_size "
    "src_skip_count dst_skip_count all_src all_dst all_sizes op_idx",
    f"{CPU}.gpu_worker wait": "self job_ids",
    f"{KV}.offloading_connector register_kv_caches": "self kv_caches",
    f"{KV}.offloading_connector start_load_kv": "self forward_context kwargs",
    f"{KV}.offloading_connector wait_for_layer_load": "self layer_name",
    f"{KV}.offloading_connector wait_for_save": "self",
    f"{KV}.offloading.config get_offloading_group_ids": "kv_cache_config",
}


class Stream:
    """A stream on the CPU, where calls are synchronous; the model's records its waits."""

    device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None:
        if self is Stream.of_model:
            Stream.waits.append(other)


class Handler:
    """vLLM's copies of one direction, page by page."""

    def __init__(self, gpu: Any, cpu: Any, parts: int, refs: Any, gpu_to_cpu: bool, **how: Any):
        step = 1 if gpu_to_cpu else -1
        self.src_tensors, self.dst_tensors = ([*gpu], [*cpu])[::step]
        self.src_blocks_per_chunk, self.dst_blocks_per_chunk = (1, parts)[::step]
        self.gpu_to_cpu, self.layer_refs_per_group = gpu_to_cpu, refs
        self._canonical_copy_plans = [] if how.get("canonical_layout") else None
        self._fill_group_ops, self._swap_blocks_batch = self._fill_direct_ops, lambda *_, **__: None
        self._estimate_max_copy_ops: Any = lambda sizes: sum(sizes) * sum(map(len, refs))
        self._stream_pool: list[Any] = []
        self.jobs: dict[int, int] = {}  # bytes
        self.num_pages, self.host_waits = 0, list[set[int]]()

    def _page(self, side: str, ref: Any, block: int, of: dict[str, Any]) -> Tensor:
        parts, at = getattr(self, f"{side}_blocks_per_chunk"), block + of[f"{side}_skip_count"]
        chunk = getattr(self, f"{side}_tensors")[ref.tensor_idx][of[f"group_{side}"][at // parts]]
        return chunk.view(parts, -1)[at % parts, : ref.page_size_bytes]

    def _fill_direct_ops(self, g_idx: int, **of: Any) -> tuple[int, int]:
        refs, count = self.layer_refs_per_group[g_idx], of["group_size"]
        for ref, i in itertools.product(refs, range(count)):
            self._page("dst", ref, i, of).copy_(self._page("src", ref, i, of))
            self.num_pages += 1
        return of["op_idx"] + count * len(refs), count * sum(ref.page_size_bytes for ref in refs)

    def transfer_async(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        gpu, op_idx, total = src_spec if self.gpu_to_cpu else dst_spec, 0, 0
        rest = {"src": src_spec.block_ids, "dst": dst_spec.block_ids}
        room = self._estimate_max_copy_ops(gpu.group_sizes)
        pinned = [torch.full((room,), -7) for _ in rest]
        both = {"all_src": pinned[0].numpy(), "all_dst": pinned[1].numpy()}
        for group, (size, place) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            of: dict[str, Any] = {"group_size": size, "op_idx": op_idx, **both}
            for side in rest if size else ():
                parts = getattr(self, f"{side}_blocks_per_chunk")
                of[f"{side}_skip_count"] = place % parts
                count = -(-(size + place % parts) // parts)
                of[f"group_{side}"], rest[side] = np.split(rest[side], [count])
            op_idx, num_bytes = self._fill_group_ops(group, **of) if size else (op_idx, 0)
            total += num_bytes
        assert op_idx <= room
        stream = self._stream_pool.pop() if self._stream_pool else Stream()
        stream.wait_stream(Stream.of_model)
        self._swap_blocks_batch(*(x[:op_idx] for x in pinned), None, is_src_access_order_any=True)
        self.jobs[job_id] = total
        return True

    def wait(self, job_ids: set[int]) -> None:
        self.host_waits.append(job_ids)

    def shutdown(self) -> None:
        self.src_tensors.clear()


class Spec:
    def create_worker(self, kv_caches: Any) -> Any:
        handler = sys.modules[f"vllm.{CPU}"].gpu_worker.SingleDirectionOffloadingHandler
        return SimpleNamespace(_expedited_load_handler=handler(*kv_caches, gpu_to_cpu=False))


class Connector:
    def __init__(self, spec: Any, groups: list[list[str]], offloaded: list[int]) -> None:
        config = SimpleNamespace(offloaded=offloaded)
        config.kv_cache_groups = [SimpleNamespace(layer_names=names) for names in groups]
        self.connector_worker, self.spec = SimpleNamespace(kv_cache_config=config, spec=spec), spec

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.connector_worker.worker = self.spec.create_worker(kv_caches)

    def start_load_kv(self, forward_context: Any) -> None:
        for job_id, sides in forward_context.jobs.items():
            self.connector_worker.worker._expedited_load_handler.transfer_async(job_id, *sides)
        self.connector_worker.worker._expedited_load_handler.wait(set(forward_context.jobs))

    def wait_for_save(self) -> None: ...


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put the stand-in in place, and return the plug-in loaded on it."""
    Stream.waits, Stream.of_model = [], Stream()
    streams = {"Stream": Stream, "current_stream": lambda: Stream.of_model}
    platform = SimpleNamespace(**streams, stream=lambda stream: nullcontext())
    ops = {
        "merge_attn_states": lambda output, *_: output.fill_(7),
        "concat_and_cache_mla": lambda kv_c, k_pe, cache, *_: cache.fill_(7),
        "reshape_and_cache_flash": lambda key, value, *caches: [x.fill_(7) for x in caches[:2]],
    }
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0", "_custom_ops": SimpleNamespace(**ops)},
        "vllm.platforms": {"current_platform": platform},
        f"vllm.{KV}.offloading.config": {"get_offloading_group_ids": lambda of: of.offloaded},
        ATTENTION: {"reshape_and_cache_flash": ops["reshape_and_cache_flash"]},
        f"vllm.{CPU}": {"gpu_worker": SimpleNamespace(SingleDirectionOffloadingHandler=Handler)},
        f"vllm.{CPU}.spec": {"CPUOffloadingSpec": Spec},
        f"vllm.{KV}.offloading_connector": {"OffloadingConnector": Connector},
    }
    for name, values in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))
    integrations._logged.clear()
    monkeypatch.delitem(sys.modules, "jitkern.integrations.vllm", raising=False)
    yield importlib.import_module("jitkern.integrations.vllm")
    sys.modules.pop("jitkern.integrations.vllm", None)


def group(**pages: int) -> list[Any]:
    """Return references to tensors t0, t1 and t2, each with the bytes of a page."""
    return [SimpleNamespace(tensor_idx=int(t[1]), page_size_bytes=n) for t, n in pages.items()]


def job(factor: int, sizes: Sequence[int], places: Sequence[int], to_cpu: bool) -> Any:
    """Return the two sides of a job; its blocks are in random order."""
    counted = [n + place % factor for n, place in zip(sizes, places, strict=True) if n]
    lengths = sum(sizes), sum(-(-n // factor) for n in counted)
    ids = [np.random.default_rng(3).permutation(9)[:n].astype(np.int32) for n in lengths]
    gpu = SimpleNamespace(block_ids=ids[0], group_sizes=sizes, block_indices=places)
    return (gpu, SimpleNamespace(block_ids=ids[1]))[:: 1 if to_cpu else -1]


def caches(factor: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return tensors of 9 pages, and a region of 9 rows: a chunk of each tensor, and a gap."""
    pages, numbers = (24, 24, 40), torch.Generator().manual_seed(5)
    gpu = [torch.randint(99, (9, n), generator=numbers, dtype=torch.int8) for n in pages]
    region = torch.randint(99, (9, factor * sum(pages) + 8), generator=numbers, dtype=torch.int8)
    return gpu, region, list(region.split([*(factor * n for n in pages), 8], 1)[:3])


@pytest.mark.parametrize("why", ["", "canonical", "pageable", "overlaps"])
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("to_cpu", [True, False])
def test_bytes_are_vllms(engine: Any, to_cpu: bool, factor: int, why: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "vllm.jitkern")
    refs = [group(t0=20, t1=24), group(t2=40), group(t1=17, t0=24)]
    refs[2] += group(t1=24) if why == "overlaps" else []
    how = {"canonical_layout": why == "canonical", "host_memory_is_pinned": why != "pageable"}
    results = []
    for make in (Handler, engine._Handler, engine._Handler):
        gpu, region, cpu = caches(factor)
        handler = make(gpu, cpu, factor, refs, to_cpu, **how)
        assert handler.transfer_async(1, *job(factor, (4, 0, 3), (2, 5, 7), to_cpu))
        assert handler.transfer_async(2, *job(factor, (0, 0, 1), (0, 0, 1), to_cpu))
        bytes_ = torch.cat([one.flatten() for one in (*gpu, region)])
        results.append((bytes_.tolist(), handler.jobs))
        assert bool(handler.num_pages) == bool(why or make is Handler)
        handler.shutdown()
        assert not getattr(handler, "groups", [])
    assert results[0] == results[1] == results[2]
    last = sum(ref.page_size_bytes for ref in refs[2])
    assert results[0][1] == {1: 4 * 44 + 3 * last, 2: last}
    lines = [line for line in caplog.messages if "leaves copies" in line]
    assert len(lines) == bool(why) and why in "".join(lines)


def test_layers_wait_once_all_were_seen_to(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[Any, int]] = []
    monkeypatch.setattr(engine.LayerSignals, "wait", lambda *of: waits.append(of))
    layers = [["a0", "a1"], ["not offloaded"], ["b0", "b1"]]
    connector = engine.JitkernOffloadingConnector(engine.JitkernOffloadingSpec(), layers, [0, 2])
    gpu, _, cpu = caches(3)
    connector.register_kv_caches((gpu, cpu, 3, [group(t0=24, t1=24), group(t2=40)]))
    loads, wait = connector._loads, connector.wait_for_layer_load
    assert engine.gpu_worker.SingleDirectionOffloadingHandler is Handler  # again

    def start(mode: str = "PIECEWISE", metadata: Any = "some") -> None:
        context = SimpleNamespace(cudagraph_runtime_mode=SimpleNamespace(name=mode))
        context.jobs = {1: job(3, (2, 1), (1, 3), False), 2: job(3, (1, 0), (0, 0), False)}
        context.attn_metadata = metadata
        connector.start_load_kv(context)

    for layer in ("a0", "a1", "b0", "b1"):
        start()
        wait(layer)
    assert Stream.waits == [loads.stream] * 4 and not waits
    start()
    for layer in ("a0", "a1", "b1", "with the cache of another"):
        wait(layer)
    a, b = (lists[2] for lists in loads.groups)
    assert waits == [(a, 0), (a, 1), (b, 0)] and len(Stream.waits) == 4  # one buffer for b0 and b1
    connector.wait_for_save()
    wait("a0")
    assert len(Stream.waits) == 5 and len(waits) == 3
    start("FULL")
    start("NONE", None)
    assert len(Stream.waits) == 7 and loads.host_waits == []
    loads.wait({1})  # of a request that is preempted
    assert loads.host_waits == [{1}]


def test_what_does_not_fit_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="spec_name: Spec, expected JitkernOffloadingSpec"):
        engine.JitkernOffloadingConnector(Spec(), [], []).register_kv_caches(([], [], 1, []))
    sys.modules["vllm"].__version__ = "0.34.0"
    del sys.modules["vllm.platforms"]  # as in a version that has moved it
    with pytest.raises(UnsupportedError, match=r"vllm 0\.34\.0, expected 0\.33\.0; JITKERN_ANY"):
        importlib.reload(engine)


def test_a_build_for_another_cuda_is_the_same_version(engine: Any) -> None:
    sys.modules["vllm"].__version__ = "0.33.0+cu129"
    importlib.reload(engine)


@pytest.mark.parametrize(("count", "to_fp8", "with_lse"), [(None, False, True), (2, True, False)])
def test_merge(engine: Any, device: torch.device, count: Any, to_fp8: bool, with_lse: bool) -> None:
    outs = [torch.randn(5, 3, 16, device=device).bfloat16() for _ in range(2)]
    lses = [torch.randn(3, 5, device=device) for _ in range(2)]
    lses[0][0, 1] = lses[1][2, 0] = lses[1][1, 4] = float("inf")
    out = torch.empty_like(outs[0], dtype=torch.float8_e4m3fn if to_fp8 else None)
    lse = torch.empty_like(lses[0]) if with_lse else None
    scale = torch.tensor([0.05], device=device) if to_fp8 else None
    engine.merge_attn_states(out, outs[0], lses[0], outs[1], lses[1], lse, count, scale)
    options = {"lse_layout": "heads_tokens", "prefill_tokens_with_context": count, "scale": scale}
    assert_merged((out, lse), outs, lses, **options)
    out = out.double()
    engine.merge_attn_states(out, outs[0].double(), lses[0], outs[1].double(), lses[1])
    assert out.eq(7).all()  # vLLM's own


# vLLM's slots, and one more row than slots: padding for CUDA graphs.
SLOTS = [5, -1, 12, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8_ds_mla"])
def test_mla_rows(engine: Any, device: torch.device, kv_cache_dtype: str, dtype: Any) -> None:
    latent = torch.randn(5, 576).to(dtype)
    latent[2, 128:256] = 0
    slots, parts = torch.tensor(SLOTS, device=device), latent.to(device).split([512, 64], 1)
    is_fp8 = kv_cache_dtype == "fp8_ds_mla"
    pages = (
        torch.full((7, 4, 656), 3, dtype=torch.uint8) if is_fp8 else torch.ones(7, 4, 576).to(dtype)
    )
    cache = pages.to(device)[::2]  # blocks of another layer lie between
    engine.concat_and_cache_mla(*parts, cache, slots, kv_cache_dtype, torch.tensor(1.0))
    expected = pages[::2]
    for row, slot in zip(latent, SLOTS, strict=False):
        if slot >= 0 and is_fp8:
            payload, scales = quantised(row[:512], "fp8_ds_mla")
            ref_store_row(expected, slot, payload, scales, row[512:], "fp8_ds_mla")
        elif slot >= 0:
            expected[slot // 4, slot % 4] = row
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND", "K and V packed"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3"])
def test_k_and_v(
    engine: Any, device: Any, kv_cache_dtype: str, layout: str, per_head: bool
) -> None:
    is_fp8 = kv_cache_dtype != "auto"
    dtype = torch.uint8 if is_fp8 else torch.bfloat16
    qkv = torch.randn(5, 3, 2, 16).bfloat16()
    key, value = qkv[:, 1], qkv[:, 2]
    scales = [torch.tensor(x).repeat(2) if per_head else torch.tensor(x) for x in (0.02, 0.3)]
    if layout == "K and V packed":  # [blocks, heads, page, 2 * dim], as vLLM 0.33 has it
        pages = torch.ones(4, 2, 4, 32, dtype=dtype, device=device)
        caches = pages.transpose(1, 2).split(16, dim=-1)
    elif layout == "HND":
        pages = torch.ones(2, 4, 2, 4, 16, dtype=dtype, device=device)
        caches = pages.transpose(2, 3).unbind()
    else:
        pages = torch.ones(4, 2, 4, 2, 16, dtype=dtype, device=device)
        caches = pages.unbind(1)
    expected = [cache.cpu().clone() for cache in caches]
    args = (x.to(device) for x in (torch.tensor(SLOTS), *scales))
    slots, k_scale, v_scale = args
    rows = key.to(device), value.to(device)
    engine.reshape_and_cache_flash(*rows, *caches, slots, kv_cache_dtype, k_scale, v_scale)
    for x, cache, scale in zip((key, value), expected, scales, strict=True):
        stored = e4m3_bits(x.float() / scale.view(-1, 1)) if is_fp8 else x
        for row, slot in zip(stored, SLOTS, strict=False):
            if slot >= 0:
                cache[slot // 4, slot % 4] = row
    assert [cache.cpu().tolist() for cache in caches] == [cache.tolist() for cache in expected]


@pytest.mark.parametrize(
    "kv_cache_dtype, pe_dim", [("fp8", 64), ("nvfp4_ds_mla", 64), ("fp8_ds_mla", 0)]
)
def test_stores_left_to_vllm(engine: Any, kv_cache_dtype: str, pe_dim: int, caplog: Any) -> None:
    """A row without a RoPE part has 656 bytes in vLLM, too: it writes zeros."""
    caplog.set_level(logging.INFO, "vllm.jitkern")
    cache, one = torch.zeros(2, 4, 656, dtype=torch.uint8), torch.ones(())
    slots, parts = (
        torch.tensor([1]),
        (torch.ones(1, 512).bfloat16(), torch.ones(1, pe_dim).bfloat16()),
    )
    engine.concat_and_cache_mla(*parts, cache, slots, kv_cache_dtype, one, True)
    pages, rows = torch.zeros(2, 2, 4, 2, 16, dtype=torch.uint8), torch.ones(2, 1, 2, 16).bfloat16()
    engine.reshape_and_cache_flash(*rows, *pages, slots, "fp8_e5m2", one, one)
    assert cache.eq(7).all() and pages.eq(7).all()
    mla, flash = caplog.messages
    assert "concat_and_cache_mla to vLLM: " in mla
    assert flash.endswith("reshape_and_cache_flash to vLLM: kv_cache_dtype fp8_e5m2")


def test_functions_are_replaced_if_named(engine: Any, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "vllm.jitkern")
    ops, importer = sys.modules["vllm"]._custom_ops, sys.modules[ATTENTION]
    names = ("merge_attn_states", "concat_and_cache_mla", "reshape_and_cache_flash")
    theirs, ours = ([getattr(place, name) for name in names] for place in (ops, engine))
    for plugins, now in (("other", theirs), ("other, jitkern", ours)):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        plug_into_vllm()
        plug_into_vllm()
        assert [getattr(ops, name) for name in names] == now
        assert importer.reshape_and_cache_flash is now[2]
    assert caplog.messages == [f"jitkern replaces {', '.join(names)}"]


def test_overrides_have_vllms_parameters(engine: Any) -> None:
    """Also compares vLLM's functions if VLLM_SOURCE is the folder of its package."""
    root = os.environ.get("VLLM_SOURCE")
    for point, wanted in POINTS.items():
        module, name = point.split()
        own = vars(getattr(engine, OURS[module]) if module in OURS else engine).get(name)
        if own and "offloading.config" not in module:
            assert [*inspect.signature(own).parameters] == wanted.split(), point
        if root:
            tree = ast.parse(Path(root, f"{module.replace('.', '/')}.py").read_text())
            of = next(one for one in ast.walk(tree) if getattr(one, "name", None) == name)
            arguments = [*of.args.args, *filter(None, [of.args.vararg, of.args.kwarg])]
            assert [one.arg for one in arguments] == wanted.split(), point
