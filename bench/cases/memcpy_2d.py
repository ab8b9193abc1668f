"""memcpy_2d_async: 256 MB in rows that are as far apart again, between host and GPU.

Beside the driver's own call, one contiguous copy of as many bytes, and PyTorch's copy_ of the same
strided view, which goes through a contiguous tensor. A small copy shows what a call costs the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from bench import peers
from bench.cases.common import MEMCPY, call_case, host_copy_case, lacks_gpu
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.host,)

TOTAL_BYTES = 256 << 20
ROW_BYTES = (4 << 10, 64 << 10, 1 << 20)
SMALL = (32, 4096)  # rows, and bytes of each
# The same of the guard: in a cache, and in memory or over the link.
GUARD_SIZES = ((32, 4096), (128, 131_072))
PACKED, STRIDED = "h2d", "d2h"  # where the copy goes


@dataclass
class Buffers:
    """Every other row of ``strided``, in host memory, and all of ``packed`` on the GPU."""

    strided: torch.Tensor  # [rows, 2, row_bytes], pinned where there is a GPU
    packed: torch.Tensor  # [rows, row_bytes]
    kind: str
    pageable: torch.Tensor | None = None  # the same as strided

    def __post_init__(self) -> None:
        rows, _, row_bytes = self.strided.shape
        sides = [(self.packed, row_bytes), (self.strided, 2 * row_bytes)]
        if self.kind == STRIDED:
            sides.reverse()
        (self.dst, dst_pitch), (self.src, src_pitch) = sides
        self.shape = (dst_pitch, src_pitch, row_bytes, rows)

    def view(self, side: torch.Tensor) -> torch.Tensor:
        """Return the rows of one side that are copied."""
        return side[:, 0] if side is not self.packed else side


def run(ctx: Context) -> Iterator[Row]:
    if lacks_gpu(ctx, "memcpy_2d"):
        return
    for direction in (PACKED, STRIDED):
        for rows, row_bytes in (*((TOTAL_BYTES // n, n) for n in ROW_BYTES), SMALL):
            yield from measure(ctx, _case(direction, rows, row_bytes))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
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
            params={"rows": rows, "row_bytes": row_bytes, "pitch": 2 * row_bytes},
            make=partial(_guarded, ctx, rows, row_bytes),
            outputs=lambda b: (b.packed,),
            reference=lambda b: (b.strided[:, 0].to(b.packed.device),),
        )
    b = _guarded(ctx, 1, 4096)
    for name, height in (("call, checks only", 0), ("call, 1 row", 1)):
        shape = (*b.shape[:3], height, b.kind)
        call = partial(jitkern.memcpy_2d_async, b.dst, b.src, *shape)
        yield call_case("memcpy_2d", name, call, (b.dst, b.src))


def _guarded(ctx: Context, rows: int, row_bytes: int, _: int = 0) -> Buffers:
    strided = torch.randint(0, 256, (rows, 2, row_bytes), dtype=torch.uint8)
    packed = torch.zeros(rows, row_bytes, dtype=torch.uint8, device=ctx.device)
    if ctx.device == "cpu":
        return Buffers(strided, packed, "h2h")
    return Buffers(strided.pin_memory(), packed, PACKED)


def _case(direction: str, rows: int, row_bytes: int) -> Case:
    pageable = torch.randint(0, 256, (rows, 2, row_bytes), dtype=torch.uint8)
    packed = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda")
    shared = Buffers(pageable.pin_memory(), packed, direction, pageable)

    return Case(
        op="memcpy_2d",
        name=f"{direction}, {rows} rows of {row_bytes} B",
        params={"rows": rows, "row_bytes": row_bytes, "pitch": 2 * row_bytes},
        bytes_moved=rows * row_bytes,
        bytes_note="over the link",
        make=lambda _: shared,
        outputs=lambda b: (b.view(b.dst).contiguous(),),
        reference=lambda b: (b.view(b.src).to(b.dst.device),),
        prepare=lambda b: b.view(b.dst).fill_(0),
        impls=[
            Impl("jitkern", "ours", lambda: _ours),
            Impl("cuMemcpy2DAsync through FFI", "floor", _bare),
            Impl("torch copy_, pinned", "peer", lambda: _pinned, graph=False),
            # To the host, what comes back lies in the other memory.
            Impl("torch copy_, pageable", "peer", lambda: _pageable, False, direction == PACKED),
            Impl(MEMCPY, "ceiling", lambda: _contiguous(rows * row_bytes), check=False),
        ],
        calls=3 if rows * row_bytes > 50_000_000 else 20,
    )


def _ours(b: Buffers) -> None:
    jitkern.memcpy_2d_async(b.dst, b.src, *b.shape, b.kind)  # type: ignore[arg-type]


def _bare() -> Run:
    copy_2d = peers.host().copy_2d
    return lambda b: copy_2d(b.dst, b.src, *b.shape)


def _contiguous(num_bytes: int) -> Run:
    copy_bytes = peers.host().copy_bytes
    return lambda b: copy_bytes(b.dst, b.src, num_bytes)


def _pinned(b: Buffers) -> None:
    b.view(b.dst).copy_(b.view(b.src), non_blocking=True)


def _pageable(b: Buffers) -> None:
    host = b.pageable
    assert host is not None
    dst, src = (b.packed, host[:, 0]) if b.kind == PACKED else (host[:, 0], b.packed)
    dst.copy_(src, non_blocking=True)
