"""copy_blocks between lists of buffers, as engines hold a KV cache.

Random blocks between tensors in pinned memory and tensors on the GPU. Beside one call per buffer,
the driver's batched copies, and the kernels of engines: Triton over a list of addresses (vLLM), a
warp per block (sglang).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Row
from bench.cases.common import memcpy, ours, peer
from bench.measure import measure
from bench.peers import host_pool

NEEDS_GPU = True

# (KiB of a block in a buffer, blocks, buffers, GiB of the pool)
SIZES = (
    *((8, 1024, 8, 0.5), (8, 1024, 8, 64)),
    *((16, 256, 8, 0.5), (64, 256, 8, 0.5), (256, 256, 8, 1)),
    *((16, 64, 32, 0.5), (16, 64, 80, 0.5), (2, 4096, 64, 1)),
)
QUICK = ((8, 1024, 8, 0.5), (16, 64, 32, 0.5))
MOST_COPIES = 20_000  # copies in a batch: more take 40 ms of host time


@dataclass
class Buffers:
    src: list[torch.Tensor]
    dst: list[torch.Tensor]
    pairs: torch.Tensor
    signals: jitkern.LayerSignals

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.lists = jitkern.BlockBuffers(self.src), jitkern.BlockBuffers(self.dst)
        self.on_gpu = self.pairs.int().cuda()
        self.columns = [column.contiguous() for column in self.pairs.cuda().unbind(1)]
        sides = ((self.src, 0), (self.dst, 1))
        found = [
            torch.cat([one.data_ptr() + self.pairs[:, column] * one.stride(0) for one in side])
            for side, column in sides
        ]
        found.append(torch.full_like(found[0], self.src[0].shape[1]))
        self.addresses = [one.pin_memory() for one in found]  # sources, targets, sizes: int64
        self.tables = [
            torch.tensor([one.data_ptr() for one in side], device="cuda") for side, _ in sides
        ]


def run(ctx: Context) -> Iterator[Row]:
    for kib, blocks, count, gib in QUICK if ctx.quick else SIZES:
        if why := host_pool.lacks(gib):
            ctx.say(f"lists: {gib} GiB {why}")
            continue
        memory = host_pool.allocated(gib)
        for direction in ("h2d", "d2h"):
            yield from measure(ctx, _case(memory, direction, kib << 10, blocks, count, gib))


def _host_buffers(memory: torch.Tensor, piece: int, count: int, page_first: bool) -> Any:
    used = memory[: memory.numel() // (piece * count) * piece * count]
    shape = (-1, count, piece) if page_first else (count, -1, piece)
    return used.view(shape).unbind(1 if page_first else 0)


def _case(
    memory: torch.Tensor, direction: str, piece: int, blocks: int, count: int, gib: float
) -> Case:
    host = _host_buffers(memory, piece, count, page_first=count == 32)
    cache = torch.randint(0, 256, (count, 2 * blocks, piece), dtype=torch.uint8, device="cuda")
    to_gpu = direction == "h2d"
    sides = [*host], [*cache]
    src, dst = sides if to_gpu else sides[::-1]
    moved = blocks * count * piece

    def make(_: int) -> Buffers:
        columns = [torch.randperm(len(side[0]))[:blocks] for side in (src, dst)]
        return Buffers(src, dst, torch.stack(columns, 1), jitkern.LayerSignals(count))

    def read(side: list[torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack([one[numbers.to(one.device)].cpu() for one in side])

    def clear(b: Buffers) -> None:
        for one in dst:
            one[b.pairs[:, 1].to(one.device)] = 0

    impls = [
        ours(partial(_ours, method="sm")),
        ours(_ours, 'jitkern, method="auto"'),
        ours(partial(_ours, method="sm", on_cpu=True), "jitkern, pairs on the CPU", graph=False),
        ours(partial(_ours, method="sm", signalled=True), "jitkern, with signals", graph=False),
        ours(_call_a_buffer, "jitkern, a call per buffer"),
    ]
    if blocks * count <= MOST_COPIES:
        impls.append(peer("cuMemcpyBatchAsync", _batch, graph=False))
    impls.append(peer("Triton over addresses, as vLLM", _triton, graph=False))
    if host[0].is_contiguous():
        impls.append(peer("sglang's transfer kernel", _sglang))
    to, source = (cache, memory) if to_gpu else (memory, cache)
    impls.append(memcpy(lambda _: to, lambda _: source, moved))
    return Case(
        op="lists",
        name=f"{direction}, {blocks} blocks x {count} buffers x {piece >> 10} KiB of {gib:g} GiB",
        impls=impls,
        params={"piece_bytes": piece, "buffers": count, "pool_gib": gib},
        bytes_moved=moved,
        calls=3,
        make=make,
        outputs=lambda b: (read(dst, b.pairs[:, 1]),),
        reference=lambda b: (read(src, b.pairs[:, 0]),),
        prepare=clear,
    )


def _ours(b: Buffers, on_cpu: bool = False, signalled: bool = False, **how: Any) -> None:
    signals = b.signals if signalled else None
    jitkern.copy_blocks(*b.lists, b.pairs if on_cpu else b.on_gpu, signals=signals, **how)


def _call_a_buffer(b: Buffers) -> None:
    for src, dst in zip(b.src, b.dst, strict=True):
        jitkern.copy_blocks(src[None], dst[None], b.on_gpu, method="sm")


def _batch(b: Buffers) -> None:
    # The driver takes no batch on the default stream.
    main = torch.cuda.current_stream()
    b.stream.wait_stream(main)
    with torch.cuda.stream(b.stream):
        peers.host().copy_batch(*b.addresses, b.on_gpu)
    main.wait_stream(b.stream)


def _triton(b: Buffers) -> None:
    peers.triton().swap(*b.addresses)


def _sglang(b: Buffers) -> None:
    peers.sglang_transfer()(*b.tables, *b.columns, b.src[0].shape[1])
