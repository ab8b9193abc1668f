"""Baselines: what is slower, what stops a run, files that cannot be used, and what is printed."""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from guard import HALF, IDENTITY, KIND, MACHINE, baseline_of, outcomes, result_of, row_of
from hypothesis import given
from hypothesis import strategies as st

from jitkern.bench import baseline, compare, output, report
from jitkern.bench.baseline import Baseline, BaselineError, Figure
from jitkern.bench.case import Row

# ---------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("ratio_min", "ratio_median", "outcome"),
    [
        (1.0, 1.0, "same"),
        (1.09, 1.09, "same"),
        (1.3, 1.3, "slower"),
        (1.3, 1.05, "same"),  # one slow phase of a neighbour
        (1.01, 1.3, "same"),
        (0.7, 0.7, "faster"),
        (0.7, 1.0, "same"),
    ],
)
def test_a_time_is_slower_in_both_ratios_or_not_at_all(
    ratio_min: float, ratio_median: float, outcome: str
) -> None:
    found = baseline_of(**HALF)
    assert outcomes(found, result_of(row_of(ratio_min, ratio_median))) == [("time", outcome)]


def test_what_strays_far_gates_nothing() -> None:
    found = baseline_of(ratio_min=(0.9, 1.0, 1.6), ratio_median=(0.9, 1.0, 1.7))
    (verdict,) = baseline.compare(found, result_of(row_of(3.0, 3.0)))
    assert verdict.outcome == "slower"
    assert not verdict.gates
    assert not verdict.fails("all")


@given(st.floats(1.0, 1.5), st.floats(1.0, 1.5))
def test_the_runs_of_a_baseline_are_never_slower_than_it(one: float, other: float) -> None:
    results = [result_of(row_of(a, b, 1000 * a)) for a, b in ((1.0, 1.0), (one, other))]
    made = baseline.made_of(results)
    for result in results:
        assert {outcome for _, outcome in outcomes(made, result)} <= {"same", "faster"}


@pytest.mark.parametrize(
    ("now", "outcome"),
    [
        (20_680, "same"),
        (21_073, "same"),  # on another machine of the kind
        (21_450, "slower"),  # one more check by a function of Python
        (22_541, "slower"),  # 9 %
        (18_000, "faster"),
    ],
)
def test_a_count_is_slower_by_itself(now: float, outcome: str) -> None:
    found = baseline_of(**HALF, instructions=(20_228.0, 20_680.0, 20_707.0))
    result = result_of(row_of(instructions=now))
    assert outcomes(found, result) == [("time", "same"), ("count", outcome)]


@pytest.mark.parametrize(
    ("measure", "outcome", "fails"),
    [
        ("time", "slower", {"all"}),
        ("count", "slower", {"all", "counts"}),
        ("time", "missing", {"all"}),
        ("count", "missing", {"all", "counts"}),
        ("time", "broken", {"all", "counts", "none"}),
        ("time", "faster", set()),
        ("time", "new", set()),
        ("time", "left out", set()),
        ("count", "not compared", set()),
    ],
)
def test_what_each_gate_stops_for(measure: Any, outcome: Any, fails: set[str]) -> None:
    verdict = baseline.Verdict("store: call", measure, outcome)
    gates: tuple[baseline.Gate, ...] = ("all", "counts", "none")
    assert {gate for gate in gates if verdict.fails(gate)} == fails


def test_missing_new_broken_and_left_out() -> None:
    found = Baseline(KIND, {"store: gone": Figure("no-op", **HALF)}, IDENTITY)
    left_out = Row("process", "compile", "jitkern", "ours", note="left out: no NVRTC")
    broken = Row("index", "call", "jitkern", "ours", error="OSError: no")
    found_outcomes = {
        verdict.key: verdict.outcome
        for verdict in baseline.compare(found, result_of(row_of(), broken, left_out))
    }
    assert found_outcomes == {
        "store: gone": "missing",
        "store: call": "new",
        "index: call": "broken",
        "process: compile": "left out",
    }
    only = baseline.compare(found, result_of(row_of()), wanted=lambda key: "call" in key)
    assert [verdict.key for verdict in only] == ["store: call"]


def test_a_count_that_is_not_there_says_why() -> None:
    """Left out as its time is, or missing with what counting said; that alone stops a run."""
    figure = Figure("no-op", **HALF, instructions=(9.0, 9.0, 9.0))
    figures = dict.fromkeys(("process: load", "store: call"), figure)
    left_out = Row("process", "load", "jitkern", "ours", note="left out: no NVRTC")
    result = result_of(left_out, replace(row_of(), instructions=None))
    result["counts"]["note"] = "OSError: not counted"
    found = baseline.compare(Baseline(KIND, figures, IDENTITY), result)
    assert [(v.key, v.outcome, v.reason) for v in found if v.measure == "count"] == [
        ("process: load", "left out", "left out: no NVRTC"),
        ("store: call", "missing", "OSError: not counted"),
    ]
    assert [v.key for v in found if v.fails("counts")] == ["store: call"]


