"""Does the guard keep silent, and does it speak? The figures of docs/bench-ci.md come from here.

    python -m bench.guard_study runs DIR --runs 20 --beside 2    # of this tree, about an hour
    python -m bench.guard_study judge DIR                        # false alarms, out of sample
    python -m bench.guard_study baseline DIR FILE
    python -m bench.guard_study seeds DIR                        # planted slowdowns, each alone

`judge` makes a baseline of half of the runs and judges the other half by it, then the other way
round: no run is judged by a baseline that it is in. `seeds` copies the package, plants one slowdown
in the copy, runs the guard there with the baseline of all runs, and says what it caught.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.bench import baseline, report

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "ci-guard.json"


@dataclass(frozen=True)
class Seed:
    """A slowdown: `text`, which stands once in a file of the package, becomes `planted`.

    Without `text`, `planted` goes to the end of the file.
    """

    name: str
    file: str
    text: str
    planted: str
    caught_by: str  # part of the key of each figure that should speak


# A loop of the clock's own time: exactly so much longer, whatever is in the caches.
_SPIN_CC = """
  const auto spun_from = std::chrono::steady_clock::now();
  const auto spin_until = spun_from + 3 * (spun_from - began) / 10;
  while (std::chrono::steady_clock::now() < spin_until) {
  }
}

}  // namespace jitkern
"""
_STEPS = "        for _ in range(100):\n            pass\n"
SEEDS = (
    Seed(
        "30 % in a CPU copy",
        "csrc/host/cpu_copy.h",
        "void copy_rows(i64 count, i64 row_bytes, i64 dst_bytes, const RowAt& row_at) {\n",
        "void copy_rows(i64 count, i64 row_bytes, i64 dst_bytes, const RowAt& row_at) {\n"
        "  const auto began = std::chrono::steady_clock::now();\n",
        "8192 rows",
    ),
    Seed(
        "0.5 us in the argument check",
        "csrc/host/check.cc",
        "  t.contiguous();\n  index_bytes = dtype.bits / 8;\n",
        "  t.contiguous();\n  index_bytes = dtype.bits / 8;\n"
        "  for (volatile int i = 0; i < 1650; i = i + 1) {\n  }\n",
        "call, checks only",
    ),
    Seed(
        "20 ms in import, computing",
        "ops/__init__.py",
        "",
        "\nimport time\n\n_until = time.perf_counter() + 0.020\n"
        "while time.perf_counter() < _until:\n    pass\n",
        "import of jitkern",
    ),
    Seed(
        "20 ms in import, waiting",
        "ops/__init__.py",
        "",
        "\nimport time\n\ntime.sleep(0.020)\n",
        "import of jitkern",
    ),
    Seed(
        "2 ms in the warm load, waiting",
        "cache/get.py",
        "    began_unix_s = time.time()\n    found = _find(",
        "    began_unix_s = time.time()\n    time.sleep(0.002)\n    found = _find(",
        "warm load of a kernel",
    ),
    Seed(
        "30 % in launch packing",
        "csrc/host/user_launch.cc",
        "    for (int i = 0; i < args.size(); ++i) put(i, args[i]);\n",
        "    for (int i = 0; i < args.size(); ++i) put(i, args[i]);\n"
        "    for (volatile int i = 0; i < 300; i = i + 1) {\n    }\n",
        "arguments to bytes",
    ),
    Seed(
        "100 steps of Python in a push of a ring",
        "offload/ring.py",
        "        push = self._push  # self._push(...) would",
        f"{_STEPS}        push = self._push  # self._push(...) would",
        "ring: push",
    ),
    Seed(
        "100 steps of Python in a load of an engine",
        "offload/engine.py",
        '        call = "OffloadEngine.load_cpu_blocks_to_gpu_slots_all_layers"\n',
        '        call = "OffloadEngine.load_cpu_blocks_to_gpu_slots_all_layers"\n' + _STEPS,
        "engine: 3 blocks",
    ),
    Seed(
        "100 steps of Python in a look-up of a split embedding",
        "nn/tp_embedding.py",
        "        weight = self.weight\n        if not",
        f"{_STEPS}        weight = self.weight\n        if not",
        "TPEmbedding: 3 tokens",
    ),
)


def main() -> int:
    """Run one of the commands above."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.guard_study")
    parser.add_argument("what", choices=("runs", "judge", "baseline", "seeds"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument(
        "--only", action="append", help="seeds: those of this name; recorded beside"
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--beside", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "runs":
        for beside in (0, args.beside):
            for number in range(1, args.runs + 1):
                _run(args.folder / f"{_load(beside)}-{number:02}.json", beside)
    elif args.what == "judge":
        _record("silence", _judge(_results(args.folder)))
    elif args.what == "baseline":
        baseline.write(args.file, baseline.made_of(_results(args.folder)))
    else:
        chosen = [s for s in SEEDS if not args.only or any(text in s.name for text in args.only)]
        _record(
            f"seeds, {' and '.join(args.only)}" if args.only else "seeds",
            _seeds(args.folder, chosen),
        )
    return 0


def _load(beside: int) -> str:
    return f"beside {beside}" if beside else "quiet"


def _run(
    path: Path, beside: int, source: Path = ROOT / "src", *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the guard of the package in `source`, with that many busy processes beside it."""
    command = [sys.executable, "-m", "jitkern", "bench", "--ci", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--json", str(path), *options],
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if not path.exists():
        raise RuntimeError(done.stderr)
    result = {**report.read(path), "beside": beside, "seconds": time.perf_counter() - began}
    report.save(path, result)
    print(f"{path.stem}: {result['seconds']:.0f} s, exit {done.returncode}", flush=True)
    return done


def _results(folder: Path) -> list[report.Payload]:
    return [report.read(path) for path in sorted(folder.glob("*-*.json"))]


# -- silence ---------------------------------------------------------------------------------------


def _judge(results: Sequence[report.Payload]) -> dict[str, Any]:
    """Count alarms of each half by a baseline of the other, with no second look at a figure."""
    alarms: list[dict[str, Any]] = []
    lone: dict[str, int] = {}
    for turn in (0, 1):
        made = baseline.made_of(results[turn::2])
        for result in results[1 - turn :: 2]:
            for verdict in baseline.compare(made, result):
                if verdict.outcome == "slower" and verdict.gates:
                    alarms.append(
                        {
                            "figure": verdict.key,
                            "measure": verdict.measure,
                            "change": verdict.change,
                            "tolerance": verdict.tolerance,
                            "load": _load(result["beside"]),
                        }
                    )
    everything = baseline.made_of(results)
    for figure in everything.figures.values():
        gates = baseline.time_tolerance(figure) <= baseline.MOST_TIME_TOLERANCE
        lone[str(gates)] = lone.get(str(gates), 0) + 1
    seconds: dict[str, list[float]] = {}
    for result in results:
        seconds.setdefault(_load(result["beside"]), []).append(result.get("seconds", 0.0))
    return {
        "runs": everything.runs,
        "verdicts": sum(len(baseline.compare(everything, result)) for result in results),
        "alarms": alarms,
        "seconds": {load: statistics.median(times) for load, times in seconds.items()},
        "figures": {"that gate by time": lone.get("True", 0), "that inform": lone.get("False", 0)},
        "tolerances": {
            key: {
                "time": round(baseline.time_tolerance(figure), 3),
                "count": round(baseline.count_tolerance(figure), 3)
                if figure.instructions
                else None,
            }
            for key, figure in everything.figures.items()
        },
    }


# -- seeds -----------------------------------------------------------------------------------------


def _seeds(folder: Path, seeds: Sequence[Seed]) -> list[dict[str, Any]]:
    made = baseline.made_of(_results(folder))
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "baseline.json"
        baseline.write(file, made)
        return [_plant(seed, file, made, Path(name)) for seed in seeds]


def _plant(seed: Seed, file: Path, made: baseline.Baseline, folder: Path) -> dict[str, Any]:
    source = folder / "src"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    place = source / "jitkern" / seed.file
    text = place.read_text()
    if seed.text and text.count(seed.text) != 1:
        raise LookupError(f"{seed.file} has changed: {seed.text!r} is not in it once")
    text = text.replace(seed.text, seed.planted) if seed.text else text + seed.planted
    if seed.file.endswith("cpu_copy.h"):
        head, _, _ = text.rpartition("}\n\n}  // namespace jitkern")
        text = (
            head.replace("#include <cstring>", "#include <chrono>\n#include <cstring>") + _SPIN_CC
        )
    place.write_text(text)
    path = folder / "seeded.json"
    path.unlink(missing_ok=True)
    done = _run(path, 0, source, "--baseline", str(file))
    verdicts = baseline.compare(made, report.read(path))
    spoke = [v for v in verdicts if v.outcome == "slower" and v.gates]
    wanted = [v for v in verdicts if seed.caught_by in v.key and v.change is not None]
    found = {
        "seed": seed.name,
        "exit": done.returncode,
        "caught": any(seed.caught_by in verdict.key for verdict in spoke),
        "by": sorted({f"{v.key}, {v.measure}" for v in spoke if seed.caught_by in v.key}),
        "others that spoke": sorted(
            {f"{v.key}, {v.measure}" for v in spoke if seed.caught_by not in v.key}
        ),
        "changes": {f"{v.key}, {v.measure}": round(v.change or 0.0, 4) for v in wanted},
    }
    print(json.dumps(found, indent=1), flush=True)
    return found


def _record(part: str, found: object) -> None:
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    machine = report.machine("cpu")
    report.save(RESULT, {**before, "machine": machine, part: found})
    print(f"wrote {RESULT.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
