"""What figures were, how far they strayed, and whether they are worse now.

A baseline holds for each figure the lowest, the middle and the highest value of many runs of one
tree, on a quiet machine and beside a load. A figure is slower if it lies outside of what those runs
can explain: a time in both of its ratios, that of the fastest samples and the median; a count of
instructions by itself. How far outside, :func:`time_tolerance` and :func:`count_tolerance` say.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jitkern.bench import report
from jitkern.bench.case import Row
from jitkern.errors import JitkernError

SCHEMA = 1
Gate = Literal["all", "counts", "none"]
Outcome = Literal[
    "slower", "faster", "same", "new", "missing", "broken", "left out", "not compared"
]
Span = tuple[float, float, float]  # lowest, middle, highest

# Twice what the farthest of the runs strayed, and no less than this. Of 40 runs of one tree on two
# cores, half of them beside a load, each judged by a baseline that it is not in: docs/bench-ci.md.
STRAYED = 2.0
LEAST_TIME_TOLERANCE = 0.10
# What two machines of one kind differ by: the interpreter's caches are found by address, and the
# heap lies elsewhere in each. A call of 20,680 instructions took 21,073 on another machine.
LEAST_COUNT_TOLERANCE = 0.03
COUNT_TOLERANCE_IN_INSTRUCTIONS = 100
# What strays farther would not notice a figure twice as slow: it is shown and decides nothing.
MOST_TIME_TOLERANCE = 1.0


class BaselineError(JitkernError):
    """A baseline cannot be used; the message is one line and says what to do."""


@dataclass(frozen=True)
class Figure:
    """One figure of a baseline; a span is None where it was not measured."""

    against: str = ""
    ratio_min: Span | None = None
    ratio_median: Span | None = None
    instructions: Span | None = None


@dataclass(frozen=True)
class Baseline:
    """The figures of one tree on one kind of machine."""

    kind: str
    figures: dict[str, Figure]
    counted_by: dict[str, str] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)  # how many, by what ran beside them
    path: Path | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of one figure."""

    key: str
    measure: Literal["time", "count"]
    outcome: Outcome
    then: float | None = None
    now: float | None = None
    tolerance: float | None = None
    gates: bool = True  # False: it strays too far to decide anything
    reason: str = ""

    @property
    def change(self) -> float | None:
        """Return the change as a fraction: 0.3 is 30 % more."""
        return self.now / self.then - 1 if self.now and self.then else None

    def fails(self, gate: Gate) -> bool:
        """Whether this ends a run with status 1."""
        if self.outcome == "broken":
            return True
        if gate == "none" or (gate == "counts" and self.measure == "time"):
            return False
        return self.gates and self.outcome in ("slower", "missing")


def time_tolerance(figure: Figure) -> float:
    """Return by what fraction both ratios have to rise before the figure counts as slower.

    By the steadier of the two: one run in twenty has an odd fastest sample, or a bad phase, and
    seldom both. (With the other one's, half of the figures would not notice 30 %.)
    """
    spans = [span for span in (figure.ratio_min, figure.ratio_median) if span]
    strayed = min((high / mid - 1 for _, mid, high in spans), default=0.0)
    return max(LEAST_TIME_TOLERANCE, STRAYED * strayed)


def count_tolerance(figure: Figure) -> float:
    """Return by what fraction the count has to rise."""
    if figure.instructions is None:
        return LEAST_COUNT_TOLERANCE
    _, mid, high = figure.instructions
    least = max(LEAST_COUNT_TOLERANCE, STRAYED * (high / mid - 1))
    return least + COUNT_TOLERANCE_IN_INSTRUCTIONS / mid


# -- comparing -------------------------------------------------------------------------------------


