"""The guard of CI, `python -m bench --ci`: compares instructions per call with a baseline.

A count decides, where it rose by more than equal runs differ. A time, as a ratio to a reference of
the same run, is shown beside it and decides nothing: other load on the machine changes it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import counts, report
from bench.case import Case, Context, Row, error_row
from bench.cases import GUARDED, cases_of
from bench.measure import measure
from jitkern.cli import ui

BASELINES = Path(__file__).with_name("baselines")
SCHEMA = 2
COLUMNS = ("figure", ">count then", ">now", ">change", ">time then", ">now", "of", "verdict", "")

# Differences between equal runs: the interpreter's caches are found by address, and addresses
# differ. Calls of 20,680 instructions took 21,073 on another machine.
TOLERANCE, TOLERANCE_IN_INSTRUCTIONS = 0.03, 100

Baseline = dict[str, Any]  # the JSON: kind, counted_by, figures


@dataclass(frozen=True)
class Verdict:
    key: str
    outcome: str  # slower, missing, broken; faster, same, new, not compared
    then: dict[str, Any]  # a figure of the baseline: instructions, ratio, against
    now: Row | None

    @property
    def fails(self) -> bool:
        return self.outcome in ("slower", "missing", "broken")


def run(args: argparse.Namespace, device: str) -> int:
    """Measure, print the verdicts; 1 if a figure fails, 2 if nothing can be measured as asked."""
    why_not = counts.why_not(device)
    identity = {} if why_not else counts.identity()
    machine = report.machine(device)
    kind = report.kind_of(machine)
    baseline = find(args.baseline, kind, identity)
    note = why_not or _note(baseline, kind, identity, args.baseline)
    if args.require_counts and note:
        sys.stderr.write(f"bench: --require-counts: {note}\n")
        return 2
    sources = args.op or list(map(str, args.cases)) or list(GUARDED)
    rows = measure_all(sources, device, steps=not why_not and sources == list(GUARDED))
    if not why_not:
        add_counts(rows, sources)
    if args.json is not None:
        report.save(args.json, report.payload(machine, rows, quick=False))
    if args.update:
        path = args.baseline / f"{kind}.json"
        report.save(path, new_baseline(rows, kind, identity))
        print(f"wrote {path}: {len(rows)} figures")
        return 0
    verdicts = compare(baseline, rows, kind, identity, is_whole=not args.op)
    print(ui.table(COLUMNS, map(_cells, verdicts)))
    if note:
        print(f"note: instructions are not compared: {note}")
    outcomes = [verdict.outcome for verdict in verdicts]
    print(", ".join(f"{outcomes.count(text)} {text}" for text in dict.fromkeys(outcomes)))
    return 1 if any(verdict.fails for verdict in verdicts) else 0


# -- measuring -------------------------------------------------------------------------------------


def measure_all(sources: Sequence[str], device: str, *, steps: bool = False) -> list[Row]:
    """Return a row per case, and one per step before a first call if `steps` are counted."""
    ctx = Context(device, say=lambda text: print(f"  {text}", file=sys.stderr))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a team waits for its slowest thread, on a busy machine for long
    try:
        rows = [_time(ctx, case) for source in sources for case in cases_of(source, ctx)]
    finally:
        torch.set_num_threads(threads)
    for key in counts.STEPS if steps else ():
        op, _, name = key.partition(": ")
        rows.append(Row(op, name, "jitkern", "ours"))
    return rows


def _time(ctx: Context, case: Case) -> Row:
    """Return the row of ours, with its time as a multiple of the reference's."""
    pair = [case.ours(), case.reference_impl()]
    try:
        torch.manual_seed(0)
        with torch.inference_mode():  # servers call so; with gradients enabled an op checks more
            row, other = measure(ctx, replace(case, impls=pair))
    except Exception as error:  # in its buffers or its reference; the other cases still run
        return error_row(case.op, case.name, pair[0].name, "ours", error)
    row.against, row.error = other.impl, row.error or other.error
    if row.median_us and other.median_us:
        row.ratio_median = row.median_us / other.median_us
    if ctx.device == "cuda":
        torch.cuda.empty_cache()
    return row


