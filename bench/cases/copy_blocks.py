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
from bench.cases.common import MEMCPY, call_case, host_copy_case, lacks_gpu
from bench.peers import host_pool
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.host,)
PLOTS = ("blocks",)

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

    def taken(self) -> torch.Tensor:
        """Return a copy of the blocks that are copied, layers first."""
        return self._blocks(self.src, self.src_block_dim, 0)

    def written(self) -> torch.Tensor:
        """Return a copy of what is written, layers first."""
        return self._blocks(self.dst, self.dst_block_dim, 1)

    def erase(self) -> None:
        """Fill what is written with zeros."""
        where = self.pairs_cpu[:, 1].to(self.dst.device)
        self.dst.index_fill_(self.dst_block_dim, where, 0)

    def _blocks(self, side: torch.Tensor, dim: int, column: int) -> torch.Tensor:
        found = side.index_select(dim, self.pairs_cpu[:, column].to(side.device)).cpu()
        return found if dim else found.transpose(0, 1).contiguous()


def run(ctx: Context) -> Iterator[Row]:
    if lacks_gpu(ctx, "copy_blocks"):
        return
    fit = host_pool.sizes(POOL_GIB)
    if not fit or fit[-1] < 1:
        ctx.say("copy_blocks: no memory for a pool, skipped")
        return
    pool = host_pool.allocated(fit[-1])
    cache = torch.randint(0, 256, (CACHE_BYTES,), dtype=torch.uint8, device="cuda")
    for direction in ("h2d", "d2h"):
        for kib in KIB:
            yield from measure(ctx, _case(ctx, pool, cache, direction, kib, 1))
        yield from measure(ctx, _case(ctx, pool, cache, direction, 16, 0))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for blocks, piece_bytes in GUARD_SIZES:
        moved = blocks * GUARD_LAYERS * piece_bytes

        def copy(b: Buffers, moved: int = moved) -> None:
            b.dst.view(-1)[:moved].copy_(b.src.view(-1)[:moved], non_blocking=True)

        yield host_copy_case(
            ctx,
            moved,
            _ours,
            copy,
            op="copy_blocks",
            name=f"{blocks} blocks of {GUARD_LAYERS} x {piece_bytes} B",
            params={"blocks": blocks, "layers": GUARD_LAYERS, "piece_bytes": piece_bytes},
            make=partial(_guarded, ctx, blocks, piece_bytes),
            outputs=lambda b: (b.written(),),
            reference=lambda b: (b.taken(),),
            prepare=lambda b: b.erase(),
        )
    b = _guarded(ctx, 1, 4096)
    for name, pairs in (("call, checks only", b.pairs[:0]), ("call, 1 row", b.pairs)):
        arguments = (b.src, b.dst, pairs)
        call = partial(jitkern.copy_blocks, *arguments, src_block_dim=0)
        yield call_case("copy_blocks", name, call, arguments)


def _guarded(ctx: Context, blocks: int, piece_bytes: int, _: int = 0) -> Buffers:
    """Return a pool with blocks first, a cache with layers first, and random distinct pairs."""
    pool = torch.randint(0, 256, (2 * blocks, GUARD_LAYERS, piece_bytes), dtype=torch.uint8)
    pool = pool.pin_memory() if ctx.device == "cuda" else pool
    shape = (GUARD_LAYERS, 2 * blocks, piece_bytes)
    cache = torch.zeros(shape, dtype=torch.uint8, device=ctx.device)
    pairs = torch.stack([torch.randperm(2 * blocks)[:blocks] for _ in range(2)], 1)
    return Buffers(cache, pool, pairs.to(torch.int32).to(ctx.device), src_block_dim=0)


def _case(
    ctx: Context, pool: torch.Tensor, cache: torch.Tensor, direction: str, kib: int, dim: int
) -> Case:
    piece = kib << 10

    def shaped(memory: torch.Tensor) -> torch.Tensor:
        count = memory.numel() // (LAYERS * piece)
        used = memory[: count * LAYERS * piece]
        return used.view(*((LAYERS, count) if dim == 1 else (count, LAYERS)), piece)

    sides = (shaped(pool), shaped(cache))
    src, dst = sides if direction == "h2d" else sides[::-1]

    def make(_: int) -> Buffers:
        columns = [torch.randperm(side.shape[dim])[:BLOCKS] for side in (src, dst)]
        pairs = torch.stack(columns, 1).to(torch.int32).cuda()
        return Buffers(dst, src, pairs, dim, dim)

    layout = "" if dim == 1 else ", block-first"
    return Case(
        op="copy_blocks",
        name=f"{direction}, {BLOCKS} blocks x {LAYERS} layers x {kib} KB{layout}",
        params={"blocks": BLOCKS, "layers": LAYERS, "piece_bytes": piece, "block_dim": dim},
        bytes_moved=BLOCKS * LAYERS * piece,
        bytes_note="over the link",
        make=make,
        outputs=lambda b: (b.written(),),  # a copy: the pool is too large for another
        reference=lambda b: (b.taken(),),
        prepare=lambda b: b.erase(),
        impls=list(_impls(ctx, kib, dim)),
        calls=3 if kib > 16 else 10,
    )


def _impls(ctx: Context, kib: int, dim: int) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours)
    on_cpu = partial(_ours, on_cpu=True)
    yield Impl("jitkern, pairs on the CPU", "ours", lambda: on_cpu, graph=False)
    engine = partial(on_cpu, method="engine")
    yield Impl('jitkern, method="engine"', "ours", lambda: engine, graph=False)
    if kib == 16 and dim == 1 and not ctx.quick:
        for sms in (1, 2, 3, 4, 8):
            name = f"jitkern, num_sms={sms}"
            yield Impl(name, "ours", lambda sms=sms: partial(_ours, num_sms=sms))
    if dim == 1:
        yield Impl("loop of cuMemcpy2DAsync in C++", "peer", _loop, graph=False)
        yield Impl("torch copy_, block by block", "peer", lambda: _by_torch, graph=False)
    yield Impl(MEMCPY, "ceiling", lambda: _contiguous(kib << 10), check=False)


def _ours(b: Buffers, on_cpu: bool = False, **how: Any) -> None:
    dims = {"dst_block_dim": b.dst_block_dim, "src_block_dim": b.src_block_dim}
    jitkern.copy_blocks(b.src, b.dst, b.pairs_cpu if on_cpu else b.pairs, **dims, **how)


def _loop() -> Run:
    loop = peers.host().copy_2d_loop
    return lambda b: loop(b.dst, b.src, b.pairs_cpu)


def _by_torch(b: Buffers) -> None:
    for source, target in b.pairs_cpu.tolist():
        b.dst[:, target].copy_(b.src[:, source], non_blocking=True)


def _contiguous(piece: int) -> Run:
    copy = peers.host().copy_bytes
    return lambda b: copy(b.dst, b.src, BLOCKS * LAYERS * piece)
