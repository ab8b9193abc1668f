"""Two results of any benchmark side by side: what moved, where that is more than their spread."""

from __future__ import annotations

from collections.abc import Iterator

from jitkern.bench import report
from jitkern.bench.case import Row

COLUMNS = ("case", "implementation", ">A", ">B", ">B / A", "")
LEAST_CHANGE = 0.05


def rows(a: report.Payload, b: report.Payload) -> Iterator[tuple[str, ...]]:
    """Yield a line for each row of either result.

    Rows with a yardstick are compared as multiples of it, others by their median time. ``~`` stands
    where the change is less than 5 % or than the two quartile distances together.
    """
    before = {(row.key, row.impl): row for row in report.rows_of(a)}
    after = {(row.key, row.impl): row for row in report.rows_of(b)}
    for key in [*before, *(key for key in after if key not in before)]:
        yield (*key, *_change(before.get(key), after.get(key)))


def notes(a: report.Payload, b: report.Payload) -> list[str]:
    """Say what the two differ in that makes their times hard to compare."""
    kinds = [report.kind_of(result["machine"]) for result in (a, b)]
    if kinds[0] != kinds[1]:
        return [f"A is of {kinds[0]}, B of {kinds[1]}: only ratios mean something"]
    versions = [result["machine"].get("versions", {}) for result in (a, b)]
    names = dict.fromkeys([*versions[0], *versions[1]])
    differ = [n for n in names if versions[0].get(n) != versions[1].get(n)]
    return [f"{n}: {versions[0].get(n)} in A, {versions[1].get(n)} in B" for n in differ]


def _change(a: Row | None, b: Row | None) -> tuple[str, str, str, str]:
    if a is None or b is None:
        return ("", "", "", "only in B" if a is None else "only in A")
    if a.error or b.error:
        return ("", "", "", f"A: {a.error or 'measured'}; B: {b.error or 'measured'}")
    if a.ratio_median and b.ratio_median:
        one, two = (f"{row.ratio_median:.3f} x {row.against}" for row in (a, b))
        return (one, two, *_verdict(a.ratio_median, b.ratio_median, _spread(a) + _spread(b)))
    if a.median_us and b.median_us:
        one, two = (report.time_text(row.median_us) for row in (a, b))
        return (one, two, *_verdict(a.median_us, b.median_us, _spread(a) + _spread(b)))
    return ("", "", "", "not measured in both")


def _spread(row: Row) -> float:
    return row.iqr_us / row.median_us if row.iqr_us and row.median_us else 0.0


def _verdict(a: float, b: float, spread: float) -> tuple[str, str]:
    ratio = b / a
    if abs(ratio - 1) < max(LEAST_CHANGE, spread):
        return f"{ratio:.3f}", "~"
    return f"{ratio:.3f}", "slower" if ratio > 1 else "faster"
