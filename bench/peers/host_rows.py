"""What rows between host and device memory are timed beside: the rungs of ladder.cu, and ceilings.

The parameters are the usual script's: batch 128, top-k 2048, 300,000 slots on both sides, rows of
656 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench import peers
from jitkern.bench.case import Impl, Run

BATCH, TOP_K, SLOTS, ROW_BYTES = 128, 2048, 300_000, 656
ROWS = BATCH * TOP_K
TOTAL_BYTES = ROWS * ROW_BYTES
# Rungs of ladder.cu
BYTE_LOADS, VECTOR_LOADS, WARP_A_ROW, LOADS_FIRST, LINE_ALIGNED = 1, 2, 3, 4, 6


@dataclass
class Buffers:
    src: torch.Tensor  # pinned
    dst: torch.Tensor
    pairs: torch.Tensor  # int32 [rows, 2]
    pairs64: torch.Tensor
    staging: torch.Tensor  # pinned, for the peers that gather on the CPU first


def rung(number: int, num_blocks: int = 0) -> Run:
    gather = peers.ladder().gather
    return lambda b: gather(number, b.src, b.dst, b.pairs, num_blocks)


def ceilings() -> list[Impl]:
    return [
        Impl("cudaMemcpyAsync, contiguous", "ceiling", copy_engine, check=False),
        Impl("zero-copy kernel, contiguous, 132 SMs", "sm ceiling", contiguous, check=False),
        Impl(
            "zero-copy kernel, contiguous, 2 SMs", "sm ceiling", lambda: contiguous(2), check=False
        ),
    ]


def copy_engine() -> Run:
    copy = peers.ladder().copy_engine
    return lambda b: copy(b.src, b.dst, _size(b))


def contiguous(num_blocks: int = 132) -> Run:
    copy = peers.ladder().copy_contiguous
    return lambda b: copy(b.src, b.dst, _size(b), num_blocks)


def _size(b: Buffers) -> int:
    return b.pairs.shape[0] * b.src.shape[1] * b.src.element_size()
