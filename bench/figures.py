"""Figures in the sentences and hand-made tables of the docs, from ``bench/results/*.json``.

``bench/said.py`` lists the pieces of text that have some. ``python -m bench.tables`` writes the
figures anew, and a test holds the pages to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import Formatter

from bench.tables import read, three_digits

Figure = float | str

_FIGURE = r"(\d(?:[\d.,-]*\d)?)"


@dataclass(frozen=True)
class Said:
    """A piece of a page.

    Attributes
    ----------
    text
        The piece, with ``{}`` where a figure of three digits is, or ``{:.1f}``. White space is any
        white space, so that a page can be wrapped anywhere.
    figures
        What the figures are now. A string is put in as it is.
    holds
        Whether the words are true of the figures.
    """

    text: str
    figures: Sequence[Figure]
    holds: bool = True

    def written(self) -> list[str]:
        """Return the figures as they are to be read."""
        specs = [spec for _, field, spec, _ in Formatter().parse(self.text) if field is not None]
        return [_text(figure, spec or "") for figure, spec in zip(self.figures, specs, strict=True)]

    def find(self, page: str) -> list[re.Match[str]]:
        """Return the places of `page` that read like this, with a group for each figure."""
        pattern = ""
        for literal, field, _, _ in Formatter().parse(self.text):
            pattern += r"\s+".join(map(re.escape, re.split(r"\s+", literal)))
            pattern += _FIGURE if field is not None else ""
        return list(re.finditer(pattern, page))


def said(text: str, *figures: Figure, holds: bool = True) -> Said:
    """Return a piece with its figures."""
    return Said(text, figures, holds)


def made(name: str, page: str, pieces: Iterable[Said]) -> str:
    """Return the text of a page with its figures put in anew.

    Raises
    ------
    ValueError
        A piece is not on the page, or more than once, or its words no longer hold, or a figure is
        negative, so that they cannot. All such pieces are named.
    """
    wrong = []
    for piece in pieces:
        found = piece.find(page)
        if len(found) != 1:
            wrong.append(f"{name}: {len(found)} times on the page, expected once: {piece.text}")
            continue
        figures = piece.written()
        if not piece.holds or not all(re.fullmatch(_FIGURE, figure) for figure in figures):
            wrong.append(f"{name}: the words are no longer true: {piece.text} {figures}")
            continue
        for group, figure in reversed(list(enumerate(figures, 1))):
            page = page[: found[0].start(group)] + figure + page[found[0].end(group) :]
    if wrong:
        raise ValueError("figures: " + "\n".join(wrong))
    return page


def _text(figure: Figure, spec: str) -> str:
    if isinstance(figure, str):
        return figure
    return format(figure, spec) if spec else three_digits(figure)


@dataclass(frozen=True)
class Bench:
    """What a run has measured of one benchmark."""

    op: str
    file: str = "nvidia-h200"

    def row(self, case: str, impl: str) -> dict[str, float]:
        """Return a row as the JSON has it; what is not there is an error that names it."""
        found = [
            row
            for row in read(self.file)["benchmarks"][self.op]["rows"]
            if row["case"] == case and row["impl"] == impl
        ]
        if len(found) != 1:
            raise ValueError(f"figures: {self.file}: {self.op}: {len(found)} x {case!r}, {impl!r}")
        return found[0]

    def us(self, case: str, impl: str = "jitkern") -> float:
        return self.row(case, impl)["median_us"]

    def gb_s(self, case: str, impl: str = "jitkern") -> float:
        return self.row(case, impl)["gb_s"]

    def host_us(self, case: str, impl: str = "jitkern") -> float:
        return self.row(case, impl)["host_us"]

    def time(self, case: str, impl: str, of: str) -> float:
        """Return the time of `impl`, of the time of another one; below 1 is faster."""
        return self.us(case, impl) / self.us(case, of)

    def each(self, cases: Iterable[str], *impls: str) -> list[float]:
        """Return the times of some implementations in some cases."""
        return [self.us(case, impl) for case in cases for impl in impls]

    def date(self) -> str:
        return read(self.file)["benchmarks"][self.op]["date"][:10]


def goal(figure: str, key: str = "got", file: str = "nvidia-h200") -> float:
    """Return what a run got of a goal, or with ``wanted`` what it should be."""
    (found,) = [goal for goal in read(file)["goals"] if goal["figure"] == figure]
    return float(re.sub(r"^[<>]= ", "", found[key]).split()[0])


def span(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the greatest value."""
    known = list(values)
    return min(known), max(known)
