"""The copy of blocks made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

MUTANTS = [
    *mutants_of(
        Sweep("copy_blocks"),
        "ops/copy_blocks.cu",
        (
            "source bound off by one",
            "src_block < p.num_src_blocks;",
            "src_block <= p.num_src_blocks;",
        ),
        (
            "target bound off by one",
            "dst_block >= p.num_dst_blocks",
            "dst_block > p.num_dst_blocks",
        ),
        ("padding copied", "if (src_block < 0 || dst_block < 0) return {};", ""),
        ("neighbour in front copied", "at < 0 ? -at : 0", "0"),
        ("neighbour behind copied", "left < kSegmentBytes ? left : kSegmentBytes", "kSegmentBytes"),
        (
            "line of the other side",
            "kLinesOf == kHostTarget ? target",
            "kLinesOf != kHostTarget ? target",
        ),
        ("pair and layer mixed up", "piece - pair * static_cast<u64>(p.num_layers)", "pair"),
        ("wrong strides", "address(p.dst, p.dst_strides", "address(p.dst, p.src_strides"),
        ("count ignored", "if (p.count == nullptr) return p.num_pairs;", "return p.num_pairs;"),
        ("count below zero", "count < 0 ? 0 :", ""),
        ("count above the pairs", "count < p.num_pairs ? count : p.num_pairs", "count"),
        ("one round only", "batch + num_warps : num_batches", "num_batches : num_batches"),
        ("segment lost", "u64(batch) * kInFlight + lane", "u64(batch) * (kInFlight + 1) + lane"),
        ("pairs of the other way", "return p.inline_pairs;", "return p.inline_pairs + 1;"),
        ("fault of every layer", "if (layer == 0 && segment == 0) {", "if (layer == 1) {"),
        ("fault of the other side", "src_inside ? p.dst_site : p.src_site", "p.src_site"),
    ),
]
