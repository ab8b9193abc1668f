"""memcpy_2d_async: 256 MB in rows that are as far apart again, between host and GPU.

Beside the driver's own call, one contiguous copy of as many bytes, and PyTorch's copy_ of the same
strided view, which goes through a contiguous tensor. A small copy shows what a call costs the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import jitkern
from bench import peers
from bench.goals import MEMCPY, Figures, Goal, at_least, at_most
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.host,)

TOTAL_BYTES = 256 << 20
ROW_BYTES = (4 << 10, 64 << 10, 1 << 20)
BARE = "cuMemcpy2DAsync through FFI"
PINNED, PAGEABLE = "torch copy_, pinned", "torch copy_, pageable"
LAYERS, BLOCK_BYTES = 32, 4096  # of the small copy


@dataclass
class Buffers:
    """Every other row of ``strided``, in host memory, and all of ``packed`` on the GPU."""

    strided: torch.Tensor  # pinned, [rows, 2, row_bytes]
    pageable: torch.Tensor  # the same in pageable memory
    packed: torch.Tensor  # [rows, row_bytes]


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("memcpy_2d: needs a GPU, skipped")
        return
    for direction in ("h2d", "d2h"):
        for row_bytes in ROW_BYTES:
            yield from measure(ctx, _case(direction, TOTAL_BYTES // row_bytes, row_bytes))
        yield from measure(ctx, _case(direction, LAYERS, BLOCK_BYTES))


def goals(f: Figures) -> Iterator[Goal]:
    for direction in ("h2d", "d2h"):
        for row_bytes in ROW_BYTES:
            case = _name(direction, TOTAL_BYTES // row_bytes, row_bytes)
            name = f"memcpy_2d_async, {case}"
            if row_bytes >= 64 << 10:
                got = f.speed("memcpy_2d", case, "jitkern", MEMCPY)
                yield from at_least(f"{name}: of one contiguous copy", got, 0.99)
            got = f.speed("memcpy_2d", case, "jitkern", PAGEABLE)
            yield from at_least(f"{name}: of {PAGEABLE}", got, 5.0)
        case = _name(direction, LAYERS, BLOCK_BYTES)
        rows = f.all("memcpy_2d", case)
        ours, bare = (rows[name].host_us if name in rows else None for name in ("jitkern", BARE))
        if ours and bare:
            name = f"host time of memcpy_2d_async, {direction}: of a bare call"
            yield from at_most(name, ours / bare, 1.2)


def _name(direction: str, rows: int, row_bytes: int) -> str:
    return f"{direction}, {rows} rows of {row_bytes} B"


def _case(direction: str, rows: int, row_bytes: int) -> Case:
    pageable = torch.randint(0, 256, (rows, 2, row_bytes), dtype=torch.uint8)
    packed = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda")
    shared = Buffers(pageable.pin_memory(), pageable, packed)
    to_gpu = direction == "h2d"

    def outputs(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (b.packed if to_gpu else b.strided[:, 0].contiguous(),)

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (b.strided[:, 0].cuda() if to_gpu else b.packed.cpu(),)

    def refill(b: Buffers) -> None:
        (b.packed if to_gpu else b.strided[:, 0]).fill_(0)

    def ours() -> Run:
        pitches = (row_bytes, 2 * row_bytes)
        if to_gpu:
            copy = (*pitches, row_bytes, rows, "h2d")
            return lambda b: jitkern.memcpy_2d_async(b.packed, b.strided, *copy)
        copy = (*reversed(pitches), row_bytes, rows, "d2h")
        return lambda b: jitkern.memcpy_2d_async(b.strided, b.packed, *copy)

    def bare() -> Run:
        copy_2d = peers.host().copy_2d
        if to_gpu:
            return lambda b: copy_2d(b.packed, b.strided, row_bytes, 2 * row_bytes, row_bytes, rows)
        return lambda b: copy_2d(b.strided, b.packed, 2 * row_bytes, row_bytes, row_bytes, rows)

    def contiguous() -> Run:
        copy_bytes, num_bytes = peers.host().copy_bytes, rows * row_bytes
        if to_gpu:
            return lambda b: copy_bytes(b.packed, b.strided, num_bytes)
        return lambda b: copy_bytes(b.strided, b.packed, num_bytes)

    def by_torch(b: Buffers, host: torch.Tensor) -> None:
        dst, src = (b.packed, host[:, 0]) if to_gpu else (host[:, 0], b.packed)
        dst.copy_(src, non_blocking=True)

    return Case(
        op="memcpy_2d",
        name=_name(direction, rows, row_bytes),
        params={"rows": rows, "row_bytes": row_bytes, "pitch": 2 * row_bytes},
        bytes_moved=rows * row_bytes,
        bytes_note="over the link",
        make=lambda _: shared,
        outputs=outputs,
        reference=reference,
        prepare=refill,
        impls=[
            Impl("jitkern", "ours", ours),
            Impl(BARE, "floor", bare),
            Impl(PINNED, "peer", lambda: lambda b: by_torch(b, b.strided), graph=False),
            Impl(
                PAGEABLE, "peer", lambda: lambda b: by_torch(b, b.pageable), graph=False,
                check=to_gpu,  # what comes back lies in the other memory
            ),
            Impl(MEMCPY, "ceiling", contiguous, check=False),
        ],
        calls=3 if rows * row_bytes > 50_000_000 else 20,
    )  # fmt: skip
