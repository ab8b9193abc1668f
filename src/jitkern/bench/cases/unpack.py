"""unpack: pieces of one size from random places to random ones, as descriptors say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context, Impl
from jitkern.bench.cases.common import call_case, copy_impl

# (pieces, bytes of each): in a cache, and in memory; on a GPU a small and a large call.
CPU_SIZES = ((64, 4096), (512, 65_536))
CUDA_SIZES = ((128, 4096), (2048, 65_536))
PITCH_MORE = 512  # bytes between two places


@dataclass
class Buffers:
    """One working set."""

    dst: torch.Tensor  # bytes
    src: torch.Tensor
    descriptors: torch.Tensor  # int64 [pieces, 3]
    expected: torch.Tensor


@dataclass(frozen=True)
class Size:
    """Pieces of one size, and how many bytes behind a line of 128 they begin."""

    pieces: int
    piece_bytes: int
    src_by: int = 0
    dst_by: int = 0

    @property
    def name(self) -> str:
        """What the case is called."""
        by = f", off by {self.src_by} and {self.dst_by}" if self.src_by or self.dst_by else ""
        return f"{self.pieces} pieces of {self.piece_bytes} B{by}"


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for pieces, piece_bytes in CUDA_SIZES if ctx.device == "cuda" else CPU_SIZES:
        yield case_of(ctx, Size(pieces, piece_bytes))
    src = torch.ones(4096, dtype=torch.uint8, device=ctx.device)
    dst = torch.zeros(4096, dtype=torch.uint8, device=ctx.device)
    one = torch.tensor([[0, 0, 4096]], device=ctx.device)
    for name, descriptors in (("call, checks only", one[:0]), ("call, 1 row", one)):
        arguments = (dst, src, descriptors)
        yield call_case("unpack", name, partial(jitkern.unpack, *arguments), arguments)


def buffers(ctx: Context, size: Size) -> Buffers:
    """Return random bytes, and a descriptor for each piece: places are taken once."""
    pitch = -(-size.piece_bytes // 128) * 128 + PITCH_MORE
    total = size.pieces * pitch + 128
    src = torch.randint(0, 256, (total,), dtype=torch.uint8, device=ctx.device)
    dst = torch.zeros(total, dtype=torch.uint8, device=ctx.device)
    starts = [
        torch.randperm(size.pieces, device=ctx.device) * pitch + by
        for by in (size.src_by, size.dst_by)
    ]
    lengths = torch.full_like(starts[0], size.piece_bytes)
    expected = dst.clone()
    from_row, to_row = (
        torch.as_strided(one, (size.pieces, size.piece_bytes), (pitch, 1), by)
        for one, by in ((src, size.src_by), (expected, size.dst_by))
    )
    to_row[starts[1] // pitch] = from_row[starts[0] // pitch]
    return Buffers(dst, src, torch.stack([*starts, lengths], dim=1), expected)


def case_of(ctx: Context, size: Size) -> Case:
    """Return the case of one size: jitkern and a copy of as many bytes."""
    moved = size.pieces * size.piece_bytes
    return Case(
        op="unpack",
        name=size.name,
        params={
            "pieces": size.pieces,
            "piece_bytes": size.piece_bytes,
            "src_by": size.src_by,
            "dst_by": size.dst_by,
        },
        bytes_moved=2 * moved,
        bytes_note="read and written",
        make=lambda _: buffers(ctx, size),
        outputs=lambda b: (b.dst.clone(),),  # with what is between the pieces
        prepare=lambda b: b.dst.zero_(),
        reference=lambda b: (b.expected,),
        impls=[
            Impl("jitkern", "ours", lambda: ours),
            copy_impl(ctx, lambda b: (b.dst[:moved], b.src[:moved])),
        ],
        calls=4 if moved > 16 << 20 else 50,
    )


def ours(b: Buffers) -> None:
    """Call the op."""
    jitkern.unpack(b.dst, b.src, b.descriptors)