def add_counts(rows: Sequence[Row], sources: Sequence[str]) -> None:
    """Count the rows that have no error."""
    print("  instructions", file=sys.stderr)
    by_key, errors = counts.count(sources, [row.key for row in rows if not row.error])
    for row in rows:
        row.instructions = by_key.get(row.key)
        row.error = row.error or errors.get(row.key, "")


# -- baselines -------------------------------------------------------------------------------------


def find(folder: Path, kind: str, identity: dict[str, str]) -> Baseline | None:
    """Return the baseline of this kind of machine, else one whose counts can be compared."""
    own = folder / f"{kind}.json"
    if own.exists():
        return report.read(own)
    baselines = map(report.read, sorted(folder.glob("*.json")))
    return next((b for b in baselines if identity and b["counted_by"] == identity), None)


def _note(baseline: Baseline | None, kind: str, identity: dict[str, str], folder: Path) -> str:
    """Return why counts cannot be compared with the baseline's; empty if they can."""
    if baseline is None:
        return f"no baseline of {kind} or of this software in {folder}; --update makes one"
    then = baseline["counted_by"]
    for name in [*identity, *then]:
        if then.get(name) != identity.get(name):
            return f"{name} is {identity.get(name)}, in the baseline {then.get(name)}"
    return ""


def new_baseline(rows: Sequence[Row], kind: str, identity: dict[str, str]) -> Baseline:
    """Return the baseline of these rows; ValueError if one is broken."""
    for row in rows:
        if row.error:
            raise ValueError(f"{row.key}: broken, expected a figure for the baseline: {row.error}")
    figures = {
        row.key: {
            "against": row.against,
            "ratio": report.rounded(row.ratio_median),
            "instructions": report.rounded(row.instructions),
        }
        for row in rows
    }
    return {"schema": SCHEMA, "kind": kind, "figures": figures, "counted_by": identity}


def compare(
    baseline: Baseline | None,
    rows: Sequence[Row],
    kind: str,
    identity: dict[str, str],
    *,
    is_whole: bool,
) -> list[Verdict]:
    """Return a verdict per row and, in a whole run, per figure that only the baseline has."""
    baseline = baseline or {"kind": "", "figures": {}, "counted_by": {}}
    counted = bool(identity) and baseline["counted_by"] == identity
    verdicts = []
    for row in rows:
        then = baseline["figures"].get(row.key)
        outcome = _outcome(row, then, counted)
        if then and baseline["kind"] != kind:
            then = {**then, "ratio": None}  # times of another kind of machine say nothing
        verdicts.append(Verdict(row.key, outcome, then or {}, row))
    if is_whole and counted:
        gone = baseline["figures"].keys() - {row.key for row in rows}
        for key in sorted(gone):
            verdicts.append(Verdict(key, "missing", baseline["figures"][key], None))
    return verdicts


def most_instructions(then: float) -> float:
    """Return the count above which a figure is slower."""
    return then * (1 + TOLERANCE) + TOLERANCE_IN_INSTRUCTIONS


def _outcome(row: Row, then: dict[str, Any] | None, counted: bool) -> str:
    if row.error:
        return "broken"
    if then is None:
        return "new"
    if not counted or then["instructions"] is None or row.instructions is None:
        return "not compared"
    if row.instructions > most_instructions(then["instructions"]):
        return "slower"
    if then["instructions"] > most_instructions(row.instructions):
        return "faster"
    return "same"


def _cells(verdict: Verdict) -> tuple[str, ...]:
    row = verdict.now or Row("", "", "", "")
    then_count, then_ratio = verdict.then.get("instructions"), verdict.then.get("ratio")
    change = row.instructions / then_count - 1 if row.instructions and then_count else None
    return (
        verdict.key,
        f"{then_count:,.0f}" if then_count else "",
        f"{row.instructions:,.0f}" if row.instructions else "",
        "" if change is None else f"{change:+.1%}",
        f"{then_ratio:.2f}x" if then_ratio else "",
        f"{row.ratio_median:.2f}x" if row.ratio_median else "",
        row.against or verdict.then.get("against", ""),
        verdict.outcome,
        row.error or row.note,
    )
