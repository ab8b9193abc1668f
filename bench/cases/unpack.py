"""unpack: pieces of one size from random places to random ones, as descriptors say.

Beside a copy by the driver for each descriptor, in a loop in C++, a kernel of a block a descriptor,
and one contiguous copy of as many bytes. Bytes are read and written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import jitkern
from bench import peers
from bench.cases.common import call_cases, copy_impl, empty_kernel, ours, peer
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.host, peers.pieces)

# (pieces, bytes of each) of the guard: in a cache, and in memory; on a GPU small and large.
CPU_SIZES = ((64, 4096), (512, 65_536))
CUDA_SIZES = ((128, 4096), (2048, 65_536))
# (pieces, bytes of each, bytes after a line of 128 at which sources and targets begin)
SMALL = ((128, 4096, 0, 0), (128, 4096, 5, 3), (2048, 256, 0, 0), (2048, 256, 5, 3))
LARGE = (2048, 65_536)
OFF_BY = ((5, 3), (8, 8))
PITCH_MORE = 512  # bytes between two places


@dataclass
class Buffers:
    """One working set."""

    dst: torch.Tensor  # bytes
    src: torch.Tensor
    descriptors: torch.Tensor  # int64 [pieces, 3 or 6]

    def __post_init__(self) -> None:
        self.on_cpu = self.descriptors.cpu()


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        for size in CPU_SIZES:
            case = case_of(ctx, *size)
            copied = replace(case.impls[1], name="copy_ of as many bytes")
            yield from measure(ctx, replace(case, impls=[case.ours(), copied]))
        return
    block = peer("a block a descriptor", _block_a_descriptor)
    loop = peer("loop of cuMemcpyAsync in C++", _loop, graph=False)
    for size in SMALL:
        yield from _with(ctx, case_of(ctx, *size), block, loop, empty_kernel())
    yield from _with(ctx, case_of(ctx, *LARGE), block, loop)
    for by in OFF_BY:
        case = case_of(ctx, *LARGE, *by)
        yield from measure(ctx, replace(case, impls=[case.ours()]))
    count, length, starts = 10_500, 32, torch.arange(128)
    row = torch.tensor([length, count, length, 128 * length]).expand(128, 4)
    rows = torch.stack([starts * count * length, starts * length], dim=1)
    name = "128 descriptors, 43 MB in pieces of 32 B"
    strided = _of(ctx, name, torch.cat([rows, row], dim=1), 128 * count * length)
    yield from _with(ctx, strided, block)


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for size in CUDA_SIZES if ctx.device == "cuda" else CPU_SIZES:
        yield case_of(ctx, *size)
    src = torch.ones(4096, dtype=torch.uint8, device=ctx.device)
    dst = torch.zeros(4096, dtype=torch.uint8, device=ctx.device)
    one = torch.tensor([[0, 0, 4096]], device=ctx.device)
    yield from call_cases("unpack", jitkern.unpack, (src, dst, one[:0]), (src, dst, one))


def case_of(ctx: Context, pieces: int, piece_bytes: int, src_by: int = 0, dst_by: int = 0) -> Case:
    """Return the case of one size: jitkern and a copy of as many bytes."""
    pitch = -(-piece_bytes // 128) * 128 + PITCH_MORE
    starts = [torch.randperm(pieces) * pitch + by for by in (src_by, dst_by)]
    rows = torch.stack([*starts, torch.full_like(starts[0], piece_bytes)], dim=1)
    by = f", off by {src_by} and {dst_by}" if src_by or dst_by else ""
    return _of(ctx, f"{pieces} pieces of {piece_bytes} B{by}", rows, pieces * pitch + 128)


def _of(ctx: Context, name: str, rows: torch.Tensor, total: int) -> Case:
    """Return the case of these descriptors, whose pieces share no byte, in `total` bytes."""
    counts = rows[:, 3] if rows.shape[1] > 3 else torch.ones(len(rows), dtype=torch.int64)
    moved = int((rows[:, 2] * counts).sum())
    copied = moved // 16 * 16
    descriptors = rows.to(ctx.device)

    def make(_: int) -> Buffers:
        src = torch.randint(0, 256, (total,), dtype=torch.uint8, device=ctx.device)
        return Buffers(torch.zeros_like(src), src, descriptors)

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        expected = torch.zeros_like(b.dst)
        for row in rows.tolist():
            src_off, dst_off, length, count, src_stride, dst_stride = (*row, 1, 0, 0)[:6]
            expected.as_strided((count, length), (dst_stride, 1), dst_off).copy_(
                b.src.as_strided((count, length), (src_stride, 1), src_off)
            )
        return (expected,)

    return Case(
        op="unpack",
        name=name,
        bytes_moved=2 * moved,
        make=make,
        outputs=lambda b: (b.dst.clone(),),  # with what is between the pieces
        prepare=lambda b: b.dst.zero_(),
        reference=reference,
        impls=[
            ours(lambda b: jitkern.unpack(b.src, b.dst, b.descriptors)),
            copy_impl(ctx, lambda b: (b.dst[:copied], b.src[:copied]), "copy kernel"),
        ],
        calls=4 if moved > 16 << 20 else 50,
    )


def _with(ctx: Context, case: Case, *others: Impl) -> list[Row]:
    return measure(ctx, replace(case, impls=[*case.impls, *others]))


def _block_a_descriptor(b: Buffers) -> None:
    rows, words = b.descriptors.shape
    peers.pieces().launch("pieces", b.dst, b.src, b.descriptors, words, grid=rows)


def _loop(b: Buffers) -> None:
    peers.host().copy_pieces_loop(b.dst, b.src, b.on_cpu)
