"""copy_blocks: 128 blocks of 32 layers between a pool of 4 GiB in pinned memory and a cache.

Beside a loop of the driver's strided copies in C++, one for each block, PyTorch's copy_ of each
block's strided view, and one contiguous copy of as many bytes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases.common import call_cases, host_copy_case, memcpy, ours, peer
from bench.cases.pairs import job
from bench.measure import measure
from bench.peers import host_pool

NEEDS_GPU = True

BLOCKS, LAYERS, POOL_GIB = 128, 32, 4
CACHE_BYTES = 2 << 30
KIB = (4, 16, 64, 256)  # a block in one layer
# (blocks, bytes of a block in one layer) of the guard: in a cache, and in memory or over the link.
GUARD_LAYERS, GUARD_SIZES = 8, ((4, 4096), (128, 16_384))


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
                **job(src, dst, BLOCKS, src_dim=dim, dst_dim=dim),
            )
            yield from measure(ctx, case)


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures: a pool with blocks first, a cache with layers first."""

    def sides(blocks: int, piece_bytes: int) -> list[torch.Tensor]:
        pool = torch.randint(0, 256, (2 * blocks, GUARD_LAYERS, piece_bytes), dtype=torch.uint8)
        pool = pool.pin_memory() if ctx.device == "cuda" else pool
        shape = (GUARD_LAYERS, 2 * blocks, piece_bytes)
        return [pool, torch.zeros(shape, dtype=torch.uint8, device=ctx.device)]

    for blocks, piece_bytes in GUARD_SIZES:
        name = f"{blocks} blocks of {GUARD_LAYERS} x {piece_bytes} B"
        fields = {"op": "copy_blocks", "name": name}
        fields |= job(*sides(blocks, piece_bytes), blocks, dst_dim=1)
        moved = blocks * GUARD_LAYERS * piece_bytes
        yield host_copy_case(ctx, moved, _blocks_first, **fields)
    b = job(*sides(1, 4096), 1, dst_dim=1)["make"](0)
    arguments = (b.src, b.dst, b.pairs[:0]), (b.src, b.dst, b.pairs)
    yield from call_cases("copy_blocks", jitkern.copy_blocks, *arguments, src_block_dim=0)


def _shaped(memory: torch.Tensor, piece: int, dim: int) -> torch.Tensor:
    count = memory.numel() // (LAYERS * piece)
    used = memory[: count * LAYERS * piece]
    return used.view(*((LAYERS, count) if dim == 1 else (count, LAYERS)), piece)


def _impls(ctx: Context, kib: int, dim: int) -> list[Impl]:
    dims: Any = {"src_block_dim": dim, "dst_block_dim": dim}
    mine = partial(_ours, method="sm", **dims)  # nothing runs beside
    impls = [
        ours(mine),
        ours(partial(mine, on_cpu=True), "jitkern, pairs on the CPU", graph=False),
        ours(partial(mine, on_cpu=True, method="engine"), 'jitkern, method="engine"', graph=False),
    ]
    for sms in (1, 2, 3, 4, 8) if kib == 16 and dim == 1 and not ctx.quick else ():
        impls += [ours(partial(mine, num_sms=sms), f"jitkern, num_sms={sms}")]
    if dim == 1:
        impls += [peer("loop of cuMemcpy2DAsync in C++", _loop, graph=False)]
        impls += [peer("torch copy_, block by block", _by_torch, graph=False)]
    return [*impls, memcpy(lambda b: b.dst, lambda b: b.src, BLOCKS * LAYERS * kib << 10)]


def _blocks_first(b: Any) -> None:
    jitkern.copy_blocks(b.src, b.dst, b.pairs, src_block_dim=0)


def _ours(b: Any, on_cpu: bool = False, **how: Any) -> None:
    jitkern.copy_blocks(b.src, b.dst, b.pairs_cpu if on_cpu else b.pairs, **how)


def _loop(b: Any) -> None:
    peers.host().copy_2d_loop(b.dst, b.src, b.pairs_cpu)


def _by_torch(b: Any) -> None:
    for source, target in b.pairs_cpu.tolist():
        b.dst[:, target].copy_(b.src[:, source], non_blocking=True)
