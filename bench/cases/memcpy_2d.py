"""memcpy_2d_async: 256 MB in rows that are as far apart again, between host and GPU.

Beside the driver's own call, one contiguous copy of as many bytes, and PyTorch's copy_ of the same
strided view, which goes through a contiguous tensor. A small copy shows what a call costs the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import call_case, host_copy_case, memcpy, ours, peer
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.host,)
NEEDS_GPU = True

TOTAL_BYTES = 256 << 20
ROW_BYTES = (4 << 10, 64 << 10, 1 << 20)
SMALL = (32, 4096)  # rows, and bytes of each
# The same of the guard: in a cache, and in memory or over the link.
GUARD_SIZES = ((32, 4096), (128, 131_072))


@dataclass
class Buffers:
    """Every other row of ``strided``, in host memory, and all of ``packed`` on the GPU."""

    strided: torch.Tensor  # [rows, 2, row_bytes], pinned if there is a GPU
    packed: torch.Tensor  # [rows, row_bytes]
    kind: str

    def __post_init__(self) -> None:
        rows, _, row_bytes = self.strided.shape
        sides = [(self.packed, self.packed, row_bytes)]
        sides += [(self.strided, self.strided[:, 0], 2 * row_bytes)]
        if self.kind == "d2h":
            sides.reverse()
        (self.dst, self.to, dst_pitch), (self.src, self.rows, src_pitch) = sides
        self.shape = (dst_pitch, src_pitch, row_bytes, rows)


def run(ctx: Context) -> Iterator[Row]:
    for kind in ("h2d", "d2h"):
        for rows, row_bytes in (*((TOTAL_BYTES // n, n) for n in ROW_BYTES), SMALL):
            yield from measure(ctx, _case(ctx, kind, rows, row_bytes))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    kind = "h2d" if ctx.device == "cuda" else "h2h"
    for rows, row_bytes in GUARD_SIZES:

        def copy(b: Buffers) -> None:
            b.packed.view(-1).copy_(b.strided.view(-1)[: b.packed.numel()], non_blocking=True)

        yield host_copy_case(
            ctx,
            rows * row_bytes,
            _ours,
            copy,
            op="memcpy_2d",
            name=f"{rows} rows of {row_bytes} B",
            make=lambda _, rows=rows, row_bytes=row_bytes: _buffers(ctx, kind, rows, row_bytes),
            outputs=lambda b: (b.packed,),
            reference=lambda b: (b.strided[:, 0].to(b.packed.device),),
        )
    b = _buffers(ctx, kind, 1, 4096)

    for name, height in (("call, checks only", 0), ("call, 1 row", 1)):
        call = partial(jitkern.memcpy_2d_async, b.dst, b.src, *b.shape[:3], height, kind)
        yield call_case("memcpy_2d", name, call, (b.dst, b.src))


def _buffers(ctx: Context, kind: str, rows: int, row_bytes: int) -> Buffers:
    strided = torch.randint(0, 256, (rows, 2, row_bytes), dtype=torch.uint8)
    packed = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device=ctx.device)
    return Buffers(strided.pin_memory() if kind != "h2h" else strided, packed, kind)


def _case(ctx: Context, kind: str, rows: int, row_bytes: int) -> Case:
    shared = _buffers(ctx, kind, rows, row_bytes)

    return Case(
        op="memcpy_2d",
        name=f"{kind}, {rows} rows of {row_bytes} B",
        bytes_moved=rows * row_bytes,
        make=lambda _: shared,
        outputs=lambda b: (b.to.contiguous(),),
        reference=lambda b: (b.rows.to(b.dst.device),),
        prepare=lambda b: b.to.fill_(0),
        impls=[
            ours(_ours),
            Impl("cuMemcpy2DAsync through FFI", "floor", _bare),
            peer(
                "torch copy_, pinned", lambda b: b.to.copy_(b.rows, non_blocking=True), graph=False
            ),
            memcpy(lambda b: b.dst, lambda b: b.src, rows * row_bytes),
        ],
        calls=3 if rows * row_bytes > 50_000_000 else 20,
    )


def _ours(b: Buffers) -> None:
    jitkern.memcpy_2d_async(b.dst, b.src, *b.shape, b.kind)  # type: ignore[arg-type]


def _bare() -> Any:
    copy_2d = peers.host().copy_2d
    return lambda b: copy_2d(b.dst, b.src, *b.shape)
