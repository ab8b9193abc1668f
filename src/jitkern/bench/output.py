"""What a run of the guard looks like: a table, a Markdown summary, JUnit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from jitkern.bench import report
from jitkern.bench.baseline import Gate, Verdict

# Of what an error says, such as the colours of a terminal.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

TABLE_COLUMNS = ("figure", "of", ">then", ">now", ">change", "verdict", "")


def cells(verdicts: Sequence[Verdict], result: report.Payload) -> list[tuple[str, ...]]:
    """Return the table's rows: times in multiples of their yardstick, counts in instructions."""
    against = {row.key: row.against for row in report.rows_of(result)}
    return [
        (
            verdict.key,
            f"time / {against.get(verdict.key, '?')}" if verdict.measure == "time" else "count",
            _number(verdict.then, verdict.measure),
            _number(verdict.now, verdict.measure),
            "" if verdict.change is None else f"{verdict.change:+.1%}",
            _outcome(verdict),
            verdict.reason,
        )
        for verdict in verdicts
    ]


def figures(result: report.Payload) -> list[tuple[str, ...]]:
    """Return the table's rows where there is no baseline."""
    rows: list[tuple[str, ...]] = []
    for row in report.rows_of(result):
        time = "" if row.ratio_median is None else f"{row.ratio_median:.3f} x {row.against}"
        us = "" if row.median_us is None else report.time_text(row.median_us)
        count = "" if row.instructions is None else f"{row.instructions:,.0f}"
        rows.append((row.key, us, time, count, row.error or row.note))
    return rows


FIGURE_COLUMNS = ("figure", ">median", ">time", ">instructions", "")


def summary(verdicts: Sequence[Verdict], gate: Gate) -> str:
    """Say in one line how many figures there are of each outcome."""
    outcomes = [verdict.outcome for verdict in verdicts]
    parts = [f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)]
    failed = sum(verdict.fails(gate) for verdict in verdicts)
    ending = f"{failed} of them end this run with status 1" if failed else "nothing to stop for"
    return f"{len(verdicts)} figures: {', '.join(parts)}; {ending}"


def markdown(
    verdicts: Sequence[Verdict], result: report.Payload, gate: Gate, notes: Iterable[str]
) -> str:
    """Return a summary for a pull request: what moved first, the rest folded."""
    moved = [v for v in verdicts if v.outcome not in ("same", "left out", "not compared")]
    rest = [v for v in verdicts if v not in moved]
    lines = [
        "### jitkern bench",
        "",
        report.machine_line(result["machine"]),
        "",
        summary(verdicts, gate) + ".",
    ]
    lines += [f"\n{note}" for note in notes]
    if moved:
        lines += ["", *_markdown_table(moved, result)]
    if rest:
        title = f"<summary>{len(rest)} others</summary>"
        lines += ["", f"<details>{title}", "", *_markdown_table(rest, result), "", "</details>"]
    return "\n".join(lines) + "\n"


def _markdown_table(verdicts: Sequence[Verdict], result: report.Payload) -> list[str]:
    align = ["--:" if name.startswith(">") else "---" for name in TABLE_COLUMNS]
    head = [name.removeprefix(">") for name in TABLE_COLUMNS]
    body = [[cell.replace("|", "\\|") for cell in row] for row in cells(verdicts, result)]
    return ["| " + " | ".join(row) + " |" for row in (head, align, *body)]


def junit(verdicts: Sequence[Verdict], gate: Gate) -> str:
    """Return a JUnit report: a figure is a test; what gates nothing cannot fail."""
    suite = ElementTree.Element("testsuite", name="jitkern bench", tests=str(len(verdicts)))
    counted = {"failures": 0, "errors": 0, "skipped": 0}
    for verdict in verdicts:
        op, _, name = verdict.key.partition(": ")
        test = ElementTree.SubElement(
            suite, "testcase", classname=f"bench.{op}", name=f"{name}, {verdict.measure}"
        )
        text = f"{verdict.outcome}: {verdict.reason}" if verdict.reason else verdict.outcome
        if verdict.change is not None:
            text += f" {verdict.change:+.1%}"
        text = _NOT_IN_XML.sub("?", text)
        if verdict.outcome == "broken":
            counted["errors"] += 1
            ElementTree.SubElement(test, "error", message=text)
        elif verdict.fails(gate):
            counted["failures"] += 1
            ElementTree.SubElement(test, "failure", message=text)
        elif verdict.outcome in ("left out", "not compared", "missing"):
            counted["skipped"] += 1
            ElementTree.SubElement(test, "skipped", message=text)
    for name, number in counted.items():
        suite.set(name, str(number))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _outcome(verdict: Verdict) -> str:
    if verdict.outcome == "slower" and not verdict.gates:
        return "strays"
    return verdict.outcome


def _number(value: float | None, measure: str) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if measure == "time" else f"{value:,.0f}"