def compare(
    baseline: Baseline, result: report.Payload, wanted: Callable[[str], bool] = lambda _: True
) -> list[Verdict]:
    """Return a verdict for each figure of the baseline and of the result, counts after times.

    Figures of the baseline that are not `wanted` were not measured on purpose.
    """
    rows = {row.key: row for row in report.rows_of(result)}
    same_kind = baseline.kind == report.kind_of(result["machine"])
    same_counts = baseline.counted_by == result["counts"]["identity"]
    times: list[Verdict] = []
    counts: list[Verdict] = []
    known = [key for key in baseline.figures if wanted(key)]
    for key in [*known, *(key for key in rows if key not in baseline.figures)]:
        figure = baseline.figures.get(key, Figure())
        row = rows.get(key)
        if row is None or row.error:
            outcome: Outcome = "missing" if row is None else "broken"
            reason = "" if row is None else row.error
            times.append(Verdict(key, "time", outcome, reason=reason))
            continue
        times.append(_time(key, figure, row, same_kind))
        if row.instructions is not None:
            counts.append(_count(key, figure, row.instructions, same_counts))
        elif figure.instructions is not None and same_counts:
            left_out = row.ratio_min is None and bool(row.note)  # as its time is, and why
            why = row.note if left_out else result["counts"].get("note", "")
            outcome = "left out" if left_out else "missing"
            counts.append(Verdict(key, "count", outcome, reason=why))
    return [*times, *counts]


def _time(key: str, figure: Figure, row: Row, comparable: bool) -> Verdict:
    if row.ratio_min is None or row.ratio_median is None:
        return Verdict(key, "time", "left out", reason=row.note)
    if figure.ratio_min is None or figure.ratio_median is None:
        return Verdict(key, "time", "new", now=row.ratio_median)
    then = figure.ratio_median[1]
    if not comparable:
        return Verdict(key, "time", "not compared", then, row.ratio_median)
    tolerance = time_tolerance(figure)
    changes = (row.ratio_min / figure.ratio_min[1], row.ratio_median / then)
    outcome = _outcome(changes, tolerance)
    gates = tolerance <= MOST_TIME_TOLERANCE
    return Verdict(key, "time", outcome, then, row.ratio_median, tolerance, gates)


def _count(key: str, figure: Figure, now: float, comparable: bool) -> Verdict:
    if figure.instructions is None:
        return Verdict(key, "count", "new", now=now)
    then = figure.instructions[1]
    if not comparable:
        return Verdict(key, "count", "not compared", then, now)
    tolerance = count_tolerance(figure)
    return Verdict(key, "count", _outcome((now / then,), tolerance), then, now, tolerance)


def _outcome(changes: Sequence[float], tolerance: float) -> Outcome:
    if all(change > 1 + tolerance for change in changes):
        return "slower"
    if all(change < 1 / (1 + tolerance) for change in changes):
        return "faster"
    return "same"


# -- files -----------------------------------------------------------------------------------------


def find(place: Path, kind: str, counted_by: Mapping[str, str]) -> tuple[Baseline | None, str]:
    """Return the baseline to use and, where something is not compared, a line that says so.

    A file is taken as it is, and must be of this kind of machine. In a directory the file of this
    kind is looked for; else one whose counts can be compared, and then only they are.
    """
    if not place.is_dir():
        baseline = read(place)
        if baseline.kind != kind:
            raise BaselineError(
                f"{place}: baseline of {baseline.kind}, this machine is {kind}; give the directory "
                "instead of the file to compare what can be, or --update a file of its own"
            )
        return baseline, _count_note(baseline, counted_by)
    if (file := place / f"{kind}.json").is_file():
        baseline = read(file)
        return baseline, _count_note(baseline, counted_by)
    for file in sorted(place.glob("*.json")):
        baseline = read(file)
        if counted_by and baseline.counted_by == counted_by:
            return baseline, (
                f"no baseline of {kind} in {place}: only instructions are compared, "
                f"with {file.name}"
            )
    return None, (
        f"no baseline of {kind} in {place}: nothing is compared; to make one: "
        f"jitkern bench --ci --baseline {place} --update"
    )


def _count_note(baseline: Baseline, counted_by: Mapping[str, str]) -> str:
    if not baseline.counted_by or not counted_by:
        return ""
    names = [*baseline.counted_by, *(n for n in counted_by if n not in baseline.counted_by)]
    differs = [n for n in names if baseline.counted_by.get(n) != counted_by.get(n)]
    if not differs:
        return ""
    name = differs[0]
    return (
        f"instructions are not compared: {name} is {counted_by.get(name, 'unknown')}, in the "
        f"baseline {baseline.counted_by.get(name, 'unknown')}; renew it with --update"
    )


