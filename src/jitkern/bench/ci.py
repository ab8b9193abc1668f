"""One run of the guard: every case in pairs with its yardstick, then counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from jitkern.bench import counts, report
from jitkern.bench.case import Case, CaseError, Context, Impl, Row, cases_of, error_row
from jitkern.bench.cases import builtin_cases
from jitkern.bench.client import Worker
from jitkern.bench.fresh import FIGURES, FreshProcesses
from jitkern.bench.measure import check, expected_of
from jitkern.bench.pairs import (
    Pairs,
    bind,
    device_sampler,
    fill_pairs,
    host_sampler,
    time_pairs,
)
from jitkern.bench.timing import ColdBuffers, cache_bytes_of
from jitkern.errors import JitkernError

CASE_BUDGET_S = 0.5
RETRIES = 2  # of a figure that looks slower: a neighbour does not stay for all of them
CPU_ARCH = "9.0"  # compiled for, where there is no GPU

Wanted = Callable[[str], bool]
Advance = Callable[[str, int, int], None]


class Run:
    """The figures of one run; a context manager, because it keeps a process for samples.

    Parameters
    ----------
    device
        ``"cuda"`` or ``"cpu"``.
    files
        Files of cases to measure instead of jitkern's own.
    wanted
        Which figures to measure, by key.
    advance
        Told what comes next, and how many of how many steps are done.
    """

    def __init__(
        self,
        device: str,
        files: Sequence[Path] = (),
        wanted: Wanted = lambda _: True,
        advance: Advance = lambda _text, _done, _all: None,
    ) -> None:
        self.ctx: Context = Context(device)
        self._files = list(files)
        self._wanted = wanted
        self._advance = advance
        self._cases: dict[str, Case] = {}
        self._threads = torch.get_num_threads()
        self._worker: Worker | None = None
        self._fresh: FreshProcesses | None = None

    def __enter__(self) -> Run:
        # One thread: a team waits for its slowest, and on a shared machine that is the neighbour.
        torch.set_num_threads(1)
        arch = CPU_ARCH
        if self.ctx.device == "cuda":
            arch = "{}.{}".format(*torch.cuda.get_device_capability())
        self._arch = arch
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._threads)
        if self._worker is not None:
            self._worker.__exit__(*exception)

    def measure(self, *, beside: int = 0) -> report.Payload:
        """Measure everything that is wanted; a case that breaks is a row with an error."""
        rows = self._load()
        steps = [*self._cases, *(["process"] if not self._files else []), "instructions"]
        for position, key in enumerate(steps):
            self._advance(key, position, len(steps))
            if key == "process":
                rows += self._processes().rows(self._wanted)
            elif key == "instructions":
                counted = self._count(rows)
            else:
                rows.append(self._time(self._cases[key]))
        self._advance("done", len(steps), len(steps))
        for row in rows:
            row.instructions = counted.by_key.get(row.key)
        result = report.payload(report.machine(self.ctx.device), rows, quick=False)
        result["counts"] = {
            "source": counted.source,
            "identity": counted.identity,
            "note": counted.note,
        }
        result["beside"] = beside
        return result

    def again(self, keys: Iterable[str]) -> list[Row]:
        """Time these figures once more."""
        wanted = set(keys)
        rows = [self._time(case) for key, case in self._cases.items() if key in wanted]
        if wanted & {figure.key for figure in FIGURES}:
            rows += self._processes().rows(wanted.__contains__)
        return rows

    def _processes(self) -> FreshProcesses:
        # Started when it is needed: its import of torch would disturb what is timed before.
        if self._fresh is None:
            self._worker = Worker(self.ctx.device, self._arch)
            self._fresh = FreshProcesses(self.ctx, self._worker)
        return self._fresh

    # -- one figure ------------------------------------------------------------------------------

    def _load(self) -> list[Row]:
        broken: list[Row] = []
        files: list[Path | None] = [*self._files] or [None]
        for file in files:
            name = "jitkern" if file is None else file.stem
            try:
                for case in builtin_cases(self.ctx) if file is None else cases_of(file, self.ctx):
                    if case.key in self._cases:
                        raise CaseError(f"{file}: two cases are called {case.key!r}")
                    if self._wanted(case.key):
                        self._cases[case.key] = case
            except Exception as error:  # the other files still run
                broken.append(error_row(name, "loading the cases", str(file), "ours", error))
        return broken

    def _time(self, case: Case) -> Row:
        ours, reference = case.ours(), case.reference_impl()
        row = Row(case.op, case.name, ours.name, "ours", case.params, against=reference.name)
        row.bytes_moved, row.bytes_note = case.bytes_moved or None, case.bytes_note
        try:
            torch.manual_seed(0)
            torch.set_num_threads(case.threads or self._threads)
            with torch.inference_mode():  # as servers call; gradients enabled, an op asks more
                fill_pairs(row, self._pairs(case, ours, reference))
        except Exception as error:  # the other cases still run
            row.error = error_row("", "", "", "", error).error
        torch.set_num_threads(1)
        if self.ctx.device == "cuda":
            torch.cuda.empty_cache()
        return row

    def _pairs(self, case: Case, ours: Impl, reference: Impl) -> Pairs:
        ctx = self.ctx
        on_device = ctx.device == "cuda" and case.clock == "device"
        sets = [case.make(0)]
        if on_device and case.bytes_moved:
            touched = case.touched_bytes or case.bytes_moved
            cache_bytes = cache_bytes_of(ctx.device)
            cold = ColdBuffers(case.make, touched, cache_bytes=cache_bytes, at_most=case.calls)
            sets = [cold[i] for i in range(len(cold))]
        runs = [impl.build() for impl in (ours, reference)]
        if case.outputs(sets[0]):
            check(ctx, case, ours, runs[0], sets[0], expected_of(case, sets[0]))
        if on_device:
            samplers = [
                device_sampler([bind(run, sets[i % len(sets)]) for i in range(case.calls)])
                for run in runs
            ]
        else:
            samplers = [host_sampler(ctx, bind(run, sets[0])) for run in runs]
        return time_pairs(samplers[0], samplers[1], budget_s=CASE_BUDGET_S)

    def _count(self, rows: Sequence[Row]) -> counts.Counts:
        wanted = [row.key for row in rows if not row.error]
        if not wanted:
            return counts.Counts("", note="nothing was measured")
        kernels = False
        if not self._files:
            with suppress(JitkernError):  # the rows of the processes have told what is wrong
                kernels = not self._processes().describe()["no_compiler"]
        return counts.count(
            self.ctx.device, self._arch, kernels=kernels, cases=self._files, wanted=wanted
        )


def confirmed(
    run: Run, result: report.Payload, suspects: Callable[[report.Payload], list[str]]
) -> report.Payload:
    """Time what looks slower again, and keep of each figure the measurement that looks best."""
    for _ in range(RETRIES):
        keys = suspects(result)
        if not keys:
            break
        better = {row.key: row for row in run.again(keys) if not row.error}
        rows = []
        for row in report.rows_of(result):
            other = better.get(row.key)
            if other is not None and (other.ratio_median or 0) < (row.ratio_median or 0):
                other.instructions = row.instructions
                row = other
            rows.append(row)
        result = {**result, **report.payload(result["machine"], rows, quick=False)}
    return result
