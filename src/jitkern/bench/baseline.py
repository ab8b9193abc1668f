"""Baselines of the guard: what each figure was on a kind of machine, and what has become slower.

A count of instructions decides, where it rose by more than two machines of a kind differ by. A time
is shown beside it and decides nothing: neighbours change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from jitkern.bench import report
from jitkern.bench.case import Row
from jitkern.errors import JitkernError

SCHEMA = 2
Outcome = Literal["slower", "faster", "same", "new", "missing", "broken", "not compared"]

# What two machines of one kind, or two runs, differ by: the interpreter's caches are found by
# address, and the heap lies elsewhere in each. Calls of 20,680 instructions took 21,073 elsewhere.
COUNT_TOLERANCE = 0.03
COUNT_TOLERANCE_IN_INSTRUCTIONS = 100


class BaselineError(JitkernError):
    """A baseline cannot be used; the message is one line and says what to do."""


@dataclass(frozen=True)
class Figure:
    """One figure; None where it was not measured."""

    against: str = ""
    ratio: float | None = None  # time of ours / time of `against`
    instructions: float | None = None


@dataclass(frozen=True)
class Baseline:
    """The figures of one tree on one kind of machine."""

    kind: str = ""
    figures: dict[str, Figure] = field(default_factory=dict)
    counted_by: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What became of one figure."""

    key: str
    outcome: Outcome
    then: Figure
    now: Figure
    reason: str = ""

    @property
    def fails(self) -> bool:
        """Whether this ends a run with status 1."""
        return self.outcome in ("slower", "missing", "broken")


def most_instructions(then: float) -> float:
    """Return the count above which a figure is slower."""
    return then * (1 + COUNT_TOLERANCE) + COUNT_TOLERANCE_IN_INSTRUCTIONS


def compare(
    baseline: Baseline, result: report.Payload, wanted: Callable[[str], bool] = lambda _: True
) -> list[Verdict]:
    """Return a verdict for each figure that is `wanted`, of the baseline and of the result."""
    rows = {row.key: row for row in report.rows_of(result)}
    same_software = baseline.counted_by == result["counts"]["identity"]
    same_kind = baseline.kind == report.kind_of(result["machine"])
    keys = dict.fromkeys([*filter(wanted, baseline.figures), *rows])
    return [
        _verdict(key, baseline.figures.get(key), rows.get(key), same_software, same_kind)
        for key in keys
    ]


def _verdict(
    key: str, then: Figure | None, row: Row | None, same_software: bool, same_kind: bool
) -> Verdict:
    if row is None:
        then = then or Figure()
        counted = then.instructions is not None and same_software
        return Verdict(key, "missing" if counted else "not compared", then, Figure())
    if row.error:
        return Verdict(key, "broken", then or Figure(), Figure(), row.error)
    now = Figure(row.against, row.ratio_median, row.instructions)
    if then is None:
        return Verdict(key, "new", Figure(), now, row.note)
    if not same_kind:
        then = Figure(then.against, None, then.instructions)
    outcome: Outcome = "same"
    if then.instructions is None or not same_software:
        outcome = "not compared"
    elif now.instructions is None:  # what could not be counted, and says why, is not missing
        outcome = "not compared" if row.note else "missing"
    elif now.instructions > most_instructions(then.instructions):
        outcome = "slower"
    elif then.instructions > most_instructions(now.instructions):
        outcome = "faster"
    return Verdict(key, outcome, then, now, row.note)


# -- files -----------------------------------------------------------------------------------------


def find(place: Path, kind: str, counted_by: Mapping[str, str]) -> tuple[Baseline | None, str]:
    """Return the baseline to use and, where something is not compared, a line that says so.

    A file must be of this kind of machine. In a directory the file of this kind is looked for;
    else one whose counts can be compared.
    """
    file = place / f"{kind}.json" if place.is_dir() else place
    if file.is_file() or not place.is_dir():
        baseline = read(file)
        if baseline.kind != kind:
            raise BaselineError(
                f"{file}: baseline of {baseline.kind}, this machine is {kind}; give the directory "
                "instead of the file to compare what can be, or --update a file of its own"
            )
        return baseline, _count_note(baseline, counted_by)
    for file in sorted(place.glob("*.json")):
        baseline = read(file)
        if counted_by and baseline.counted_by == counted_by:
            note = f"no baseline of {kind} in {place}: only instructions are compared, with"
            return baseline, f"{note} {file.name}"
    return None, (
        f"no baseline of {kind} in {place}: nothing is compared; to make one: "
        f"jitkern bench --ci --baseline {place} --update"
    )


def _count_note(baseline: Baseline, counted_by: Mapping[str, str]) -> str:
    then = baseline.counted_by
    for name in [*then, *counted_by] if then and counted_by else []:
        if then.get(name) != counted_by.get(name):
            return (
                f"instructions are not compared: {name} is {counted_by.get(name, 'unknown')}, in "
                f"the baseline {then.get(name, 'unknown')}; renew it with --update"
            )
    return ""


def read(path: Path) -> Baseline:
    """Return the baseline in a file; BaselineError in one line where there is none."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, this jitkern reads {SCHEMA}")
        figures = {str(key): Figure(**value) for key, value in data["figures"].items()}
        return Baseline(str(data["kind"]), figures, dict(data["counted_by"]))
    except FileNotFoundError as error:
        reason = "no such baseline; to make one"
        cause: Exception = error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"not a baseline ({type(error).__name__}: {error}); to make it anew"
        cause = error
    raise BaselineError(
        f"{path}: {reason}: jitkern bench --ci --baseline {path} --update"
    ) from cause


def write(path: Path, result: report.Payload) -> Baseline:
    """Write the baseline that a run gives; BaselineError where it gives none."""
    figures: dict[str, Figure] = {}
    for row in report.rows_of(result):
        if row.error:
            raise BaselineError(f"{row.key}: broken, no baseline is made of it: {row.error}")
        figures[row.key] = Figure(row.against, row.ratio_median, row.instructions)
    counted_by = result["counts"]["identity"]
    if counted_by and result["counts"]["note"]:  # it would be an open gate
        raise BaselineError(f"instructions: {result['counts']['note']}")
    baseline = Baseline(report.kind_of(result["machine"]), figures, counted_by)
    report.save(path, report.rounded({"schema": SCHEMA, **asdict(baseline)}))
    return baseline
