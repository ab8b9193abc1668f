"""The command: run the chosen benchmarks, print tables, write JSON."""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import cases, guard, peers, report
from bench.case import Context, Row, error_row
from jitkern.cli import ui

RESULTS = Path(__file__).with_name("results")
COLUMNS = ("", ">us", ">IQR %", ">GB/s", ">x peer", ">% ceiling", "note")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 if one of jitkern's own rows failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Time jitkern beside its peers and the measured ceilings; correct first.",
        epilog="example: python -m bench store index --quick --json out.json",
    )
    add, names = parser.add_argument, ", ".join(cases.NAMES)
    add("op", nargs="*", metavar="op", default=[], help=f"some of {names}; default: all")
    add("--quick", action="store_true", help="few sizes, under a minute")
    add("--json", type=Path, metavar="F", help="write here (default bench/results/<machine>.json)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add = parser.add_argument_group("the guard").add_argument
    text = "count instructions per call and compare with a baseline; 1 if one rose"
    add("--ci", action="store_true", help=text)
    text = "files of your own cases instead of jitkern's"
    add("--cases", type=Path, nargs="+", metavar="FILE", default=[], help=text)
    text = "a folder with a baseline per kind of machine (default bench/baselines)"
    add("--baseline", type=Path, metavar="DIR", default=guard.BASELINES, help=text)
    add("--update", action="store_true", help="write the baseline of this machine")
    text = "fail where instructions cannot be counted or compared"
    add("--require-counts", action="store_true", help=text)
    args = parser.parse_args(argv)
    known = cases.GUARDED if args.ci else cases.NAMES
    for op in args.op:
        if op not in known:
            parser.error(f"op: {op!r}, expected one of {', '.join(known)}")
    if args.update and args.op:
        parser.error("--update: writes all figures, expected no op")

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        say("bench: --device cuda: PyTorch sees no CUDA device")
        return 2
    if args.ci:
        return guard.run(args, device)
    started = time.perf_counter()
    ctx = Context(device, args.quick, lambda text: say(f"  {text}"))
    machine = report.machine(device)
    versions = {"Python": machine["python"], **machine["versions"]}
    print(f"{machine['name']}; {', '.join(f'{k} {v}' for k, v in versions.items())}")
    torch.manual_seed(0)
    if device == "cuda":
        peers.prebuild()
    rows: list[Row] = []
    for op in args.op or cases.NAMES:
        done = _run(ctx, op)
        rows += done
        if done:
            print(table(op, done), flush=True)
        else:
            ctx.say(f"{op}: skipped, without a GPU or the memory that it needs")
    failed = [row for row in rows if row.error]
    ours = [row for row in failed if row.role == "ours"]
    print(f"{len(rows)} rows, {len(failed)} without a figure, {len(ours)} of jitkern's")
    if args.json or not args.quick:
        path = args.json or RESULTS / f"{report.kind_of(machine)}.json"
        write(path, report.payload(machine, rows, quick=args.quick))
        say(f"wrote {path}")
    say(f"{time.perf_counter() - started:.0f} s")
    return 1 if ours else 0


def _run(ctx: Context, op: str) -> list[Row]:
    module = cases.module(op)
    if ctx.device != "cuda" and getattr(module, "NEEDS_GPU", False):
        return []
    rows: list[Row] = []
    gc.collect()
    gc.freeze()  # every graph capture collects garbage: 0.1 s each with torch's objects in it
    try:
        for row in module.run(ctx):
            rows.append(row)
    except Exception as error:  # keep what the other benchmarks measured
        rows.append(error_row(op, "", "the benchmark itself", "ours", error))
    if ctx.device == "cuda":
        torch.cuda.empty_cache()
    for case in dict.fromkeys(row.case for row in rows):
        compare([row for row in rows if row.case == case])
    return rows


def compare(rows: list[Row]) -> None:
    """Compare ours with the best peer, and all rows with the best ceiling, by speed."""
    peer = min((r.median_us for r in rows if r.role == "peer" and r.median_us), default=None)
    ceiling = max((r.gb_s for r in rows if r.role == "ceiling" and r.gb_s), default=None)
    for row in rows:
        if row.role == "ours" and row.median_us and peer:
            row.ratio_to_best_peer = peer / row.median_us
        if ceiling and row.gb_s:
            row.percent_of_ceiling = 100.0 * row.gb_s / ceiling


def write(path: Path, data: report.Payload) -> None:
    """Write the JSON; benchmarks of an earlier run of this machine stay."""
    if path.exists():
        before = report.read(path)
        if before["machine"] == data["machine"]:
            data = {**data, "benchmarks": {**before["benchmarks"], **data["benchmarks"]}}
    report.save(path, data)


def table(op: str, rows: Sequence[Row]) -> str:
    """Return the table of one benchmark; a cell that was not measured is blank."""
    lines: list[list[str]] = []
    for case in dict.fromkeys(row.case for row in rows):
        lines.append([case, *[""] * (len(COLUMNS) - 1)])
        for row in [row for row in rows if row.case == case]:
            spread = 100 * row.iqr_us / row.median_us if row.iqr_us and row.median_us else None
            figures = (row.median_us, spread, row.gb_s, row.ratio_to_best_peer)
            figures += (row.percent_of_ceiling,)
            cells = ["" if figure is None else f"{figure:,.2f}" for figure in figures]
            lines.append([f"  {row.impl}", *cells, row.error or row.note])
    return f"\n{op}\n{ui.table(COLUMNS, lines)}"
