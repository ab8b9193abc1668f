"""What the ops are meant to reach, and what a run got: ratios of figures of that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.cases import NAMES, module
from jitkern.bench import Row

NVCC = "nvcc, mini-sglang style"
MEMCPY = "cudaMemcpyAsync, contiguous"


@dataclass(frozen=True)
class Goal:
    """One line: a figure, what it should be, what it is."""

    figure: str
    wanted: str
    got: str
    met: bool


class Figures:
    """Rows by benchmark, case and implementation."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row.median_us]

    def cases(self, op: str) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows if row.op == op))

    def all(self, op: str, case: str) -> dict[str, Row]:
        return {row.impl: row for row in self.rows if row.op == op and row.case == case}

    def us(self, op: str, case: str, impl: str) -> float | None:
        row = self.all(op, case).get(impl)
        return row.median_us if row else None

    def speed(self, op: str, case: str, impl: str, other: str) -> float | None:
        """Bandwidth of `impl` over that of `other`; above 1 is faster."""
        rows = self.all(op, case)
        one, two = rows.get(impl), rows.get(other)
        return one.gb_s / two.gb_s if one and two and one.gb_s and two.gb_s else None


def reached(rows: Sequence[Row]) -> list[Goal]:
    """Return a line for each goal that the rows have figures for: those of every benchmark."""
    figures = Figures(rows)
    return [goal for name in NAMES for goal in module(name).goals(figures)]


def goals_table(goals: Sequence[Goal]) -> Table:
    """Return the goals this run has figures for, with what it got."""
    made = Table(title="goals", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("figure", "goal", "got", ""):
        made.add_column(column, justify="right" if column in ("goal", "got") else "left")
    for goal in goals:
        style = "green" if goal.met else "red"
        made.add_row(
            goal.figure, goal.wanted, goal.got, "met" if goal.met else "short", style=style
        )
    return made


def recorded(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the goals as they go into the JSON."""
    return [asdict(goal) for goal in reached(rows)]


def at_least(figure: str, got: float | None, wanted: float, unit: str = "x") -> Iterator[Goal]:
    if got is not None:
        yield Goal(figure, f">= {wanted} {unit}", f"{got:.3f} {unit}", got >= wanted)


def at_most(figure: str, got: float | None, wanted: float, unit: str = "x") -> Iterator[Goal]:
    if got is not None:
        yield Goal(figure, f"<= {wanted} {unit}", f"{got:.3f} {unit}", got <= wanted)


def cpu_goals(f: Figures, op: str, peer: str = "", wanted: float = 0.0) -> Iterator[Goal]:
    """Yield the goals of an op's CPU implementation: of a copy, and of `peer` if one is named."""
    for case in f.cases(op):
        ceiling = [n for n in f.all(op, case) if n.startswith("copy_ of")]
        if not ceiling:
            continue  # a GPU's rows
        name = f"{op} on the CPU, {case}"
        if peer:
            yield from at_least(f"{name}: of {peer}", f.speed(op, case, "jitkern", peer), wanted)
        got = f.speed(op, case, "jitkern", ceiling[0])
        yield from at_least(f"{name}: of copy_", got, 0.8)
