"""Calls of swap_rows in the order of the host's memory made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("swap_lists", ("FEW_ROWS=1",))  # rows of a part of a warp and of one
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/sort.cuh",
        ("exchange taken apart", "triple.fetch == triple.back;", "false;"),
        ("fault of nobody", "report_triple(p, triple, number);", ""),
        ("exchange written back twice", "triple.back >= 0 && !exchanges", "triple.back >= 0"),
        (
            "backs among the fetches",
            "rank_of(p, kBacks, triple.back)",
            "rank_of(p, kFetches, triple.back)",
        ),
        ("triple not compared again", "if (!triple.is_inside(p)) return;", ""),
        ("regions of another pitch", "row * p.host_stride_bytes", "row * 8", 0, 2),
        (
            "exchange without its way back",
            "moves[3 * move + 2] = static_cast<Int>(triple.fetch);",
            "",
        ),
        (
            "staged to the next",
            "places[2 * move] = static_cast<Int>(move);",
            "places[2 * move] = static_cast<Int>(move + 1);",
        ),
        ("backs begin behind the fetches", "if (kind == kBacks) {", "if (false) {"),
        ("kinds on top of each other", "start = kind_start;\n      for", "start = 0;\n      for"),
        ("place not compared", "return place < num ? place : -1;", "return place;"),
    ),
    *mutants_of(
        SWEEP,
        "ops/swap.cu",
        (
            "staged at another row",
            "p.staging + (group.first_row + r)",
            "p.staging + group.first_row",
        ),
        ("move checked as a triple", "kStaged || triple.is_inside(p)", "triple.is_inside(p)"),
    ),
]
