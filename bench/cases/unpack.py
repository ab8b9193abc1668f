"""unpack: pieces of one size from random places to random ones, as descriptors say.

Beside a copy by the driver for each descriptor, in a loop in C++, a kernel of a block a descriptor,
and one contiguous copy of as many bytes. Bytes are read and written.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Row
from bench.cases import common

# (pieces, bytes of each) of the guard: in a cache, and in memory; on a GPU small and large.
CPU_SIZES = ((64, 4096), (512, 65_536))
CUDA_SIZES = ((128, 4096), (2048, 65_536))
# (pieces, bytes of each, bytes after a line of 128 at which sources and targets begin)
SMALL = ((128, 4096), (128, 4096, 5, 3), (2048, 256), (2048, 256, 5, 3))
LARGE = ((2048, 65_536), (2048, 65_536, 5, 3), (2048, 65_536, 8, 8))
PITCH_MORE = 512  # bytes between two places


def run(ctx: Context) -> Iterator[Row]:
    others = []
    if ctx.device == "cuda":
        others += [common.peer("a block a descriptor", _block_a_descriptor)]
        others += [common.peer("loop of cuMemcpyAsync in C++", _loop, graph=False)]
    for size in (*SMALL, *LARGE) if ctx.device == "cuda" else CPU_SIZES:
        yield from common.beside(ctx, case_of(ctx, *size), others, is_small=size in SMALL)


def cases(ctx: Context) -> Iterator[Case]:
    for size in CUDA_SIZES if ctx.device == "cuda" else CPU_SIZES:
        yield case_of(ctx, *size)
    src = torch.ones(4096, dtype=torch.uint8, device=ctx.device)
    dst = torch.zeros(4096, dtype=torch.uint8, device=ctx.device)
    one = torch.tensor([[0, 0, 4096]], device=ctx.device)
    yield from common.call_cases("unpack", jitkern.unpack, (src, dst, one[:0]), (src, dst, one))


def case_of(ctx: Context, pieces: int, piece_bytes: int, src_by: int = 0, dst_by: int = 0) -> Case:
    pitch = -(-piece_bytes // 128) * 128 + PITCH_MORE
    starts = [torch.randperm(pieces) * pitch + by for by in (src_by, dst_by)]
    rows = torch.stack([*starts, torch.full_like(starts[0], piece_bytes)], dim=1)
    by = f", off by {src_by} and {dst_by}" if src_by or dst_by else ""
    total, moved = pieces * pitch + 128, pieces * piece_bytes
    descriptors = rows.to(ctx.device)

    def make(_: int) -> SimpleNamespace:
        src = torch.randint(0, 256, (total,), dtype=torch.uint8, device=ctx.device)
        return SimpleNamespace(
            src=src, dst=torch.zeros_like(src), descriptors=descriptors, on_cpu=rows
        )

    def reference(b: Any) -> tuple[torch.Tensor, ...]:
        expected = torch.zeros_like(b.dst)
        for src_off, dst_off, length in rows.tolist():
            expected[dst_off : dst_off + length] = b.src[src_off : src_off + length]
        return (expected,)

    return Case(
        op="unpack",
        name=f"{pieces} pieces of {piece_bytes} B{by}",
        bytes_moved=2 * moved,
        make=make,
        outputs=lambda b: (b.dst.clone(),),  # with what is between the pieces
        prepare=lambda b: b.dst.zero_(),
        reference=reference,
        impls=[
            common.ours(lambda b: jitkern.unpack(b.src, b.dst, b.descriptors)),
            common.copy_impl(ctx, lambda b: (b.dst[:moved], b.src[:moved])),
        ],
        calls=4 if moved > 16 << 20 else 50,
    )


def _block_a_descriptor(b: Any) -> None:
    peers.device().launch("pieces", b.dst, b.src, b.descriptors, grid=len(b.descriptors))


def _loop(b: Any) -> None:
    peers.host().copy_pieces_loop(b.dst, b.src, b.on_cpu)
