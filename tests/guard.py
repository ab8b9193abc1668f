"""What the tests of the guard share: results and baselines made by hand."""

from __future__ import annotations

from typing import Any

from jitkern.bench import baseline, report
from jitkern.bench.baseline import Baseline, Figure
from jitkern.bench.case import Row

IDENTITY = {"counted by": "callgrind", "python": "3.12.1"}
MACHINE = {"device": "cpu", "name": "Some CPU", "cpu_cores": 2, "python": "3", "versions": {}}
KIND = "some-cpu-2-cores"
HALF = {"ratio_min": (0.99, 1.0, 1.02), "ratio_median": (0.97, 1.0, 1.05)}

# A file of cases.
GOOD = """
import torch
from jitkern.bench import case

@case("copy", against="clone", bytes_moved=128)
def copy(ctx):
    x = torch.arange(64, device=ctx.device)
    y = torch.empty_like(x)
    return lambda: y.copy_(x), lambda: x.clone()
"""


def result_of(*rows: Row, identity: dict[str, str] | None = None, **more: Any) -> report.Payload:
    made = report.payload(MACHINE, rows, quick=False)
    found = IDENTITY if identity is None else identity
    return {**made, "counts": {"source": "", "identity": found, "note": ""}, "beside": 0, **more}


def row_of(
    ratio_min: float = 1.0,
    ratio_median: float = 1.0,
    instructions: float | None = None,
    **more: Any,
) -> Row:
    row = Row("store", "call", "jitkern", "ours", against="no-op", median_us=2.0, iqr_us=0.1)
    row.ratio_min, row.ratio_median, row.instructions = ratio_min, ratio_median, instructions
    for name, value in more.items():
        setattr(row, name, value)
    return row


def baseline_of(kind: str = KIND, **spans: Any) -> Baseline:
    return Baseline(kind, {"store: call": Figure("no-op", **spans)}, IDENTITY)


def outcomes(found: Baseline, result: report.Payload) -> list[tuple[str, str]]:
    return [(verdict.measure, verdict.outcome) for verdict in baseline.compare(found, result)]
