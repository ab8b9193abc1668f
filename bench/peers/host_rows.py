"""What rows between host and device memory are timed beside: kernels of link.cu, and ceilings.

The parameters are the usual script's: batch 128, top-k 2048, 300,000 slots on both sides, rows of
656 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench import peers
from jitkern.bench.case import Impl

SLOTS, ROW_BYTES, ROWS = 300_000, 656, 128 * 2048


@dataclass
class Buffers:
    src: torch.Tensor  # one of both is pinned
    dst: torch.Tensor
    pairs: torch.Tensor  # int32 [rows, 2]
    pairs64: torch.Tensor


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
