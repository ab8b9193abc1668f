"""``jitkern bench``: the guard for CI, a comparison of results, or the harness of a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import jitkern
from jitkern.cli import ui
from jitkern.env import settings
from jitkern.errors import JitkernError, UnsupportedError

if TYPE_CHECKING:
    from jitkern.bench.baseline import Baseline, Verdict
    from jitkern.bench.report import Payload

SUMMARY = "catch a slowdown in CI; compare two results"
DESCRIPTION = (
    "Measure jitkern, or your own kernels, as ratios and as instruction counts, and compare with a "
    "baseline."
)
_OF_A_CHECKOUT = (
    " Without --ci or --compare: the benchmarks beside every peer, whose options python -m bench "
    "--help lists."
)
EXAMPLE = """
jitkern bench --ci --baseline baselines --update --runs 20
jitkern bench --ci --baseline baselines
jitkern bench --ci --cases bench_mine.py --baseline mine.json
jitkern bench --compare before.json after.json
"""
_OWN_OF_CI = (
    *("--cases", "--only", "--baseline", "--gate", "--require-counts", "--update", "--runs"),
    *("--beside", "--markdown", "--junit"),
)
# With any of these, the command line is for the options here and not for a checkout's harness,
# which has a --device and a --json of its own.
_GUARD_OPTIONS = {"--ci", "--compare", "-h", "--help", *_OWN_OF_CI}
# What was not given is None until all has been looked at, so that what was given is known.
_DEFAULTS = {"cases": [], "only": [], "gate": "all", "runs": 1, "beside": 0}


def is_for_guard(argv: list[str]) -> bool:
    """Tell whether `argv` is for the options here, and not for a checkout's harness."""
    return any(word.partition("=")[0] in _GUARD_OPTIONS for word in argv)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the guard; the harness of a checkout has its own."""
    if _checkout() is not None:
        parser.description = f"{DESCRIPTION}{_OF_A_CHECKOUT}"
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--ci", action="store_true", help="measure, and compare with a baseline")
    mode.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="set two result files side by side",
    )
    parser.add_argument(
        "--cases",
        action="append",
        type=Path,
        metavar="FILE",
        help="a Python file of cases, instead of jitkern's own; may be repeated",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only figures whose name contains TEXT; may be repeated",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="PATH",
        help="a file, or a directory that holds one for each kind of machine",
    )
    parser.add_argument(
        "--gate",
        choices=("all", "counts", "none"),
        help="what ends the run with status 1: anything slower (default), instructions only, or "
        "nothing; a case that breaks always does",
    )
    parser.add_argument(
        "--require-counts",
        action="store_true",
        default=None,
        help="fail where instructions cannot be counted, or not compared with the baseline's: a "
        "gate that looks at nothing is open",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        default=None,
        help="write the baseline anew; with --only, these figures of it",
    )
    parser.add_argument(
        "--runs",
        type=ui.count,
        metavar="N",
        help="with --update, runs that the baseline is made of; default 1",
    )
    parser.add_argument(
        "--beside",
        type=ui.count,
        metavar="N",
        help="with --update, as many runs again beside N busy processes",
    )
    parser.add_argument(
        "--json", type=Path, metavar="F", help="write the figures, or what --compare says"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="F",
        help="write a summary; appended to $GITHUB_STEP_SUMMARY where that is set",
    )
    parser.add_argument("--junit", type=Path, metavar="F", help="write a JUnit report")


def run(args: argparse.Namespace) -> int:
    """Run the guard, or compare two results."""
    _check_options(args)
    if args.compare:
        a_path, b_path = args.compare
        return _compare(a_path, b_path, args.json)
    ui.require_torch()
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ui.UsageError("bench: --device cuda: PyTorch sees no CUDA device")
    for path in (args.json, args.markdown, args.junit):
        if path is not None:
            if path.is_dir():
                raise ui.UsageError(f"bench: {path}: a directory, expected a file to write")
            ui.require_writable(path.parent, "give a path that can be written", mode=0o755)
    if args.update:
        from jitkern.cli.bench_update import update

        return update(args, device)
    return _guard(args, device)


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what the mode has no use for; fill in what was not given."""
    if args.compare:
        _refuse(args, ("--device", *_OWN_OF_CI), "only with --ci")
    elif not args.ci:
        raise ui.UsageError("bench: expected --ci or --compare A B")
    if args.update and args.baseline is None:
        raise ui.UsageError("bench: --update: needs --baseline, the file or directory to write")
    if args.require_counts and (args.update or args.baseline is None):
        raise ui.UsageError("bench: --require-counts: needs --baseline, and not --update")
    if args.update:
        reports = ("--gate", "--json", "--markdown", "--junit")
        _refuse(args, reports, "only without --update, which compares nothing")
    else:
        _refuse(args, ("--runs", "--beside"), "only with --update")
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _refuse(args: argparse.Namespace, options: Iterable[str], why: str) -> None:
    given = [o for o in options if getattr(args, o[2:].replace("-", "_")) is not None]
    if given:
        raise ui.UsageError(f"bench: {', '.join(given)}: {why}")


