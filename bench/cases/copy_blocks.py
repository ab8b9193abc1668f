"""copy_blocks: 128 blocks of 32 layers between a pool of 4 GiB in pinned memory and a cache.

Beside a loop of the driver's strided copies in C++, one for each block, PyTorch's copy_ of each
block's strided view, and one contiguous copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import call_cases, host_copy_case, memcpy, ours, peer
from bench.peers import host_pool
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

NEEDS_GPU = True

BLOCKS, LAYERS, POOL_GIB = 128, 32, 4
CACHE_BYTES = 2 << 30
KIB = (4, 16, 64, 256)  # of a block in one layer
# (blocks, bytes of a block in one layer) of the guard: in a cache, and in memory or over the link.
GUARD_LAYERS, GUARD_SIZES = 8, ((4, 4096), (128, 16_384))


@dataclass
class Buffers:
    """One working set."""

    dst: torch.Tensor  # [layers, blocks, bytes], or blocks first
    src: torch.Tensor
    pairs: torch.Tensor  # int32 [blocks, 2] on the GPU, random and distinct on both sides
    dst_block_dim: int = 1
    src_block_dim: int = 1

    def __post_init__(self) -> None:
        self.pairs_cpu = self.pairs.long().cpu()


def run(ctx: Context) -> Iterator[Row]:
    fit = host_pool.sizes(POOL_GIB)
    if not fit or fit[-1] < 1:
        ctx.say("copy_blocks: no memory for a pool, skipped")
        return
    pool = host_pool.allocated(fit[-1])
    cache = torch.randint(0, 256, (CACHE_BYTES,), dtype=torch.uint8, device="cuda")
    for direction in ("h2d", "d2h"):
        for kib, dim in (*((kib, 1) for kib in KIB), (16, 0)):
            sides = [_shaped(memory, kib << 10, dim) for memory in (pool, cache)]
            src, dst = sides if direction == "h2d" else sides[::-1]
            name = f"{direction}, {BLOCKS} blocks x {LAYERS} layers x {kib} KB"
            case = Case(
                op="copy_blocks",
                name=name if dim == 1 else f"{name}, block-first",
                params={"piece_bytes": kib << 10, "block_dim": dim},
                bytes_moved=BLOCKS * LAYERS * kib << 10,
                impls=_impls(ctx, kib, dim),
                calls=3 if kib > 16 else 10,
                **_job(ctx, dst, src, BLOCKS, dim, dim),
            )
            yield from measure(ctx, case)


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures: a pool with blocks first, a cache with layers first."""

    def job(blocks: int, piece_bytes: int) -> dict[str, Any]:
        pool = torch.randint(0, 256, (2 * blocks, GUARD_LAYERS, piece_bytes), dtype=torch.uint8)
        pool = pool.pin_memory() if ctx.device == "cuda" else pool
        shape = (GUARD_LAYERS, 2 * blocks, piece_bytes)
        cache = torch.zeros(shape, dtype=torch.uint8, device=ctx.device)
        return _job(ctx, cache, pool, blocks, 1, 0)

    for blocks, piece_bytes in GUARD_SIZES:
        moved = blocks * GUARD_LAYERS * piece_bytes

        def copy(b: Buffers, moved: int = moved) -> None:
            b.dst.view(-1)[:moved].copy_(b.src.view(-1)[:moved], non_blocking=True)

        name = f"{blocks} blocks of {GUARD_LAYERS} x {piece_bytes} B"
        fields = {"op": "copy_blocks", "name": name, **job(blocks, piece_bytes)}
        yield host_copy_case(ctx, moved, _ours, copy, **fields)
    b = job(1, 4096)["make"](0)
    arguments = (b.src, b.dst, b.pairs[:0]), (b.src, b.dst, b.pairs)
    yield from call_cases("copy_blocks", jitkern.copy_blocks, *arguments, src_block_dim=0)


def _shaped(memory: torch.Tensor, piece: int, dim: int) -> torch.Tensor:
    count = memory.numel() // (LAYERS * piece)
    used = memory[: count * LAYERS * piece]
    return used.view(*((LAYERS, count) if dim == 1 else (count, LAYERS)), piece)


def _job(
    ctx: Context, dst: torch.Tensor, src: torch.Tensor, blocks: int, dst_dim: int, src_dim: int
) -> dict[str, Any]:
    """Return the fields of a case that say which blocks go where, and how that is checked."""

    def make(_: int) -> Buffers:
        sides = ((src, src_dim), (dst, dst_dim))
        columns = [torch.randperm(side.shape[dim])[:blocks] for side, dim in sides]
        pairs = torch.stack(columns, 1).to(torch.int32).to(ctx.device)
        return Buffers(dst, src, pairs, dst_dim, src_dim)

    def blocks_of(side: torch.Tensor, dim: int, numbers: torch.Tensor) -> torch.Tensor:
        """Return a copy of blocks, layers first: the pool is too large for another."""
        found = side.index_select(dim, numbers.to(side.device)).cpu()
        return found if dim else found.transpose(0, 1).contiguous()

    return {
        "make": make,
        "outputs": lambda b: (blocks_of(dst, dst_dim, b.pairs_cpu[:, 1]),),
        "reference": lambda b: (blocks_of(src, src_dim, b.pairs_cpu[:, 0]),),
        "prepare": lambda b: dst.index_fill_(dst_dim, b.pairs_cpu[:, 1].to(dst.device), 0),
    }


def _impls(ctx: Context, kib: int, dim: int) -> list[Impl]:
    impls = [
        ours(_ours),
        ours(partial(_ours, on_cpu=True), "jitkern, pairs on the CPU", graph=False),
        ours(partial(_ours, on_cpu=True, method="engine"), 'jitkern, method="engine"', graph=False),
    ]
    for sms in (1, 2, 3, 4, 8) if kib == 16 and dim == 1 and not ctx.quick else ():
        impls += [ours(partial(_ours, num_sms=sms), f"jitkern, num_sms={sms}")]
    if dim == 1:
        impls += [peer("loop of cuMemcpy2DAsync in C++", _loop, graph=False)]
        impls += [peer("torch copy_, block by block", _by_torch, graph=False)]
    return [*impls, memcpy(lambda b: b.dst, lambda b: b.src, BLOCKS * LAYERS * kib << 10)]


def _ours(b: Buffers, on_cpu: bool = False, **how: Any) -> None:
    dims = {"dst_block_dim": b.dst_block_dim, "src_block_dim": b.src_block_dim}
    jitkern.copy_blocks(b.src, b.dst, b.pairs_cpu if on_cpu else b.pairs, **dims, **how)


def _loop(b: Buffers) -> None:
    peers.host().copy_2d_loop(b.dst, b.src, b.pairs_cpu)


def _by_torch(b: Buffers) -> None:
    for source, target in b.pairs_cpu.tolist():
        b.dst[:, target].copy_(b.src[:, source], non_blocking=True)
