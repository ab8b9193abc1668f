"""``jitkern bench --ci``: the guard for CI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import jitkern
from jitkern.cli import ui
from jitkern.env import settings
from jitkern.errors import JitkernError
from jitkern.fs import require_writable

if TYPE_CHECKING:
    from jitkern.bench.baseline import Baseline, Verdict

SUMMARY = "catch a slowdown in CI"
DESCRIPTION = (
    "Count the instructions of calls, of your own kernels too, and compare with a baseline; times "
    "are shown beside them. Benchmarks beside other libraries: python -m bench, in a checkout."
)
EXAMPLE = """
jitkern bench --ci --cases bench_mine.py --baseline mine.json --update
jitkern bench --ci --cases bench_mine.py --baseline mine.json
"""
_COLUMNS = ("figure", ">count then", ">now", ">change", ">time then", ">now", "of", "verdict", "")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ci", action="store_true", required=True, help="measure, and compare with a baseline")
    text = "a Python file of cases; may be repeated; default jitkern's own, in a checkout"
    add("--cases", action="append", type=Path, metavar="FILE", default=[], help=text)
    text = "only figures whose name contains TEXT; may be repeated"
    add("--only", action="append", metavar="TEXT", default=[], help=text)
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    text = "a file, or a directory that holds one for each kind of machine"
    add("--baseline", type=Path, metavar="PATH", help=text)
    text = "fail where instructions cannot be counted, or not compared with the baseline's"
    add("--require-counts", action="store_true", help=text)
    add("--update", action="store_true", help="write the baseline anew")
    add("--json", type=Path, metavar="F", help="write the figures")


def run(args: argparse.Namespace) -> int:
    if (args.update or args.require_counts) and args.baseline is None:
        option = "--update" if args.update else "--require-counts"
        raise ui.UsageError(f"bench: {option}: needs --baseline PATH")
    if args.update and args.only:
        raise ui.UsageError("bench: --update: writes all figures, expected no --only")
    ui.require_torch()
    import torch

    from jitkern.bench import baseline as baselines
    from jitkern.bench import ci, report
    from jitkern.bench.timing import torch_with_cuda

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch_with_cuda("bench")
    if args.json is not None:
        if args.json.is_dir():
            raise ui.UsageError(f"bench: {args.json}: a directory, expected a file to write")
        require_writable(args.json.parent, "give a path that can be written", mode=0o755)
    files = args.cases or _own_cases()
    baseline, notes = (None, []) if args.update else _baseline(args, device)

    def wanted(key: str) -> bool:
        return not args.only or any(text in key for text in args.only)

    with ui.progress(lines=True) as advance:
        result = ci.run(device, files, wanted, advance, steps=not args.cases)
    if args.only and not result["benchmarks"]:
        raise ui.UsageError(f"bench: --only: no figure has {' or '.join(args.only)} in its name")
    if args.update:
        path: Path = args.baseline
        if path.is_dir() or not (path.exists() or path.suffix == ".json"):
            path /= f"{report.kind_of(result['machine'])}.json"
        ui.say(f"wrote {path}: {len(baselines.write(path, result).figures)} figures")
        return 0
    verdicts = baselines.compare(baseline or baselines.Baseline(), result, wanted)
    uncounted = result["counts"]["note"]
    notes += [f"instructions: {uncounted}"] if uncounted else []
    end = "\n".join([*(f"note: {note}" for note in notes), _summary(verdicts)])
    shown = f"{ui.table(_COLUMNS, map(_cells, verdicts))}\n{end}"
    ui.say(shown)
    if args.json is not None:
        report.save(args.json, result)
    if (step_summary := settings().step_summary) is not None:
        with step_summary.open("a") as file:
            file.write(f"### jitkern bench\n\n```\n{shown}\n```\n")
    if args.require_counts and uncounted:
        raise JitkernError(f"bench: --require-counts: {uncounted}")
    return 1 if any(verdict.fails for verdict in verdicts) else 0


def _baseline(args: argparse.Namespace, device: str) -> tuple[Baseline | None, list[str]]:
    """Return the baseline and notes on it, before anything is measured: mistakes cost no minute."""
    from jitkern.bench import baseline as baselines
    from jitkern.bench import counts, report

    if args.baseline is None:
        return None, []
    why_not = counts.why_not(device)
    identity = {} if why_not else counts.identity()
    try:
        kind = report.kind_of(report.machine(device))
        baseline, note = baselines.find(args.baseline, kind, identity)
    except baselines.BaselineError as error:
        raise ui.UsageError(f"bench: --baseline: {error}") from error
    if args.require_counts and (not identity or not baseline or baseline.counted_by != identity):
        reason = why_not or note or "the baseline holds none; renew it with --update"
        raise ui.UsageError(f"bench: --require-counts: {reason}")
    return baseline, [note] if note else []


def _own_cases() -> list[Path]:
    """Return the files of jitkern's own cases, which only a checkout has."""
    root = Path(jitkern.__file__).resolve().parents[2]
    if not (root / "bench" / "__main__.py").is_file():
        raise ui.UsageError("bench: --ci: expected --cases FILE: jitkern's own are in a checkout")
    sys.path.insert(0, str(root))
    files: list[Path] = import_module("bench.cases").guarded()
    return files


def _cells(verdict: Verdict) -> tuple[str, ...]:
    figures = (verdict.then, verdict.now)
    counts = [f"{f.instructions:,.0f}" if f.instructions else "" for f in figures]
    times = [f"{f.ratio:.2f}x" if f.ratio else "" for f in figures]
    then, now = (figure.instructions for figure in figures)
    change = f"{now / then - 1:+.1%}" if now and then else ""
    against = verdict.now.against or verdict.then.against
    return (verdict.key, *counts, change, *times, against, verdict.outcome, verdict.reason)


def _summary(verdicts: Sequence[Verdict]) -> str:
    outcomes = [verdict.outcome for verdict in verdicts]
    parts = [f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)]
    failed = sum(verdict.fails for verdict in verdicts)
    ending = f"{failed} of them end this run with status 1" if failed else "nothing to stop for"
    return f"{len(verdicts)} figures: {', '.join(parts)}; {ending}"