def forward(argv: list[str]) -> int:
    """Run the harness with `argv` and return its exit status.

    Raises
    ------
    UnsupportedError
        jitkern runs from an installed package, which holds no benchmarks.
    """
    root = _checkout()
    if root is None:
        raise UnsupportedError(
            "bench: expected --ci or --compare A B: the benchmarks beside other libraries are not "
            "part of the installed package; clone the repository for those and run python -m bench "
            "(see: jitkern bench --help)"
        )
    sys.path.insert(0, str(root))
    status: int = import_module("bench.__main__").main(argv)
    return status or 0


def _checkout() -> Path | None:
    """Where the benchmarks are; None where jitkern is an installed package, which has none."""
    root = Path(jitkern.__file__).resolve().parents[2]
    return root if (root / "bench" / "__main__.py").is_file() else None


# -- the guard -------------------------------------------------------------------------------------


def _guard(args: argparse.Namespace, device: str) -> int:
    from jitkern.bench import baseline as baselines
    from jitkern.bench import ci, counts, output, report

    baseline: Baseline | None = None
    notes: list[str] = []
    if args.baseline is not None:
        # Before anything is measured: a mistake here shall not cost a minute.
        try:
            kind = report.kind_of(report.machine(device))
            source, why_not = counts.source_here(device)
            identity = counts.identity(source) if source else {}
            baseline, note = baselines.find(args.baseline, kind, identity)
        except baselines.BaselineError as error:
            raise ui.UsageError(f"bench: --baseline: {error}") from error
        notes += [note] if note else []
        comparable = baseline is not None and identity and baseline.counted_by == identity
        if args.require_counts and not comparable:
            reason = why_not or note or "the baseline holds none; renew it with --update"
            raise ui.UsageError(f"bench: --require-counts: {reason}")

    def wanted(key: str) -> bool:
        return not args.only or any(text in key for text in args.only)

    def verdicts_of(result: Payload) -> list[Verdict]:
        return baselines.compare(baseline or baselines.Baseline("", {}), result, wanted)

    def suspects(result: Payload) -> list[str]:
        slower = (v for v in verdicts_of(result) if v.measure == "time" and v.outcome == "slower")
        return [verdict.key for verdict in slower]

    with (
        ui.progress(lines=True) as advance,
        ci.Run(device, args.cases, wanted, advance) as measured,
    ):
        result = measured.measure()
        if args.only and not result["benchmarks"]:
            raise ui.UsageError(
                f"bench: --only: no figure has {' or '.join(args.only)} in its name"
            )
        result = ci.confirmed(measured, result, suspects)
    if note := result["counts"]["note"]:
        notes.append(f"instructions: {note}")
    verdicts = verdicts_of(result)
    if args.require_counts and (note := result["counts"]["note"]):
        raise JitkernError(f"bench: --require-counts: {note}")
    if args.require_counts and baseline is not None:
        for verdict in verdicts:
            is_known = verdict.key in baseline.figures
            if verdict.measure == "count" and verdict.outcome == "new" and is_known:
                raise JitkernError(
                    f"bench: --require-counts: {verdict.key}: the baseline holds no count of it; "
                    "renew it with --update"
                )
    if baseline is None:
        ui.console().print(ui.table(output.FIGURE_COLUMNS, output.figures(result)))
    else:
        ui.console().print(ui.table(output.TABLE_COLUMNS, output.cells(verdicts, result)))
    for note in notes:
        ui.say(f"note: {note}")
    ui.say(output.summary(verdicts, args.gate))
    if args.json is not None:
        report.save(args.json, result)
    summary = output.markdown(verdicts, result, args.gate, notes)
    if args.markdown is not None:
        args.markdown.write_text(summary)
    if (step_summary := settings().step_summary) is not None:
        with step_summary.open("a") as file:
            file.write(summary)
    if args.junit is not None:
        args.junit.write_text(output.junit(verdicts, args.gate))
    return 1 if any(verdict.fails(args.gate) for verdict in verdicts) else 0


# -- two results -----------------------------------------------------------------------------------


def _compare(a_path: Path, b_path: Path, json_path: Path | None) -> int:
    from jitkern.bench import compare, report

    a, b = report.read(a_path), report.read(b_path)
    changes, notes = list(compare.rows(a, b)), compare.notes(a, b)
    ui.console().print(ui.table(compare.COLUMNS, changes))
    for note in notes:
        ui.say(f"note: {note}")
    if json_path is not None:
        names = ("case", "implementation", "a", "b", "b_by_a", "verdict")
        rows = [dict(zip(names, change, strict=True)) for change in changes]
        report.save(json_path, {"schema": ui.JSON_SCHEMA, "rows": rows, "notes": notes})
    return 0
