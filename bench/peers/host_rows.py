"""What rows between host and device memory are timed beside: kernels of link.cu, and ceilings.

The parameters are the usual script's: batch 128, top-k 2048, 300,000 slots on both sides, rows of
656 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench import peers
from bench.peers import host_pool
from jitkern.bench.case import Impl

SLOTS, ROW_BYTES, ROWS = 300_000, 656, 128 * 2048


@dataclass
class Buffers:
    src: torch.Tensor  # one of both is pinned
    dst: torch.Tensor
    pairs: torch.Tensor  # [rows, 2]; int32 if the rows are few enough, else int64
    pairs64: torch.Tensor


def pairs_job(
    src: torch.Tensor, dst: torch.Tensor, rows: int, repeats: bool = False
) -> dict[str, Any]:
    """Return the fields of a case that say which rows go where, and how that is checked.

    Sources are distinct, or drawn at random; destinations are distinct.
    """
    device = "cuda" if src.is_cuda or dst.is_cuda else "cpu"

    def make(_: int) -> Buffers:
        columns = [host_pool.distinct(len(side), rows, device) for side in (src, dst)]
        if repeats:
            columns[0] = torch.randint(0, len(src), (rows,), device=device)
        pairs64 = torch.stack(columns, 1)
        is_small = max(len(src), len(dst)) < 1 << 31
        return Buffers(src, dst, pairs64.to(torch.int32) if is_small else pairs64, pairs64)

    def column(b: Buffers, at: int, side: torch.Tensor) -> torch.Tensor:
        return b.pairs64[:, at].to(side.device)

    # Copies of the rows that are written: a pool is too large for another.
    return {
        "make": make,
        "outputs": lambda b: (dst[column(b, 1, dst)],),
        "prepare": lambda b: dst.index_fill_(0, column(b, 1, dst), 0),
        "reference": lambda b: (src[column(b, 0, src)].to(dst.device),),
    }


def kernel(name: str, num_sms: int = 0) -> Impl:
    """Return "loads before stores" or "line-aligned", on all SMs or on a few."""

    def run(b: Any) -> None:
        peers.link().gather(name == "line-aligned", b.src, b.dst, b.pairs, num_sms)

    where = f"{num_sms} SMs" if num_sms else "all SMs"
    return Impl(f"{name}, {where}", "peer", lambda: run)


def copy_engine() -> Impl:
    """Return one contiguous copy of as many bytes."""

    def run(b: Any) -> None:
        peers.host().copy_bytes(b.dst, b.src, len(b.pairs) * b.src[0].nbytes)

    return Impl("cudaMemcpyAsync, contiguous", "ceiling", lambda: run, check=False)


def contiguous(num_sms: int) -> Impl:
    """Return a kernel's contiguous copy of as many bytes."""

    def run(b: Any) -> None:
        peers.link().copy_contiguous(b.src, b.dst, len(b.pairs) * b.src[0].nbytes, num_sms)

    name = f"zero-copy kernel, contiguous, {num_sms} SMs"
    return Impl(name, "sm ceiling", lambda: run, check=False)
