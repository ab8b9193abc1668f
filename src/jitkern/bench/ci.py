"""One run of the guard: every case checked and timed beside its reference, then counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from jitkern.bench import counts, report
from jitkern.bench.case import Case, CaseError, Context, Row, cases_of, error_row
from jitkern.bench.measure import measure

CPU_ARCH = "9.0"  # what kernels are compiled for: instructions are counted on the CPU


def run(
    device: str,
    files: Sequence[Path],
    wanted: Callable[[str], bool] = lambda _: True,
    advance: Callable[[str, int, int], None] = lambda _text, _done, _all: None,
    *,
    steps: bool = False,
) -> report.Payload:
    """Measure the cases of some files; one that breaks is a row with an error.

    `steps` counts the steps before a first call too. `advance` receives the next step's name, the
    steps done, and all steps.
    """
    ctx = Context(device)
    threads = torch.get_num_threads()
    # One thread: a team waits for its slowest, and on a shared machine that is the neighbour.
    torch.set_num_threads(1)
    try:
        cases, rows = _load(ctx, files, wanted)
        for position, (key, case) in enumerate(cases.items()):
            advance(key, position, len(cases) + 1)
            rows.append(_time(ctx, case))
    finally:
        torch.set_num_threads(threads)
    advance("instructions", len(cases), len(cases) + 1)
    counted = counts.Counts(note=counts.why_not(device))
    if not counted.note:
        keys = filter(wanted, counts.STEPS if steps else ())
        rows += [Row("process", key.partition(": ")[2], "jitkern", "ours") for key in keys]
        measured = [row.key for row in rows if not row.error]
        steps = any(key in counts.STEPS for key in measured)
        if measured:
            counted = counts.count(CPU_ARCH, files=files, wanted=measured, steps=steps)
    advance("done", len(cases) + 1, len(cases) + 1)
    for row in rows:
        row.instructions = counted.by_key.get(row.key)
        if row.key == counts.KERNEL and counted.by_key and row.instructions is None:
            row.note = "left out: no NVRTC"
    result = report.payload(report.machine(device), rows, quick=False)
    result["counts"] = {"identity": counted.identity, "note": counted.note}
    return result


def _load(
    ctx: Context, files: Sequence[Path], wanted: Callable[[str], bool]
) -> tuple[dict[str, Case], list[Row]]:
    """Return the cases by key, and a row for each file that cannot be read."""
    found: dict[str, Case] = {}
    broken: list[Row] = []
    for file in files:
        try:
            for case in cases_of(file, ctx):
                if case.key in found:
                    raise CaseError(f"{file}: two cases are called {case.key!r}")
                if wanted(case.key):
                    found[case.key] = case
        except CaseError as error:  # the other files still run
            broken.append(error_row(file.stem, "loading the cases", str(file), "ours", error))
    return found, broken


def _time(ctx: Context, case: Case) -> Row:
    """Return the row of ours, with its time as a multiple of the reference's."""
    impls = [case.ours(), case.reference_impl()]
    try:
        torch.manual_seed(0)
        with torch.inference_mode():  # as servers call; gradients enabled, an op asks more
            row, other = measure(ctx, replace(case, impls=impls))
    except Exception as error:  # its buffers, or its reference; the other cases still run
        return error_row(case.op, case.name, impls[0].name, "ours", error)
    row.against, row.error = other.impl, row.error or other.error
    if row.median_us and other.median_us:
        row.ratio_median = row.median_us / other.median_us
    if ctx.device == "cuda":
        torch.cuda.empty_cache()
    return row
