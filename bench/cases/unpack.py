"""unpack: scattered pieces of several sizes, alignments and strides, on a GPU.

Beside a copy by the driver for each descriptor, in a loop in C++, a kernel of a block a descriptor,
and one contiguous copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bench import peers
from bench.goals import Figures, Goal, at_least, at_most, cpu_goals
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.cases.common import copy_kernel
from jitkern.bench.cases.unpack import CPU_SIZES, Buffers, Size, ours
from jitkern.bench.cases.unpack import case_of as guarded
from jitkern.bench.measure import measure

PEERS = (peers.host, peers.pieces)
PLOTS = ()

LOOP = "loop of cuMemcpyAsync in C++"
NAIVE = "a block a descriptor"
COPY, EMPTY = "copy kernel", "empty kernel"
SMALL = [Size(128, 4096), Size(128, 4096, 5, 3), Size(2048, 256), Size(2048, 256, 5, 3)]
LARGE = Size(2048, 65_536)
# Of the 256 pairs of places in a line of 16 bytes, in a short run some.
OFF_BY = [(src, dst) for src in range(16) for dst in range(16) if src or dst]
QUICK_OFF_BY = [(0, 1), (1, 0), (5, 3), (8, 8), (15, 4)]
MIXED = "1 piece of 64 MiB among 2000 of 256 B"
STRIDED = "128 descriptors, 43 MB in pieces of 32 B"
ABOVE_EMPTY_US = {128: 1.3, 2048: 1.5}


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        for pieces, piece_bytes in CPU_SIZES:
            case = guarded(ctx, Size(pieces, piece_bytes))
            copied = Impl("copy_ of as many bytes", "ceiling", lambda: _copy_, check=False)
            yield from measure(ctx, replace(case, impls=[case.ours(), copied]))
        return
    off_by = QUICK_OFF_BY if ctx.quick else OFF_BY
    for size in (*SMALL, LARGE):
        yield from measure(ctx, _with_peers(guarded(ctx, size), is_small=size in SMALL))
    for by in off_by:
        case = guarded(ctx, Size(LARGE.pieces, LARGE.piece_bytes, *by))
        yield from measure(ctx, replace(case, impls=[case.ours()]))
    yield from measure(ctx, _with_peers(_mixed()))
    yield from measure(ctx, _with_peers(_strided()))


def goals(f: Figures) -> Iterator[Goal]:
    for size in SMALL:
        us, floor = f.us("unpack", size.name, "jitkern"), f.us("unpack", size.name, EMPTY)
        if us is not None and floor is not None:
            name = f"unpack, {size.name}: above the empty kernel"
            yield from at_most(name, us - floor, ABOVE_EMPTY_US[size.pieces], "us")
    for name, least in ((LARGE.name, 0.95), (STRIDED, 0.6)):
        got = f.speed("unpack", name, "jitkern", COPY)
        yield from at_least(f"unpack, {name}: of {COPY}", got, least)
    aligned = f.us("unpack", LARGE.name, "jitkern")
    others = [
        f.us("unpack", Size(LARGE.pieces, LARGE.piece_bytes, *by).name, "jitkern") for by in OFF_BY
    ]
    slowest = max((us for us in others if us is not None), default=None)
    if aligned is not None and slowest is not None:
        name = f"unpack, {LARGE.name}: the slowest alignment, of none"
        yield from at_least(name, aligned / slowest, 0.96)
    yield from cpu_goals(f, "unpack")


def _copy_(b: Buffers) -> None:
    moved = int(b.descriptors[:, 2].sum())
    b.dst[:moved].copy_(b.src[:moved])


def _of(name: str, rows: torch.Tensor, total: int, moved: int) -> Case:
    """Return the case of these descriptors, whose pieces share no byte."""
    descriptors = rows.cuda()

    def make(_: int) -> Buffers:
        src = torch.randint(0, 256, (total,), dtype=torch.uint8, device="cuda")
        dst = torch.zeros(total, dtype=torch.uint8, device="cuda")
        expected = dst.clone()
        for row in rows.tolist():
            src_off, dst_off, length, count, src_stride, dst_stride = (*row, 1, 0, 0)[:6]
            expected.as_strided((count, length), (dst_stride, 1), dst_off).copy_(
                src.as_strided((count, length), (src_stride, 1), src_off)
            )
        return Buffers(dst, src, descriptors, expected)

    return Case(
        op="unpack",
        name=name,
        bytes_moved=2 * moved,
        bytes_note="read and written",
        make=make,
        outputs=lambda b: (b.dst.clone(),),  # with what is between the pieces
        prepare=lambda b: b.dst.zero_(),
        reference=lambda b: (b.expected,),
        impls=[Impl("jitkern", "ours", lambda: ours)],
        calls=4,
    )


def _mixed() -> Case:
    small, large = 256, 64 << 20
    starts = torch.randperm(2000) * 1024
    rows = torch.stack([starts, starts.flip(0), torch.full_like(starts, small)], dim=1)
    one = torch.tensor([[2000 * 1024, 2000 * 1024, large]])
    rows = torch.cat([rows[:1000], one, rows[1000:]])
    return _of(MIXED, rows, 2000 * 1024 + large, 2000 * small + large)


def _strided() -> Case:
    count, length = 10_500, 32
    starts = torch.arange(128)
    row = torch.tensor([length, count, length, 128 * length])
    rows = torch.cat(
        [torch.stack([starts * count * length, starts * length], dim=1), row.expand(128, 4)], dim=1
    )
    return _of(STRIDED, rows, 128 * count * length, 128 * count * length)


def _with_peers(case: Case, is_small: bool = False) -> Case:
    impls = [case.ours(), Impl(NAIVE, "peer", _naive)]
    if case.name != STRIDED:
        impls.append(Impl(LOOP, "peer", _loop, graph=False))
    moved = case.bytes_moved // 2
    impls.append(Impl(COPY, "ceiling", lambda: _copy_kernel(moved), check=False))
    if is_small:
        impls.append(Impl(EMPTY, "floor", peers.empty_launch, check=False, bytes_moved=0))
    return replace(case, impls=impls)


def _naive() -> Run:
    module = peers.pieces()

    def run_naive(b: Buffers) -> None:
        rows, words = b.descriptors.shape
        arguments: tuple[Any, ...] = (b.dst, b.src, b.descriptors, words)
        module.launch("pieces", *arguments, grid=rows)

    return run_naive


def _loop() -> Run:
    loop = peers.host().copy_pieces_loop
    kept: dict[int, torch.Tensor] = {}

    def run_loop(b: Buffers) -> None:
        if id(b) not in kept:
            kept[id(b)] = b.descriptors.cpu()
        loop(b.dst, b.src, kept[id(b)])

    return run_loop


def _copy_kernel(moved: int) -> Run:
    copy = copy_kernel()
    return lambda b: copy(b.dst[: moved // 16 * 16], b.src[: moved // 16 * 16])
