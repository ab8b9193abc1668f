"""copy_blocks: 128 blocks of 32 layers between a pool of 4 GiB in pinned memory and a cache.

Beside a loop of the driver's strided copies in C++, one for each block, PyTorch's copy_ of each
block's strided view, and one contiguous copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import jitkern
from bench import peers
from bench.goals import MEMCPY, Figures, Goal, at_least, at_most
from bench.peers import host_pool
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.host,)
PLOTS = ("blocks",)

BLOCKS, LAYERS, POOL_GIB = 128, 32, 4
CACHE_BYTES = 2 << 30
KIB = (4, 16, 64, 256)  # of a block in one layer
LOOP = "loop of cuMemcpy2DAsync in C++"
BY_TORCH = "torch copy_, block by block"
ON_CPU = "jitkern, pairs on the CPU"
ENGINE = 'jitkern, method="engine"'
# Of one contiguous copy, and of the loop.
H2D_GOALS = {4: (0.90, 2.0), 16: (0.91, 1.5), 64: (0.92, 1.0)}
D2H_GOALS = {4: (0.85, 2.0), 16: (0.85, 1.5), 64: (0.85, 1.0)}


@dataclass
class Buffers:
    pool: torch.Tensor  # pinned, [layers, blocks, bytes], or blocks first
    cache: torch.Tensor  # on the GPU, the same
    pairs: torch.Tensor  # int32 [BLOCKS, 2] on the GPU, random and distinct on both sides
    block_dim: int
    to_gpu: bool

    def __post_init__(self) -> None:
        self.pairs_cpu = self.pairs.long().cpu()
        self.dst, self.src = (self.cache, self.pool) if self.to_gpu else (self.pool, self.cache)

    def blocks_of(self, side: torch.Tensor, column: int) -> torch.Tensor:
        """Return a copy of the blocks that the pairs name."""
        return side.index_select(self.block_dim, self.pairs_cpu[:, column].to(side.device))


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("copy_blocks: needs a GPU, skipped")
        return
    fit = host_pool.sizes(POOL_GIB)
    if not fit or fit[-1] < 1:
        ctx.say("copy_blocks: no memory for a pool, skipped")
        return
    pool = host_pool.allocated(fit[-1])
    for direction in ("h2d", "d2h"):
        for kib in KIB:
            yield from measure(ctx, _case(ctx, pool, direction, kib, 1))
        yield from measure(ctx, _case(ctx, pool, direction, 16, 0))


def goals(f: Figures) -> Iterator[Goal]:
    for direction, wanted in (("h2d", H2D_GOALS), ("d2h", D2H_GOALS)):
        for kib, (of_copy, of_loop) in wanted.items():
            case = _name(direction, kib, 1)
            for other, least in ((MEMCPY, of_copy), (LOOP, of_loop)):
                got = f.speed("copy_blocks", case, "jitkern", other)
                yield from at_least(f"copy_blocks, {case}: of {other}", got, least)
            ours = f.all("copy_blocks", case).get("jitkern")
            if ours and ours.host_us:
                name = f"copy_blocks, {case}: host time"
                yield from at_most(name, ours.host_us, 6.0, "us")
        for case in (_name(direction, 256, 1), _name(direction, 16, 0)):
            got = f.speed("copy_blocks", case, ON_CPU, MEMCPY)
            yield from at_least(f"copy_blocks, {case}, pairs on the CPU: of {MEMCPY}", got, 0.97)


def _name(direction: str, kib: int, block_dim: int) -> str:
    layout = "" if block_dim == 1 else ", block-first"
    return f"{direction}, {BLOCKS} blocks x {LAYERS} layers x {kib} KB{layout}"


def _case(ctx: Context, pool: torch.Tensor, direction: str, kib: int, block_dim: int) -> Case:
    piece = kib << 10
    to_gpu = direction == "h2d"

    def shaped(memory: torch.Tensor) -> torch.Tensor:
        count = memory.numel() // (LAYERS * piece)
        used = memory[: count * LAYERS * piece]
        return used.view(*((LAYERS, count) if block_dim == 1 else (count, LAYERS)), piece)

    host = shaped(pool)
    cache = shaped(torch.randint(0, 256, (CACHE_BYTES,), dtype=torch.uint8, device="cuda"))

    def make(_: int) -> Buffers:
        sides = (host, cache) if to_gpu else (cache, host)
        columns = [torch.randperm(side.shape[block_dim])[:BLOCKS] for side in sides]
        pairs = torch.stack(columns, 1).to(torch.int32).cuda()
        return Buffers(host, cache, pairs, block_dim, to_gpu)

    def refill(b: Buffers) -> None:
        where = b.pairs_cpu[:, 1].to(b.dst.device)
        b.dst.index_fill_(block_dim, where, 0)

    return Case(
        op="copy_blocks",
        name=_name(direction, kib, block_dim),
        params={"blocks": BLOCKS, "layers": LAYERS, "piece_bytes": piece, "block_dim": block_dim},
        bytes_moved=BLOCKS * LAYERS * piece,
        bytes_note="over the link",
        make=make,
        outputs=lambda b: (b.blocks_of(b.dst, 1).cpu(),),  # a copy: the pool is too large for that
        reference=lambda b: (b.blocks_of(b.src, 0).cpu(),),
        prepare=refill,
        impls=list(_impls(ctx, kib, block_dim)),
        calls=3 if kib > 16 else 10,
    )


def _impls(ctx: Context, kib: int, block_dim: int) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours(block_dim))
    yield Impl(ON_CPU, "ours", lambda: _ours(block_dim, on_cpu=True), graph=False)
    yield Impl(ENGINE, "ours", lambda: _ours(block_dim, on_cpu=True, method="engine"), graph=False)
    if kib == 16 and block_dim == 1 and not ctx.quick:
        for sms in (1, 2, 3, 4, 8):
            name = f"jitkern, num_sms={sms}"
            yield Impl(name, "ours", lambda sms=sms: _ours(block_dim, num_sms=sms))
    if block_dim == 1:
        yield Impl(LOOP, "peer", _loop, graph=False)
        yield Impl(BY_TORCH, "peer", lambda: _by_torch, graph=False)
    yield Impl(MEMCPY, "ceiling", lambda: _contiguous(kib << 10), check=False)


def _ours(block_dim: int, on_cpu: bool = False, **how: Any) -> Run:
    dims = {"dst_block_dim": block_dim, "src_block_dim": block_dim}

    def run(b: Buffers) -> None:
        jitkern.copy_blocks(b.dst, b.src, b.pairs_cpu if on_cpu else b.pairs, **dims, **how)

    return run


def _loop() -> Run:
    loop = peers.host().copy_2d_loop
    return lambda b: loop(b.dst, b.src, b.pairs_cpu)


def _by_torch(b: Buffers) -> None:
    for source, target in b.pairs_cpu.tolist():
        b.dst[:, target].copy_(b.src[:, source], non_blocking=True)


def _contiguous(piece: int) -> Run:
    copy = peers.host().copy_bytes
    return lambda b: copy(b.dst, b.src, BLOCKS * LAYERS * piece)