def read(path: Path) -> Baseline:
    """Return the baseline in a file; BaselineError in one line where there is none."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise BaselineError(
            f"{path}: no such baseline; to make one: jitkern bench --ci --baseline {path} --update"
        ) from error
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or "figures" not in data:
        raise BaselineError(f"{path}: not a baseline: it has no 'figures'")
    if data.get("schema") != SCHEMA:
        raise BaselineError(
            f"{path}: schema {data.get('schema')!r}, this jitkern reads {SCHEMA}; renew it with "
            "--update"
        )
    try:
        figures = {str(key): _figure(value) for key, value in data["figures"].items()}
        counted_by = {str(k): str(v) for k, v in data["counted_by"].items()}
        runs = {str(k): int(v) for k, v in data["runs"].items()}
        return Baseline(str(data["kind"]), figures, counted_by, runs, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BaselineError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def _figure(data: Mapping[str, Any]) -> Figure:
    def span(name: str) -> Span | None:
        if data.get(name) is None:
            return None
        low, mid, high = (float(value) for value in data[name])
        if not 0 < low <= mid <= high:
            raise ValueError(f"{name}: {data[name]}, expected lowest, middle, highest above 0")
        return low, mid, high

    return Figure(
        str(data.get("against", "")),
        span("ratio_min"),
        span("ratio_median"),
        span("instructions"),
    )


def made_of(results: Sequence[report.Payload]) -> Baseline:
    """Return the baseline of several runs of one tree on one machine."""
    kinds = {report.kind_of(result["machine"]) for result in results}
    if len(kinds) != 1:
        raise BaselineError(f"results of several kinds of machine: {', '.join(sorted(kinds))}")
    counted_by: dict[str, str] = {}
    by_key: dict[str, list[Row]] = {}
    for result in results:
        identity = result["counts"]["identity"]
        if identity and counted_by and identity != counted_by:
            raise BaselineError("results whose instructions were counted by different software")
        counted_by = counted_by or identity
        for row in report.rows_of(result):
            if row.error:
                raise BaselineError(f"{row.key}: broken, no baseline is made of it: {row.error}")
            by_key.setdefault(row.key, []).append(row)
    figures = {
        key: Figure(
            rows[0].against,
            _span([row.ratio_min for row in rows]),
            _span([row.ratio_median for row in rows]),
            _span([row.instructions for row in rows]),
        )
        for key, rows in by_key.items()
    }
    runs: dict[str, int] = {}
    for result in results:
        beside = f"beside {result['beside']} busy processes" if result["beside"] else "quiet"
        runs[beside] = runs.get(beside, 0) + 1
    return Baseline(kinds.pop(), figures, counted_by, runs)


def renewed(old: Baseline, made: Baseline, only: Sequence[str]) -> Baseline:
    """Return `old` with the figures of `made`, which is of those with a text of `only` in the name.

    Raises
    ------
    BaselineError
        They were measured on another kind of machine, or counted by other software.
    """
    if old.kind != made.kind:
        raise BaselineError(f"{old.path}: baseline of {old.kind}, this machine is {made.kind}")
    if bool(old.counted_by) != bool(made.counted_by):
        counted = "its instructions are" if old.counted_by else "none of its instructions is"
        raise BaselineError(f"{old.path}: {counted} counted; renew all of it, without --only")
    if note := _count_note(old, made.counted_by):
        raise BaselineError(f"{old.path}: {note}, without --only")
    figures = {
        key: made.figures.get(key, figure)
        for key, figure in old.figures.items()
        if key in made.figures or not any(text in key for text in only)
    }
    return replace(old, figures={**figures, **made.figures})


def _span(values: Sequence[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return min(known), statistics.median(known), max(known)


def write(path: Path, baseline: Baseline) -> None:
    """Write a baseline; BaselineError where that is not possible."""
    figures = {}
    for key, figure in baseline.figures.items():
        spans = {
            name: [float(f"{value:.5g}") for value in span]
            for name in ("ratio_min", "ratio_median", "instructions")
            if (span := getattr(figure, name)) is not None
        }
        figures[key] = {"against": figure.against, **spans}
        if "ratio_min" in spans:
            # For the reader; what is compared with is worked out from the spans.
            tolerance = time_tolerance(figure)
            figures[key]["time"] = (
                f"gates above {tolerance:+.0%}"
                if tolerance <= MOST_TIME_TOLERANCE
                else f"informs: strays by {tolerance / STRAYED:.0%}"
            )
    data = {
        "schema": SCHEMA,
        "kind": baseline.kind,
        "runs": baseline.runs,
        "counted_by": baseline.counted_by,
        "figures": figures,
    }
    try:
        report.save(path, data)
    except OSError as error:
        raise BaselineError(f"{path}: cannot be written: {error.strerror}") from error
