"""memcpy_2d_async: 256 MB in rows that are as far apart again, between host and GPU.

Beside the driver's own call, one contiguous copy of as many bytes, and PyTorch's copy_ of the same
strided view, which goes through a contiguous tensor. A small copy shows what a call costs the host.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import common
from bench.measure import measure

NEEDS_GPU = True

# (rows, bytes of each): 256 MB, and one whose time is that of the call
SIZES = ((65_536, 4 << 10), (4096, 64 << 10), (256, 1 << 20), (32, 4096))
# The same of the guard: in a cache, and in memory or over the link.
GUARD_SIZES = ((32, 4096), (128, 131_072))
RESULTS: dict[str, Any] = {
    "outputs": lambda b: (b.dst_rows.contiguous(),),
    "reference": lambda b: (b.src_rows.to(b.dst.device),),
}


def run(ctx: Context) -> Iterator[Row]:
    for kind in ("h2d", "d2h"):
        for rows, row_bytes in SIZES:
            shared, moved = _buffers(ctx, kind, rows, row_bytes), rows * row_bytes
            impls = [
                common.ours(_ours),
                Impl("cuMemcpy2DAsync through FFI", "floor", _bare),
                common.peer("torch copy_, pinned", _by_torch, graph=False),
                common.memcpy(lambda b: b.dst, lambda b: b.src, moved),
            ]
            case = Case(
                op="memcpy_2d",
                name=f"{kind}, {rows} rows of {row_bytes} B",
                bytes_moved=moved,
                make=lambda _, shared=shared: shared,
                prepare=lambda b: b.dst_rows.fill_(0),
                impls=impls,
                calls=3 if moved > 50_000_000 else 20,
                **RESULTS,
            )
            yield from measure(ctx, case)


def cases(ctx: Context) -> Iterator[Case]:
    kind = "h2d" if ctx.device == "cuda" else "h2h"
    for rows, row_bytes in GUARD_SIZES:
        fields = {"op": "memcpy_2d", "name": f"{rows} rows of {row_bytes} B", **RESULTS}
        make = partial(_buffers, ctx, kind, rows, row_bytes)
        yield common.host_copy_case(ctx, rows * row_bytes, _ours, make=make, **fields)
    b = _buffers(ctx, kind, 1, 4096)
    for name, height in (("call, checks only", 0), ("call, 1 row", 1)):
        call = partial(jitkern.memcpy_2d_async, b.dst, b.src, *b.shape[:3], height, kind)
        yield common.call_case("memcpy_2d", name, call, (b.dst, b.src))


def _buffers(ctx: Context, kind: str, rows: int, row_bytes: int, _: int = 0) -> SimpleNamespace:
    """Return every other row of host memory, pinned if there is a GPU, and packed ones on it."""
    host = torch.randint(0, 256, (rows, 2, row_bytes), dtype=torch.uint8)
    host = host.pin_memory() if ctx.device == "cuda" else host
    packed = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device=ctx.device)
    # The memory, its rows, and the bytes from one to the next.
    dst, src = (packed, packed, row_bytes), (host, host[:, 0], 2 * row_bytes)
    if kind == "d2h":
        dst, src = src, dst
    shape = (dst[2], src[2], row_bytes, rows)
    return SimpleNamespace(
        dst=dst[0], dst_rows=dst[1], src=src[0], src_rows=src[1], shape=shape, kind=kind
    )


def _by_torch(b: Any) -> None:
    b.dst_rows.copy_(b.src_rows, non_blocking=True)


def _ours(b: Any) -> None:
    jitkern.memcpy_2d_async(b.dst, b.src, *b.shape, b.kind)


def _bare() -> Any:
    copy_2d = peers.host().copy_2d
    return lambda b: copy_2d(b.dst, b.src, *b.shape)
