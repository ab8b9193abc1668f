"""Causal attention over a KV cache four times as large as the GPU memory that it may use.

A prompt is prefilled chunk by chunk. The KV cache of all layers is in pinned host memory
(`OffloadEngine`). For each chunk and layer the blocks of all tokens before it stream through a few
slots on the GPU (`SlotPipeline`), a unit of blocks at a time: the queries of the chunk attend to a
unit while the next ones are on their way, and the partial results are merged.

The same work is done on one stream as well, copies and compute in turn. At best overlap doubles the
speed, if copies take as long as the compute. That depends on the size of a chunk: the script tries
some and takes the fastest. Queries, K and V are random numbers.

    python examples/offload_attention.py
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitkern import merge_state
from jitkern.offload import OffloadEngine, SlotPipeline

# Relative to the root mean square of all outputs. bfloat16 rounds three times, to 0.1 % each.
MAX_RMS_ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    layers: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    budget: float  # the share of the cache that fits in slots of the engine and the pipeline
    depth: int
    unit_blocks: int
    method: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def num_blocks(self) -> int:
        return self.tokens // self.block_size

    @property
    def chunk_blocks(self) -> int:
        """The most blocks per chunk for which the budget has room in all layers."""
        room = int(self.budget * self.num_blocks * self.layers)
        return min((room - self.depth * self.unit_blocks) // self.layers, self.num_blocks)

    @property
    def block_bytes(self) -> int:
        return 2 * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return (2, self.unit_blocks, self.block_size, self.kv_heads, self.head_dim)

    def chunks(self, chunk: int) -> list[tuple[int, int]]:
        """Return chunks of at most `chunk` tokens, as even as blocks allow.

        A short last chunk would copy the whole cache for a few queries.
        """
        count = -(-self.tokens // chunk)
        ends = [self.num_blocks * i // count * self.block_size for i in range(count + 1)]
        return list(pairwise(ends))

    def inputs(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[kv_heads, group, tokens, dim]`, K and V `[tokens, kv_heads, dim]`."""
        source = torch.Generator(self.device).manual_seed(layer * self.tokens + begin)
        shape = (self.heads + 2 * self.kv_heads, end - begin, self.head_dim)
        qkv = torch.randn(shape, generator=source, device=self.device, dtype=self.dtype)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads])
        return q.unflatten(0, (self.kv_heads, -1)), k.transpose(0, 1), v.transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return attention of `[batch, heads, tokens, dim]`, and its log-sum-exp in float32."""
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, is_causal=is_causal
        )
        return out, lse
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores.masked_fill_(future, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def attend_to_itself(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's attention to its own tokens, all query heads of a KV head in one row."""
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(*q.shape[:2], -1, -1) for x in (k, v))
    out, lse = attend(q, k, v, is_causal=True)
    return out.flatten(1, 2).float(), lse.flatten(1, 2).float()


