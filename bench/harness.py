"""The command: run the chosen benchmarks, print tables, write JSON and plots."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench import cases, goals, peers
from jitkern.bench import Context, Row, report
from jitkern.bench.case import error_row

ROOT = Path(__file__).resolve().parent
OPS = cases.NAMES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 if one of jitkern's own rows failed, else 0."""
    args = _parser().parse_args(argv)
    progress = Console(stderr=True, markup=False, highlight=False)
    width = None if sys.stdout.isatty() else 150  # a log file has no width of its own
    console = Console(markup=False, highlight=False, width=width)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        progress.print("bench: --device cuda: PyTorch sees no CUDA device")
        return 2
    ops = args.op or list(OPS)
    if args.replot:
        return _plot(report.read(args.json or _default_path(device)), args.replot)
    started = time.perf_counter()
    ctx = Context(device, args.quick, lambda text: progress.print(f"  {text}", style="dim"))
    machine = report.machine(device)
    console.print(report.machine_line(machine))
    torch.manual_seed(0)
    peers.prebuild(device, [peer for op in ops for peer in getattr(cases.module(op), "PEERS", ())])
    rows: list[Row] = []
    for op in ops:
        done = _run(ctx, op)
        rows += done
        if done:
            console.print(report.table(op, done))
    if found := goals.reached(rows):
        console.print(goals.goals_table(found))
    console.print(report.summary(rows))
    data = report.payload(machine, rows, quick=args.quick)
    if args.json or not args.quick:
        path = args.json or _default_path(device)
        report.write(path, data, goals=goals.recorded)
        progress.print(f"wrote {path}")
    progress.print(f"{time.perf_counter() - started:.0f} s")
    if args.plot and (status := _plot(data, args.plot)):
        return status
    return 1 if any(row.role == "ours" and row.error for row in rows) else 0


def _default_path(device: str) -> Path:
    return ROOT / "results" / f"{report.kind_of(report.machine(device))}.json"


def _run(ctx: Context, op: str) -> list[Row]:
    rows: list[Row] = []
    gc.collect()
    gc.freeze()  # every graph capture collects garbage: 0.1 s each with torch's objects in it
    try:
        for row in cases.module(op).run(ctx):
            rows.append(row)
    except Exception as error:  # keep what the other benchmarks measured
        rows.append(error_row(op, "", "the benchmark itself", "ours", error))
    if ctx.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def _plot(data: report.Payload, directory: Path) -> int:
    try:
        from bench import plots
    except ImportError as error:
        sys.stderr.write(
            f"bench: --plot: {error}; install the extra: pip install 'jitkern[bench]'\n"
        )
        return 2
    for path in plots.draw(data, directory):
        sys.stderr.write(f"wrote {path}\n")
    return 0


def _op(text: str) -> str:
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(OPS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jitkern bench",
        description="Time jitkern beside its peers and the measured ceilings; correct first.",
        epilog="example: jitkern bench store index --quick --json out.json --plot plots/",
    )
    parser.add_argument(
        "op", nargs="*", metavar="op", type=_op, help=f"of {', '.join(OPS)}; default all"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, under a minute")
    parser.add_argument(
        "--json", type=Path, metavar="F", help="write here (default bench/results/<machine>.json)"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw PNG plots into DIR")
    parser.add_argument(
        "--replot", type=Path, metavar="DIR", help="only draw, from the JSON of an earlier run"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    return parser