def test_another_kind_or_another_compiler_is_not_compared() -> None:
    spans = {**HALF, "instructions": (999.0, 1000.0, 1001.0)}
    slow = row_of(9.0, 9.0, 9000.0)
    other_kind = baseline_of("other-cpu-2-cores", **spans)
    assert outcomes(other_kind, result_of(slow)) == [("time", "not compared"), ("count", "slower")]
    other_python = result_of(slow, identity={**IDENTITY, "python": "3.13.0"})
    assert outcomes(baseline_of(**spans), other_python) == [
        ("time", "slower"),
        ("count", "not compared"),
    ]
    not_counted = result_of(row_of(), identity={})
    assert outcomes(baseline_of(**spans), not_counted) == [("time", "same")]


# ------------------------------------------------------------------------------------------- files


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    results = [result_of(row_of(1.0, 1.5, 100)), result_of(row_of(2.0, 2.5, 104), beside=2)]
    made = baseline.made_of(results)
    baseline.write(tmp_path / "new" / "b.json", made)
    back = baseline.read(tmp_path / "new" / "b.json")
    assert back.figures == made.figures
    assert back.runs == {"quiet": 1, "beside 2 busy processes": 1}
    assert back.counted_by == IDENTITY
    assert made.figures["store: call"].instructions == (100, 102, 104)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such baseline; to make one: jitkern bench --ci --baseline"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a baseline: it has no 'figures'"),
        ('{"schema": 99, "figures": {}}', "schema 99, this jitkern reads 1"),
        ('{"schema": 1, "figures": {}}', "damaged: KeyError"),
        ('{"schema": 1, "figures": 5, "kind": "x"}', "damaged: AttributeError"),
        ('{"schema": 1, "figures": {"a": 5}, "kind": "x"}', "damaged"),
        ('{"schema":1,"figures":{"a":{"ratio_min":[3,2,1]}}}', "expected lowest, middle, highest"),
        ('{"schema":1,"figures":{"a":{"ratio_min":["x",2,1]}}}', "damaged: ValueError"),
    ],
)
def test_a_bad_baseline_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "b.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BaselineError) as raised:
        baseline.read(file)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_baseline_of_another_kind_of_machine(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    baseline.write(file, baseline_of("other-cpu-2-cores", **HALF))
    with pytest.raises(BaselineError, match="baseline of other-cpu-2-cores, this machine is some"):
        baseline.find(file, KIND, IDENTITY)


def test_some_figures_are_renewed(tmp_path: Path) -> None:
    old = baseline_of(**HALF)
    (name,) = old.figures
    figure = old.figures[name]
    old = replace(old, figures={name: figure, "swap: gone": figure, "store: as it was": figure})
    new = replace(figure, ratio_min=(2.0, 2.0, 2.0))
    made = replace(old, figures={name: new, "swap: new": figure}, runs={"quiet": 1})
    found = baseline.renewed(old, made, [name, "swap"])
    expected = {name: new, "store: as it was": figure, "swap: new": figure}
    assert (found.figures, found.runs) == (expected, old.runs)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"kind": "other"}, f"baseline of {KIND}, this machine is other"),
        ({"counted_by": {}}, "its instructions are counted; renew all of it, without --only"),
        (
            {"counted_by": {**IDENTITY, "python": "3.13.0"}},
            "instructions are not compared: python is 3.13.0, in the baseline 3.12.1; renew it "
            "with --update, without --only",
        ),
    ],
)
def test_figures_of_two_machines_are_no_baseline(made: dict[str, Any], message: str) -> None:
    old = baseline_of(**HALF)
    with pytest.raises(BaselineError) as raised:
        baseline.renewed(old, replace(old, **made), ["store"])
    assert str(raised.value) == f"{old.path}: {message}"


def test_a_directory_of_baselines(tmp_path: Path) -> None:
    found, note = baseline.find(tmp_path, KIND, IDENTITY)
    assert found is None
    assert f"no baseline of {KIND}" in note
    assert "--update" in note

    baseline.write(tmp_path / "other.json", baseline_of("other", **HALF))
    found, note = baseline.find(tmp_path, KIND, IDENTITY)
    assert found is not None
    assert found.kind == "other"
    assert "only instructions are compared, with other.json" in note
    assert baseline.find(tmp_path, KIND, {})[0] is None

    baseline.write(tmp_path / f"{KIND}.json", baseline_of(**HALF))
    found, note = baseline.find(tmp_path, KIND, IDENTITY)
    assert found is not None
    assert (found.kind, note) == (KIND, "")
    _, note = baseline.find(tmp_path, KIND, {**IDENTITY, "python": "3.13.0"})
    assert "instructions are not compared: python is 3.13.0, in the baseline 3.12.1" in note


