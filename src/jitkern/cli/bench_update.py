"""``jitkern bench --ci --update``: a baseline of many runs, or some figures of one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jitkern
from jitkern.bench import baseline as baselines
from jitkern.bench import report
from jitkern.cli import ui
from jitkern.env import process_environment
from jitkern.errors import JitkernError

if TYPE_CHECKING:
    from jitkern.bench.baseline import Baseline
    from jitkern.bench.report import Payload


def update(args: argparse.Namespace, device: str) -> int:
    """Measure as often as the command line says, each time in a new process, and write the file."""
    loads = [0] * args.runs + ([args.beside] * args.runs if args.beside else [])
    results: list[Payload] = []
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as folder:
        for number, beside in enumerate(loads, start=1):
            what = f"beside {beside} busy processes" if beside else "quiet"
            ui.console(stderr=True).print(f"run {number} of {len(loads)}, {what}", markup=False)
            results.append(_child(args, device, Path(folder) / f"{number}.json", beside))
            try:
                # Also behind the first of many runs: what cannot be written is said then.
                made = baselines.made_of(results)
                path, whole = _renewed(args, made)
            except baselines.BaselineError as error:
                raise JitkernError(f"bench: --update: {error}") from error
    try:
        baselines.write(path, whole)
    except baselines.BaselineError as error:
        raise JitkernError(f"bench: --update: {error}") from error
    kept = len(whole.figures) - len(made.figures)
    others = f"; {kept} others stay as they were" if kept else ""
    ui.say(f"wrote {path}: {len(made.figures)} figures of {len(loads)} runs{others}")
    return 0


def _renewed(args: argparse.Namespace, made: Baseline) -> tuple[Path, Baseline]:
    """Return the file to write, and what: with --only, the others' figures as the file has them."""
    path: Path = args.baseline
    if path.is_dir() or not (path.exists() or path.suffix == ".json"):
        path /= f"{made.kind}.json"
    if args.only and path.is_file():
        return path, baselines.renewed(baselines.read(path), made, args.only)
    return path, made


def _child(args: argparse.Namespace, device: str, path: Path, beside: int) -> Payload:
    """Return the result of a run in a process of its own: memory lies elsewhere each time."""
    # Appended: this very package, also where only this process's sys.path leads to it.
    code = (
        "import sys; sys.path.append(sys.argv.pop(1)); import jitkern.cli as c; sys.exit(c.main())"
    )
    root = str(Path(jitkern.__file__).parents[1])
    command = [sys.executable, "-c", code, root, "bench", "--ci", "--device", device]
    command += [option for file in args.cases for option in ("--cases", str(file))]
    command += [option for text in args.only for option in ("--only", text)]
    environment = process_environment()
    environment.pop("GITHUB_STEP_SUMMARY", None)  # the figures are not of one run
    with _busy(beside):
        done = subprocess.run(
            [*command, "--json", str(path)], env=environment, capture_output=True, text=True
        )
    result = report.read(path) if path.is_file() else None
    if result is not None:
        for row in report.rows_of(result):
            if row.error:
                raise JitkernError(f"bench: --update: {row.key}: {row.error}")
    if result is None or done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise JitkernError(f"bench: --update: a run failed: {last}")
    counted = result["counts"]
    if counted["source"] and counted["note"]:  # a baseline without it would be an open gate
        raise JitkernError(f"bench: --update: instructions: {counted['note']}")
    return {**result, "beside": beside}


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Have so many processes compute for nothing; they end with this one, however that ends."""
    code = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n for _ in range(10**6): pass"
    command = [sys.executable, "-c", code, str(os.getpid())]
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
