"""Rows and blocks between host and device memory by pairs: the job, its check, and peers.

The sizes are those of a sparse attention: batch 128, top-k 2048, 300,000 slots on both sides, rows
of 656 bytes.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from bench import peers
from bench.case import Case, Context, Impl
from bench.cases import common
from bench.peers import host_pool

SLOTS, ROW_BYTES, ROWS = 300_000, 656, 128 * 2048
# (rows, bytes of a row) of the guard on a GPU: microseconds, and what the bus decides.
LINK_SIZES = ((128, 656), (262_144, 656))


def job(
    src: torch.Tensor,
    dst: torch.Tensor,
    count: int,
    repeats: bool = False,
    src_dim: int = 0,
    dst_dim: int = 0,
) -> dict[str, Any]:
    """Return the fields of a case that say which rows go where, and how that is checked.

    `src_dim` and `dst_dim` are where rows are counted. Sources are distinct, or drawn at random;
    destinations are distinct.
    """
    device = "cuda" if src.is_cuda or dst.is_cuda else "cpu"
    lengths = src.shape[src_dim], dst.shape[dst_dim]

    def make(_: int) -> SimpleNamespace:
        columns = [host_pool.distinct(length, count, device) for length in lengths]
        if repeats:
            columns[0] = torch.randint(0, lengths[0], (count,), device=device)
        pairs64 = torch.stack(columns, 1)
        return SimpleNamespace(
            src=src,
            dst=dst,
            pairs=pairs64.to(torch.int32) if max(lengths) < 1 << 31 else pairs64,
            pairs64=pairs64,
            pairs_cpu=pairs64.cpu(),
        )

    def rows_of(side: torch.Tensor, dim: int, numbers: torch.Tensor) -> torch.Tensor:
        rows = side.index_select(dim, numbers.to(side.device)).to(dst.device)
        return rows.movedim(dim, 0).contiguous()

    # Copies of the rows that are written: a pool is too large for another.
    return {
        "make": make,
        "outputs": lambda b: (rows_of(dst, dst_dim, b.pairs64[:, 1]),),
        "prepare": lambda b: dst.index_fill_(dst_dim, b.pairs64[:, 1].to(dst.device), 0),
        "reference": lambda b: (rows_of(src, src_dim, b.pairs64[:, 0]),),
    }


def case_of(
    op: str,
    name: str,
    sides: tuple[torch.Tensor, torch.Tensor],
    rows: int,
    impls: list[Impl],
    params: dict[str, Any] | None = None,
    repeats: bool = False,
) -> Case:
    moved = rows * sides[0][0].nbytes  # what arrives, each row once
    calls = 3 if moved > 50_000_000 else 20
    fields = job(*sides, rows, repeats)
    return Case(op, name, impls, params or {}, bytes_moved=moved, calls=calls, **fields)


def guard_cases(
    ctx: Context, op: str, function: Callable[..., None], dst_device: str
) -> Iterator[Case]:
    """Yield the guard's cases of an op that takes a source, a destination and pairs."""
    on_gpu = ctx.device == "cuda"
    for rows, row_bytes in LINK_SIZES if on_gpu else common.CPU_SIZES:
        sides = sides_of(ctx, dst_device, max(2 * rows, SLOTS if on_gpu else 0), row_bytes)
        yield common.host_copy_case(
            ctx,
            rows * row_bytes,
            lambda b: function(b.src, b.dst, b.pairs),
            op=op,
            name=f"{rows} rows of {row_bytes} B",
            **job(*sides, rows),
        )
    b = job(*sides_of(ctx, dst_device, 64, 656), 1)["make"](0)
    yield from common.call_cases(op, function, (b.src, b.dst, b.pairs[:0]), (b.src, b.dst, b.pairs))


@lru_cache(maxsize=2)
def sides_of(
    ctx: Context, dst_device: str, slots: int, row_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return source and destination; the one in host memory is pinned if there is a GPU."""
    src_device = "cpu" if dst_device == ctx.device else ctx.device
    src_pin, dst_pin = (ctx.device == "cuda" and side == "cpu" for side in (src_device, dst_device))
    src = common.random_rows(slots, row_bytes, src_device, src_pin)
    return src, common.empty_rows(slots, row_bytes, dst_device, dst_pin)


# -- peers and ceilings ----------------------------------------------------------------------------


def kernel(name: str, num_sms: int = 0) -> Impl:
    """Return "loads before stores" or "line-aligned", on all SMs or on a few."""

    def run(b: Any) -> None:
        peers.link().gather(name == "line-aligned", b.src, b.dst, b.pairs, num_sms)

    return common.peer(f"{name}, {num_sms or 'all'} SMs", run)


def copy_engine() -> Impl:
    def run(b: Any) -> None:
        peers.host().copy_bytes(b.dst, b.src, len(b.pairs) * b.src[0].nbytes)

    return common.ceiling(common.MEMCPY, run)


def contiguous() -> Impl:
    def run(b: Any) -> None:
        peers.link().copy_contiguous(b.src, b.dst, len(b.pairs) * b.src[0].nbytes, 132)

    name = "zero-copy kernel, contiguous, 132 SMs"
    return Impl(name, "sm ceiling", lambda: run, check=False)
