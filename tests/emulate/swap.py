"""swap_rows made wrong."""

from __future__ import annotations

from emulate.mutant import ROWS, mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("swap", ROWS)
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/swap.cu",
        ("fetched from nowhere", "inside && triple.fetch >= 0", "inside"),
        ("written back to nowhere", "inside && triple.back >= 0", "inside"),
        ("old row at the lead of the new", "group, back_lead", "group, fetch_lead", 0, 2),
        ("written back at the lead of the new", "group, back_lead", "group, fetch_lead", 1, 2),
        ("fetched at the lead of the old", "group, fetch_lead", "group, back_lead", 0, 2),
        ("stored at the lead of the old", "group, fetch_lead", "group, back_lead", 1, 2),
        ("wrong stride", "triple.back * p.host_stride_bytes", "triple.back * p.gpu_stride_bytes"),
        ("lanes do not wait", "if constexpr (kOneWarp && !kStaged) __syncwarp();", ""),
        ("warps at lines of their own", "!kLineAligned && Rows::kShape.splits == 1", "true"),
        ("lead of the other row", "writes_back ? lead_of(begun)", "writes_back ? fetch_lead[r]"),
        ("one round only", "batch += num_warps", "batch = num_batches"),
    ),
    *mutants_of(
        SWEEP,
        "ops/sort.cuh",
        ("slot bound off by one", "slot < p.num_slots &&", "slot <= p.num_slots &&"),
        ("fetch bound off by one", "fetch < p.num_host_rows &&", "fetch <= p.num_host_rows &&"),
        ("write-back bound off by one", "back < p.num_host_rows;", "back <= p.num_host_rows;"),
        ("padding swapped", "return slot >= 0 && slot <", "return slot <"),
        ("columns mixed up", "triple[0], triple[1], triple[2]", "triple[2], triple[1], triple[0]"),
        ("fault of padding", "triple.is_padding() || triple.is_inside(p)", "triple.is_inside(p)"),
        ("fault of another row", "position, triple.back,", "position, triple.fetch,"),
    ),
]
