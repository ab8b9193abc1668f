"""OffloadEngine beside copy_blocks alone.

A batch of blocks goes to slots by an engine, from lists of numbers and from numbers on the GPU, and
by copy_blocks on the very tensors with pairs that are ready. What differs is the checks, and the
making of the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import jitkern
from bench import peers
from bench.cases.common import memcpy, ours, peer
from jitkern.bench.case import Case, Context, Row
from jitkern.bench.measure import measure
from jitkern.offload import OffloadEngine

PEERS = (peers.host,)
BLOCKS, LAYERS = 128, 16  # of K and V: 32 pieces a block


@dataclass
class Batch:
    engine: OffloadEngine
    cpu_blocks: torch.Tensor  # on the CPU
    slots: torch.Tensor

    def __post_init__(self) -> None:
        gpu, cpu = self.engine.gpu_cache, self.engine.cpu_cache
        self.lists = self.cpu_blocks.tolist(), self.slots.tolist()
        self.numbers = self.cpu_blocks.to(gpu.device), self.slots.to(gpu.device)
        self.pairs_cpu = torch.stack((self.cpu_blocks, self.slots), 1)
        self.pairs = self.pairs_cpu.to(gpu.device)
        self.dst = gpu.flatten(0, 1)
        self.block_dim = 1 if self.engine.layout == "layer_first" else 0
        self.src = cpu.flatten(0, 1) if self.block_dim else cpu.flatten(1, 2)


def run(ctx: Context) -> Iterator[Row]:
    for layout in ("layer_first", "block_first"):
        for kib in (4, 16, 64) if ctx.device == "cuda" else (4,):
            yield from measure(ctx, _case(ctx, layout, kib))


def _case(ctx: Context, layout: str, kib: int) -> Case:
    on_gpu = ctx.device == "cuda"
    slots, blocks = (BLOCKS, 4 * BLOCKS) if on_gpu else (16, 64)
    engine = OffloadEngine(
        num_layers=LAYERS,
        num_cpu_blocks=blocks,
        num_slots=slots,
        block_size=kib,
        token_shape=[512],
        dtype=torch.bfloat16,
        device=ctx.device,
        layout=layout,  # type: ignore[arg-type]
    )
    engine.cpu_cache.view(torch.int16).random_()
    load = engine.load_cpu_blocks_to_gpu_slots_all_layers

    def loaded(b: Batch) -> torch.Tensor:
        return b.dst[:, b.numbers[1]].view(torch.int16).cpu()

    def expected(b: Batch) -> torch.Tensor:
        found = b.src.index_select(b.block_dim, b.cpu_blocks).view(torch.int16)
        return found if b.block_dim else found.transpose(0, 1).contiguous()

    def bare(b: Batch) -> None:
        jitkern.copy_blocks(b.src, b.dst, b.pairs, src_block_dim=b.block_dim)

    def bare_on_cpu(b: Batch) -> None:
        jitkern.copy_blocks(b.src, b.dst, b.pairs_cpu, src_block_dim=b.block_dim)

    moved = slots * 2 * LAYERS * kib * 1024
    impls = [
        ours(lambda b: load(*b.lists), "jitkern, lists", graph=False),
        peer("copy_blocks, pairs on the CPU", bare_on_cpu, graph=False),
    ]
    if on_gpu:
        impls += [
            ours(lambda b: load(*b.numbers), "jitkern, numbers on the GPU"),
            peer("copy_blocks, pairs on the GPU", bare),
            memcpy(lambda b: engine.gpu_cache, lambda b: engine.cpu_cache, moved),
        ]
    return Case(
        op="offload",
        name=f"{slots} blocks x {LAYERS} layers of K and V x {kib} KB, {layout}",
        bytes_moved=moved,
        make=lambda _: Batch(engine, torch.randperm(blocks)[:slots], torch.randperm(slots)),
        outputs=lambda b: (loaded(b),),
        reference=lambda b: (expected(b),),
        prepare=lambda b: engine.gpu_cache.zero_(),
        impls=impls,
        calls=3,
    )
