"""copy_blocks: blocks of all layers into a cache; on a GPU, what the link carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context
from jitkern.bench.cases.common import call_case, host_copy_case

LAYERS = 8
# (blocks, bytes of a block in one layer): in a cache, and in memory or over the link.
SIZES = ((4, 4096), (128, 16_384))


@dataclass
class Buffers:
    """A pool in host memory, pinned where there is a GPU, a cache, and random distinct pairs."""

    pool: torch.Tensor  # [blocks, layers, bytes]
    cache: torch.Tensor  # [layers, blocks, bytes]
    pairs: torch.Tensor  # int32 [blocks, 2]


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for blocks, piece_bytes in SIZES:
        yield case_of(ctx, blocks, piece_bytes)
    b = _buffers(ctx, 1, 4096)
    for name, pairs in (("call, checks only", b.pairs[:0]), ("call, 1 row", b.pairs)):
        arguments = (b.cache, b.pool, pairs)
        call = partial(jitkern.copy_blocks, *arguments, src_block_dim=0)
        yield call_case("copy_blocks", name, call, arguments)


def _buffers(ctx: Context, blocks: int, piece_bytes: int) -> Buffers:
    pool = torch.randint(0, 256, (2 * blocks, LAYERS, piece_bytes), dtype=torch.uint8)
    columns = [torch.randperm(2 * blocks)[:blocks] for _ in range(2)]
    return Buffers(
        pool.pin_memory() if ctx.device == "cuda" else pool,
        torch.zeros(LAYERS, 2 * blocks, piece_bytes, dtype=torch.uint8, device=ctx.device),
        torch.stack(columns, 1).to(torch.int32).to(ctx.device),
    )


def case_of(ctx: Context, blocks: int, piece_bytes: int) -> Case:
    """Return the case of one size: the op, and a copy of as many bytes in one piece."""
    moved = blocks * LAYERS * piece_bytes

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        cache = b.cache.clone()
        sources, targets = b.pairs.long().unbind(1)
        cache[:, targets] = b.pool[sources.cpu()].transpose(0, 1).to(cache.device)
        return (cache,)

    def copy(b: Buffers) -> None:
        b.cache.view(-1)[:moved].copy_(b.pool.view(-1)[:moved], non_blocking=True)

    return host_copy_case(
        ctx,
        moved=moved,
        ours=lambda b: jitkern.copy_blocks(b.cache, b.pool, b.pairs, src_block_dim=0),
        copy=copy,
        op="copy_blocks",
        name=f"{blocks} blocks of {LAYERS} x {piece_bytes} B",
        params={"blocks": blocks, "layers": LAYERS, "piece_bytes": piece_bytes},
        make=lambda _: _buffers(ctx, blocks, piece_bytes),
        outputs=lambda b: (b.cache,),
        reference=reference,
    )
