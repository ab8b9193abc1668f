"""What a fresh process pays: import, host module, cached kernel, compile, first call.

The samples are children of one process that has imported torch (``worker.py``), so one costs a
tenth of a second instead of seconds. Each brings its own yardstick: an empty Python process, a bare
dlopen of the same library, a bare compile of a text that never changes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.bench.case import Context, Row, error_row
from jitkern.bench.client import Worker
from jitkern.bench.pairs import Pairs, fill_pairs
from jitkern.errors import JitkernError

OP = "process"
EMPTY, DLOPEN, BARE = "python -c pass", "dlopen of the same file", "bare compile of a fixed text"

# The bare compile: as long as a small kernel takes, and never edited.
SOURCE = """
extern "C" __global__ void bare(const float4* a, float4* b, const int* order, long long n) {
  for (long long i = blockIdx.x * 128ll + threadIdx.x; i < n; i += gridDim.x * 128ll) {
    float4 value = a[order[i]];
    value.x = value.x * 2.0f + value.w;
    b[i] = value;
  }
}
"""


@dataclass(frozen=True)
class Figure:
    """One figure: which steps it adds up, and what they are held against."""

    case: str
    job: str
    steps: tuple[str, ...]
    against: str
    references: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{OP}: {self.case}"


_EMPTY_STEPS = (EMPTY, f"{EMPTY}, again")
_BARE_STEPS = ("bare compile", "bare compile, again")
_ALL_STEPS = ("import", "host module", "first kernel", "first op")
FIGURES = (
    Figure("import of jitkern and tvm-ffi", "warm", ("import",), EMPTY, _EMPTY_STEPS),
    Figure("load of the host module", "warm", ("host module",), DLOPEN, ("dlopen",)),
    Figure("warm load of a kernel", "warm", ("next kernel",), DLOPEN, ("dlopen",)),
    Figure("first call", "warm", _ALL_STEPS, EMPTY, _EMPTY_STEPS),
    Figure("first call, no bytecode", "no bytecode", _ALL_STEPS, EMPTY, _EMPTY_STEPS),
    Figure("NVRTC compile, cold", "cold", ("compile",), BARE, _BARE_STEPS),
)
SAMPLES = {"warm": 24, "no bytecode": 8, "cold": 10}
NEEDS_NVRTC = {"first kernel", "next kernel", "compile"}


class FreshProcesses:
    """The samples so far, and the process that forks new ones."""

    def __init__(self, ctx: Context, worker: Worker) -> None:
        self._ctx = ctx
        self._worker = worker
        self._samples: dict[str, list[dict[str, float]]] = {}
        self._described: dict[str, Any] = {}

    def rows(self, wanted: Callable[[str], bool]) -> Iterator[Row]:
        """Yield a row for each figure whose key is wanted; asked again, from more samples."""
        figures = [figure for figure in FIGURES if wanted(figure.key)]
        for job in dict.fromkeys(figure.job for figure in figures):
            these = [figure for figure in figures if figure.job == job]
            try:
                self._take(job)
                yield from [self._row(figure) for figure in these]
            except (JitkernError, OSError) as error:
                for figure in these:
                    yield error_row(OP, figure.case, "jitkern", "ours", error)

    def describe(self) -> dict[str, Any]:
        """Fill the caches, once; tell what the samples can do."""
        if not self._described:
            found = self._worker.ask("describe")
            if found["library"]:
                # A copy, so that jitkern's own load still finds the file as a new process does.
                copy = self._worker.folder / "copy.so"
                shutil.copyfile(found["library"], copy)
                found["library"] = str(copy)
            self._described = found
        return self._described

    def _take(self, job: str) -> None:
        described = self.describe()
        compiles = not described["no_compiler"]
        if job == "cold" and not compiles:
            return
        about = {"library": described["library"], "kernels": compiles, "source": SOURCE}
        samples = self._samples.setdefault(job, [])
        for _ in range(SAMPLES[job]):
            if job == "cold":
                with self._worker.empty_kernel_cache():
                    samples.append(self._worker.ask("cold", **about))
            elif job == "no bytecode":
                with tempfile.TemporaryDirectory(dir=self._worker.folder) as empty:
                    samples.append(self._worker.ask("warm", pycache=Path(empty), **about))
            else:
                samples.append(self._worker.ask("warm", **about))

    def _row(self, figure: Figure) -> Row:
        row = Row(OP, figure.case, "jitkern", "ours", against=figure.against)
        steps = figure.steps
        if reason := self._described["no_compiler"]:
            steps = tuple(step for step in steps if step not in NEEDS_NVRTC)
            row.note = f"its kernel left out: {reason}" if steps else f"left out: {reason}"
        if steps:
            samples = self._samples[figure.job]
            ours = (1e3 * sum(sample[step] for step in steps) for sample in samples)
            yardstick = (1e3 * min(sample[n] for n in figure.references) for sample in samples)
            fill_pairs(row, Pairs(tuple(ours), tuple(yardstick)))
        return row