def attend_to_unit(q: Tensor, unit: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a chunk's attention to the tokens of blocks `[2, blocks, block_size, heads, dim]`."""
    k, v = unit.flatten(1, 2).transpose(1, 2)
    part, part_lse = attend(q.flatten(1, 2)[None], k[None], v[None])
    merge_state(out, lse, part[0].float(), part_lse[0], output=out, lse=lse)


class Unit(NamedTuple):
    """Blocks of one layer that are copied to a slot together, after the event `written`."""

    layer: int
    cpu_blocks: list[int]
    written: Any


class Prefill:
    """A prompt's way through all layers; with a pipeline, copies overlap compute."""

    def __init__(self, case: Case, engine: OffloadEngine, chunk: int) -> None:
        self.case, self.engine, self.chunk = case, engine, chunk
        torch.manual_seed(0)
        self.table: list[int] = torch.randperm(case.num_blocks).tolist()  # fragmented
        self.outputs: dict[tuple[int, int], Tensor] = {}

    def run(self, pipeline: SlotPipeline | None, keep: bool = False) -> None:
        """Queue all copies and kernels."""
        case, engine = self.case, self.engine
        on_gpu = case.device.type == "cuda"
        stores = torch.cuda.Stream(case.device) if on_gpu and pipeline is not None else None
        written: list[Any] = [None] * case.layers
        with pipeline if pipeline is not None else nullcontext():
            for begin, end in case.chunks(self.chunk):
                first, last = begin // case.block_size, end // case.block_size
                for layer in range(case.layers):
                    q, k, v = case.inputs(layer, begin, end)
                    before = written[layer]
                    if before is not None:  # the last chunk's stores read these slots
                        torch.cuda.current_stream().wait_event(before)
                    for slots, new in ((engine.gpu_k, k), (engine.gpu_v, v)):
                        slots[layer].flatten(0, 1)[: end - begin] = new
                    if stores is not None:
                        stores.wait_stream(torch.cuda.current_stream())
                    blocks = self.table[first:last]
                    with torch.cuda.stream(stores):  # None has no effect
                        engine.store(range(last - first), blocks, layer=layer)
                    written[layer] = stores.record_event() if stores is not None else None
                    out, lse = attend_to_itself(q, k, v)
                    for slot in self._stream(self._units(layer, first, before), pipeline):
                        unit = slot.tensor[:, : len(slot.block.cpu_blocks)]
                        attend_to_unit(q, unit, out, lse)
                    result = out.to(case.dtype)
                    if keep:
                        self.outputs[layer, begin] = result
            if stores is not None:
                torch.cuda.current_stream().wait_stream(stores)

    def _units(self, layer: int, num_blocks: int, written: Any) -> list[Unit]:
        step = self.case.unit_blocks
        blocks = self.table[:num_blocks]
        return [Unit(layer, blocks[at : at + step], written) for at in range(0, num_blocks, step)]

    def _stream(self, units: list[Unit], pipeline: SlotPipeline | None) -> Iterator[Any]:
        if pipeline is not None:
            yield from pipeline.load(units, copy=self._copy)
            return
        case = self.case
        buffer = torch.empty(case.unit_shape, dtype=case.dtype, device=case.device)
        for unit in units:
            self._copy(buffer, unit)
            yield SimpleNamespace(tensor=buffer, block=unit)  # the attributes of a Slot

    def _copy(self, tensor: Tensor, unit: Unit) -> None:
        if unit.written is not None:
            torch.cuda.current_stream().wait_event(unit.written)
        self.engine.load_blocks_into(tensor, unit.cpu_blocks, layer=unit.layer)

    def rms_error(self) -> float:
        """Return the relative error of the kept outputs against full attention in float32."""
        case, wrong, whole = self.case, 0.0, 0.0
        for layer in range(case.layers):
            parts = [case.inputs(layer, *chunk) for chunk in case.chunks(self.chunk)]
            k, v = (torch.cat([part[i] for part in parts]).float() for i in (1, 2))
            for (begin, end), (q, _, _) in zip(case.chunks(self.chunk), parts, strict=True):
                future = torch.ones(end - begin, end, dtype=torch.bool, device=case.device)
                future = future.triu(begin + 1)
                for head in range(case.kv_heads):
                    scores = q[head].float() @ k[:end, head].T / math.sqrt(case.head_dim)
                    expected = scores.masked_fill_(future, -math.inf).softmax(-1) @ v[:end, head]
                    actual = self.outputs[layer, begin][head].view_as(expected).float()
                    wrong += (actual - expected).square().sum().item()
                    whole += expected.square().sum().item()
        return math.sqrt(wrong / whole)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    sync(device)
    started = time.perf_counter()
    call()
    sync(device)
    return time.perf_counter() - started


def engine_of(case: Case) -> OffloadEngine:
    return OffloadEngine(
        num_layers=case.layers,
        num_cpu_blocks=case.num_blocks,
        num_slots=case.chunk_blocks,
        block_size=case.block_size,
        token_shape=(case.kv_heads, case.head_dim),
        dtype=case.dtype,
        device=case.device,
        method=case.method,  # type: ignore[arg-type]
    )


def pipeline_of(case: Case) -> SlotPipeline:
    return SlotPipeline(
        num_slots=case.depth,
        slot_shape=case.unit_shape,
        dtype=case.dtype,
        device=case.device,
    )


def best_chunk(case: Case, engine: OffloadEngine, pipeline: SlotPipeline) -> int:
    """Return the fastest of up to 12 chunk sizes for a prefill."""
    most = range(case.block_size, case.chunk_blocks * case.block_size + 1, case.block_size)
    sizes = sorted({max(end - begin for begin, end in case.chunks(chunk)) for chunk in most})
    step = -(-len(sizes) // 12)
    times: dict[int, float] = {}
    for chunk in sizes[step - 1 :: step]:
        prefill = Prefill(case, engine, chunk)
        prefill.run(pipeline)  # the first call loads kernels
        times[chunk] = seconds(case.device, lambda prefill=prefill: prefill.run(pipeline))
        print(f"chunks of {chunk} tokens: {times[chunk] * 1e3:.1f} ms")
    return min(times, key=lambda chunk: times[chunk])


def main(argv: Sequence[str] | None = None) -> int:
    """Prefill with and without overlap; return 1 if the result is wrong."""
    args, case = _arguments(argv)
    with engine_of(case) as engine:
        pipeline = pipeline_of(case)
        print(f"{engine!r}; {pipeline!r}")
        prefill = Prefill(case, engine, args.chunk or best_chunk(case, engine, pipeline))
        prefill.run(pipeline, keep=True)
        rms_error = prefill.rms_error()
        prefill.outputs.clear()
        overlapped, plain = [], []
        for _ in range(args.repeats):
            overlapped.append(seconds(case.device, lambda: prefill.run(pipeline)))
            plain.append(seconds(case.device, lambda: prefill.run(None)))
        pipeline.close()
    slots = case.chunk_blocks * case.layers + case.depth * case.unit_blocks
    result = {
        "chunk": prefill.chunk,
        "cache_bytes": case.num_blocks * case.layers * case.block_bytes,
        "gpu_bytes": slots * case.block_bytes,
        "tokens_per_s": case.tokens / statistics.median(overlapped),
        "tokens_per_s_without_overlap": case.tokens / statistics.median(plain),
        "gain": statistics.median(plain) / statistics.median(overlapped),
        "rms_error": rms_error,
        "max_rms_error": MAX_RMS_ERROR[case.dtype],
    }
    print("\n".join(f"{name}: {value:.6g}" for name, value in result.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    return 0 if rms_error < result["max_rms_error"] else 1


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Case]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    small = not torch.cuda.is_available()  # a CPU takes minutes per chunk of the large size
    add("--layers", type=int, default=2 if small else 8)
    add("--tokens", type=int, default=512 if small else 16384)
    add("--heads", type=int, default=32, help="query heads")
    add("--kv-heads", type=int, default=16)
    add("--head-dim", type=int, default=128)
    add("--block-size", type=int, default=16 if small else 256, help="tokens per block")
    add("--unit-blocks", type=int, help="blocks per slot; default by the budget")
    add("--depth", type=int, default=3, help="slots of the pipeline")
    add(
        "--budget", type=float, default=0.25, help="GPU memory for K and V, as a share of the cache"
    )
    add("--chunk", type=int, help="tokens; by default the fastest of up to 12")
    add("--method", default="engine", help='of copies; "sm" would take SMs from attention')
    add("--repeats", type=int, default=5)
    add("--device", default="cpu" if small else "cuda")
    add("--json", metavar="FILE")
    args = parser.parse_args(argv)
    device = torch.empty(0, device=args.device).device  # with its index
    sizes = (args.layers, args.tokens, args.heads, args.kv_heads, args.head_dim, args.block_size)
    # The host queues ten kernels per unit: large units keep it ahead of the GPU.
    room = args.budget * args.tokens // args.block_size * args.layers
    unit_blocks = args.unit_blocks or max(1, int(3 * room / 8) // args.depth)
    case = Case(*sizes, args.budget, args.depth, unit_blocks, args.method, device)
    if case.tokens % case.block_size or case.heads % case.kv_heads:
        parser.error("--tokens are whole blocks, --heads a multiple of --kv-heads")
    most = case.chunk_blocks * case.block_size
    if most < case.block_size:
        parser.error("--budget: no room for a block in all layers beside the pipeline's slots")
    if args.chunk and (args.chunk % case.block_size or not 0 < args.chunk <= most):
        parser.error(f"--chunk: {args.chunk}, expected whole blocks, {most} tokens at most")
    return args, case


if __name__ == "__main__":
    sys.exit(main())
