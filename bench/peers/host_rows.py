"""What rows between host and device memory are timed beside: the rungs of ladder.cu, and ceilings.

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
LOADS_FIRST, LINE_ALIGNED = 4, 6


@dataclass
class Buffers:
    src: torch.Tensor  # one of both is pinned
    dst: torch.Tensor
    pairs: torch.Tensor  # int32 [rows, 2]
    pairs64: torch.Tensor


def rung(name: str, num_sms: int = 0, number: int = 0) -> Impl:
    """Return a rung of ladder.cu, by default that of the name's digit; 0 SMs: a full grid."""
    number = number or int(name[0])

    def run(b: Any) -> None:
        peers.ladder().gather(number, b.src, b.dst, b.pairs, num_sms)

    return Impl(name, "peer", lambda: run)


def copy_engine() -> Impl:
    """Return one contiguous copy of as many bytes."""

    def run(b: Any) -> None:
        peers.ladder().copy_engine(b.src, b.dst, len(b.pairs) * b.src[0].nbytes)

    return Impl("cudaMemcpyAsync, contiguous", "ceiling", lambda: run, check=False)


def contiguous(num_sms: int) -> Impl:
    """Return a kernel's contiguous copy of as many bytes."""

    def run(b: Any) -> None:
        peers.ladder().copy_contiguous(b.src, b.dst, len(b.pairs) * b.src[0].nbytes, num_sms)

    name = f"zero-copy kernel, contiguous, {num_sms} SMs"
    return Impl(name, "sm ceiling", lambda: run, check=False)