def test_a_baseline_is_made_of_one_machine_and_whole_runs() -> None:
    other = {**result_of(row_of()), "machine": {**MACHINE, "name": "Other CPU"}}
    with pytest.raises(BaselineError, match="several kinds of machine"):
        baseline.made_of([result_of(row_of()), other])
    with pytest.raises(BaselineError, match="counted by different software"):
        other_counts = result_of(row_of(), identity={"python": "3.13"})
        baseline.made_of([result_of(row_of()), other_counts])
    uncounted = result_of(row_of(), identity={})
    assert baseline.made_of([uncounted, result_of(row_of(instructions=5))]).counted_by == IDENTITY
    with pytest.raises(BaselineError, match="store: call: broken, no baseline is made of it: OSE"):
        baseline.made_of([result_of(row_of(error="OSError: no"))])


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_baseline_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BaselineError, match=r"b\.json: cannot be written: Permission denied"):
        baseline.write(tmp_path / "b.json", baseline_of(**HALF))


def test_a_baseline_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BaselineError, match="cannot be written: "):
        baseline.write(tmp_path / "file" / "b.json", baseline_of(**HALF))


# ---------------------------------------------------------------------------------- what is printed


def verdicts() -> tuple[list[baseline.Verdict], report.Payload]:
    broken = Row("index", "a|b", "jitkern", "ours", error="OSError: no")
    result = result_of(row_of(2.0, 2.0, 1000.0), broken)
    found = baseline_of(**HALF, instructions=(999.0, 1000.0, 1001.0))
    return baseline.compare(found, result), result


def test_the_markdown_shows_what_moved_first() -> None:
    found, result = verdicts()
    text = output.markdown(found, result, "all", ["a note"])
    before, _, folded = text.partition("<details>")
    assert "| store: call | time / no-op | 1.000 | 2.000 | +100.0% | slower |  |" in before
    assert "index: a\\|b" in before
    assert "a note" in before
    assert "| store: call | count | 1,000 | 1,000 | +0.0% | same |  |" in folded
    assert "2 of them end this run with status 1" in text


def test_the_junit_report_has_a_test_for_each_figure() -> None:
    found, _ = verdicts()
    suite = ElementTree.fromstring(output.junit(found, "all"))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    names = [(test.get("classname"), test.get("name")) for test in suite]
    assert names[0] == ("bench.store", "call, time")
    tolerant = ElementTree.fromstring(output.junit(found, "counts"))
    assert (tolerant.get("failures"), tolerant.get("errors")) == ("0", "1")


def test_the_junit_report_of_a_coloured_error_can_be_read() -> None:
    found = baseline.Verdict("a: b", "time", "broken", reason="Error: \x1b[31mno\x00 <é>")
    (test,) = ElementTree.fromstring(output.junit([found], "all"))
    assert test[0].get("message") == "broken: Error: ?[31mno? <é>"


def test_two_results_side_by_side() -> None:
    a = result_of(row_of(), Row("h2d", "x", "peer", "peer", median_us=10.0, iqr_us=0.1))
    b = result_of(row_of(2.0, 2.0), Row("h2d", "x", "peer", "peer", median_us=10.2, iqr_us=0.1))
    rows = list(compare.rows(a, b))
    assert rows[0] == (
        "store: call",
        "jitkern",
        "1.000 x no-op",
        "2.000 x no-op",
        "2.000",
        "slower",
    )
    assert rows[1] == ("h2d: x", "peer", "10.00 us", "10.20 us", "1.020", "~")
    assert compare.notes(a, b) == []
    other = {**b, "machine": {**MACHINE, "name": "Other"}}
    assert "only ratios mean something" in compare.notes(a, other)[0]


def test_a_noisy_change_is_no_change() -> None:
    a, b = (row_of(median_us=us, iqr_us=3.0) for us in (10.0, 12.0))
    a.ratio_median = b.ratio_median = None
    ((*_, verdict),) = compare.rows(result_of(a), result_of(b))
    assert verdict == "~"


# ------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "bench/baselines").glob("*")))
def test_the_kept_baselines_would_notice_nine_percent_more(file: Path) -> None:
    found = baseline.read(file)
    counted = [figure for figure in found.figures.values() if figure.instructions]
    assert all(baseline.count_tolerance(figure) < 0.09 for figure in counted)
    assert f"{found.kind}.json" == file.name
    assert sum(found.runs.values()) >= 10
    gating = [f for f in found.figures.values() if baseline.time_tolerance(f) <= 1.0]
    assert len(gating) > len(found.figures) / 2
    ratios = [figure.ratio_median for figure in found.figures.values() if figure.ratio_median]
    assert statistics.median(ratio[1] for ratio in ratios) > 0


def test_the_old_results_can_be_read() -> None:
    for file in (Path(__file__).parents[1] / "bench" / "results").glob("*-*.json"):
        if file.name != "ci-guard.json":
            assert report.rows_of(report.read(file))
