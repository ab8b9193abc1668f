"""Causal attention over a KV cache four times as large as the GPU memory that it may use.

A prompt is prefilled chunk by chunk. The KV cache of all layers is in pinned host memory
(`OffloadEngine`). For each chunk and layer, the blocks of all tokens before it stream through a few
slots on the GPU (`SlotPipeline`), a unit of blocks at a time: the queries of the chunk attend to a
unit while the next ones are on their way, and the partial results are merged. Queries, K and V are
random numbers. `offload_tuning.py` finds the fastest chunk and measures what the overlap gains.

    python examples/offload_attention.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitkern import merge_state
from jitkern.offload import OffloadEngine, SlotPipeline

DTYPE, MAX_ERROR = torch.bfloat16, 1e-2  # results are rounded three times, by 0.1 % each


class Case(NamedTuple):
    device: torch.device
    layers: int = 8
    tokens: int = 16384
    heads: int = 32
    kv_heads: int = 16
    head_dim: int = 128
    block_size: int = 256  # tokens
    chunk: int = 2048  # tokens
    unit_blocks: int = 16

    def inputs(self, layer: int, begin: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `[kv_heads, group, tokens, dim]`, k and v `[kv_heads, 1, tokens, dim]`."""
        source = torch.Generator(self.device).manual_seed(layer * self.tokens + begin)
        group, num_tokens = self.heads // self.kv_heads, min(self.chunk, self.tokens - begin)
        shape = (self.kv_heads, group + 2, num_tokens, self.head_dim)
        qkv = torch.randn(shape, generator=source, device=self.device, dtype=DTYPE)
        return qkv.split([group, 1, 1], 1)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return attention of `[batch, heads, tokens, dim]`, and its log-sum-exp, in float32."""
    name = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
    output, lse, *_ = getattr(torch.ops.aten, name)(q, k, v, is_causal=is_causal)
    return output.float(), lse.float()


class Prefill:
    """A prompt's way through all layers; copies overlap compute."""

    def __init__(self, case: Case) -> None:
        self.case = case
        block = (case.block_size, case.kv_heads, case.head_dim)
        self.engine = OffloadEngine(
            num_layers=case.layers,
            num_cpu_blocks=case.tokens // case.block_size,
            num_slots=1,  # unused: blocks go to and from tensors of this script
            block_size=case.block_size,
            token_shape=block[1:],
            dtype=DTYPE,
            device=case.device,
            method="engine",  # "sm" would take SMs from attention
        )
        unit = (2, case.unit_blocks, *block)
        self.pipeline = SlotPipeline(num_slots=3, slot_shape=unit, dtype=DTYPE, device=case.device)
        self.table: list[int] = torch.randperm(self.engine.num_cpu_blocks).tolist()  # fragmented
        self.stored: list[Any] = [None] * case.layers  # events of the last stores

    def run(self) -> list[list[Tensor]]:
        """Queue all copies and kernels; return the output of each layer and chunk."""
        outputs: list[list[Tensor]] = [[] for _ in range(self.case.layers)]
        with self.pipeline:
            for begin in range(0, self.case.tokens, self.case.chunk):
                for layer, chunks in enumerate(outputs):
                    chunks.append(self.attention(layer, begin))
        return outputs

    def attention(self, layer: int, begin: int) -> Tensor:
        """Store a chunk's K and V, and attend to the chunk and to all tokens before it."""
        q, k, v = self.case.inputs(layer, begin)
        stored, num_before = self.stored[layer], begin // self.case.block_size
        self.store(layer, self.table[num_before:], torch.cat([k, v], 1).permute(1, 2, 0, 3))
        own = attend(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        output, lse = (x.flatten(1, 2) for x in own)
        rows = q.flatten(1, 2)[None]  # all queries of a KV head
        for unit in self.units(layer, self.table[:num_before], stored):
            k, v = unit.flatten(1, 2).transpose(1, 2)
            part, part_lse = attend(rows, k[None], v[None])
            merge_state(output, lse, part[0], part_lse[0], output=output, lse=lse)
        return output.view_as(q).to(DTYPE)

    def store(self, layer: int, cpu_blocks: list[int], kv: Tensor) -> None:
        """Copy K and V to the first of these blocks, on a stream of their own."""
        kv = kv.contiguous().unflatten(1, (-1, self.case.block_size))
        stream = self.pipeline.store_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            kv.record_stream(stream)
        with torch.cuda.stream(stream):  # None, on the CPU, has no effect
            self.engine.store_blocks_from(kv, cpu_blocks[: kv.shape[1]], layer=layer)
        self.stored[layer] = None if stream is None else stream.record_event()

    def units(self, layer: int, cpu_blocks: list[int], stored: Any) -> Iterator[Tensor]:
        """Load blocks; yield them `[2, blocks, block_size, heads, dim]`, K and V."""

        def copy(tensor: Tensor, unit: list[int]) -> None:
            if stored is not None:
                torch.cuda.current_stream().wait_event(stored)
            self.engine.load_blocks_into(tensor, unit, layer=layer)

        step = self.case.unit_blocks
        units = [cpu_blocks[at : at + step] for at in range(0, len(cpu_blocks), step)]
        for slot in self.pipeline.load(units, copy=copy):
            yield slot.tensor[:, : len(slot.block)]


def rms_error(case: Case, outputs: list[list[Tensor]]) -> float:
    """Return the largest error of a layer against attention to all tokens at once, in float32."""
    errors = []
    for layer, chunks in enumerate(outputs):
        parts = (case.inputs(layer, begin) for begin in range(0, case.tokens, case.chunk))
        q, k, v = (torch.cat(x, 2).float() for x in zip(*parts, strict=True))
        k, v = k.expand_as(q), v.expand_as(q)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        errors.append(((torch.cat(chunks, 2) - expected).norm() / expected.norm()).item())
    return max(errors)


def default_case() -> Case:
    if torch.cuda.is_available():
        return Case(torch.device("cuda", torch.cuda.current_device()))
    return Case(torch.device("cpu"), 2, 512, 8, 4, 64, block_size=16, chunk=64, unit_blocks=2)


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    case = default_case()
    print(f"{case.tokens} tokens in {case.layers} layers on {case.device}", flush=True)
    error = rms_error(case, Prefill(case).run())
    print(f"relative error: {error:.1e}")
    return 0 if error < MAX_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
