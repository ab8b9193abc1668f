"""The guard of CI: pairs, cases, baselines and verdicts, and what it says to each bad input."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from needs import needs_nvrtc
from stems import ON_GPU

from jitkern.bench import Context, baseline, case, ci, compare, counts, output, pairs, report
from jitkern.bench.baseline import Baseline, BaselineError, Figure
from jitkern.bench.case import CaseError, Row, cases_of
from jitkern.bench.cases import builtin_cases
from jitkern.bench.client import Worker
from jitkern.bench.fresh import FIGURES, FreshProcesses
from jitkern.cli import main
from jitkern.env import settings
from jitkern.errors import JitkernError

CPU = Context("cpu")
IDENTITY = {"counted by": "callgrind", "python": "3.12.1"}
MACHINE = {"device": "cpu", "name": "Some CPU", "cpu_cores": 2, "python": "3", "versions": {}}
KIND = "some-cpu-2-cores"
HALF = {"ratio_min": (0.99, 1.0, 1.02), "ratio_median": (0.97, 1.0, 1.05)}

GOOD = """
import torch
from jitkern.bench import case

@case("copy", against="clone", bytes_moved=128)
def copy(ctx):
    x = torch.arange(64, device=ctx.device)
    y = torch.empty_like(x)
    return lambda: y.copy_(x), lambda: x.clone()
"""
BROKEN = """
from jitkern.bench import case

@case("broken")
def broken(ctx):
    raise OSError("no such kernel")
"""


def result_of(*rows: Row, identity: dict[str, str] | None = None, **more: Any) -> report.Payload:
    made = report.payload(MACHINE, rows, quick=False)
    found = IDENTITY if identity is None else identity
    return {**made, "counts": {"source": "", "identity": found, "note": ""}, "beside": 0, **more}


def row_of(
    ratio_min: float = 1.0,
    ratio_median: float = 1.0,
    instructions: float | None = None,
    **more: Any,
) -> Row:
    row = Row("store", "call", "jitkern", "ours", against="no-op", median_us=2.0, iqr_us=0.1)
    row.ratio_min, row.ratio_median, row.instructions = ratio_min, ratio_median, instructions
    for name, value in more.items():
        setattr(row, name, value)
    return row


def baseline_of(kind: str = KIND, **spans: Any) -> Baseline:
    return Baseline(kind, {"store: call": Figure("no-op", **spans)}, IDENTITY)


def outcomes(found: Baseline, result: report.Payload) -> list[tuple[str, str]]:
    return [(verdict.measure, verdict.outcome) for verdict in baseline.compare(found, result)]


def bench(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    status = main(["bench", *map(str, argv)])
    return status, *capsys.readouterr()


# ------------------------------------------------------------------------------------------- pairs


def test_samples_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def sampler(name: str, us: float) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return us

        return sample

    found = pairs.time_pairs(sampler("a", 3.0), sampler("b", 2.0), budget_s=0.0)
    assert "".join(order[:10]) == "ababbaabba"
    assert len(found.ours_us) == len(found.reference_us) == pairs.MIN_PAIRS
    assert found.ratio_min == found.ratio_median == 1.5


@given(
    st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=30),
    st.floats(1.1, 10.0),
)
def test_ratios_scale_with_the_slowdown(samples: list[tuple[float, float]], factor: float) -> None:
    ours, reference = zip(*samples, strict=True)
    before = pairs.Pairs(ours, reference)
    after = pairs.Pairs(tuple(us * factor for us in ours), reference)
    assert after.ratio_min == pytest.approx(before.ratio_min * factor)
    assert after.ratio_median == pytest.approx(before.ratio_median * factor)


def test_garbage_is_not_collected_while_pairs_are_timed() -> None:
    import gc

    seen: list[bool] = []

    def sample() -> float:
        seen.append(gc.isenabled())
        return 1.0

    pairs.time_pairs(sample, sample, budget_s=0.0)
    assert not any(seen)
    assert gc.isenabled()


def test_a_sample_is_short_and_holds_several_calls() -> None:
    calls: list[int] = []
    sample = pairs.host_sampler(CPU, lambda: calls.append(1))
    calls.clear()
    assert sample() > 0
    assert len(calls) > 100  # an append takes 0.05 us, a sample 250


# ------------------------------------------------------------------------------------------- cases


def test_every_builtin_case_computes_the_right_thing() -> None:
    found = list(builtin_cases(CPU))
    assert len({one.key for one in found}) == len(found)
    copies = [one for one in found if one.outputs(one.make(0))]
    assert len(copies) >= 9
    for one in copies:
        buffers = one.make(0)
        ci.check(CPU, one, one.ours(), one.ours().build(), buffers, ci.expected_of(one, buffers))


def test_every_op_has_a_case_for_its_checks() -> None:
    keys = {one.key for one in builtin_cases(CPU)}
    for op in ON_GPU:
        assert {f"{op}: call, checks only", f"{op}: call, 1 row"} <= keys


def test_cases_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bench_mine.py"
    file.write_text(GOOD + "\n@case('second')\ndef second(ctx):\n    return len, len\n")
    found = cases_of(file, CPU)
    assert [one.key for one in found] == ["bench_mine: copy", "bench_mine: second"]
    assert found[0].reference_impl().name == "clone"


def test_a_function_may_return_cases(tmp_path: Path) -> None:
    file = tmp_path / "bench_mine.py"
    file.write_text(
        "from jitkern.bench import Case, Impl\n"
        "def cases(ctx):\n"
        "    for n in (1, 2):\n"
        "        impls = [Impl('a', 'ours', lambda: print), Impl('b', 'peer', lambda: print),\n"
        "                 Impl('c', 'floor', lambda: print)]\n"
        "        yield Case('mine', f'{n} rows', impls, yardstick='c')\n"
    )
    found = cases_of(file, CPU)
    assert [one.key for one in found] == ["mine: 1 rows", "mine: 2 rows"]
    assert found[0].reference_impl().name == "c"


def test_a_case_of_another_device_is_left_out() -> None:
    made = case("x", device="cuda")(lambda ctx: (int, int))
    assert made.cases(CPU) == []
    assert len(made.cases(Context("cuda"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file of cases"),
        ("x = 1\n", "no function under @jitkern.bench.case and no cases(ctx)"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError: No module named"),
        ("def f(:\n", "SyntaxError"),
        (
            "def cases(ctx):\n    return [1]\n",
            "cases(): 1, expected Case objects with two Impl each",
        ),
        ("def cases(ctx):\n    raise ValueError('bad size')\n", "ValueError: bad size"),
    ],
)
def test_a_bad_file_of_cases_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bench_mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CaseError) as raised:
        cases_of(file, CPU)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_case_has_to_return_two_callables() -> None:
    (made,) = case("x")(lambda ctx: 5).cases(CPU)  # type: ignore[arg-type,return-value]
    with pytest.raises(CaseError, match="x: returned 5, expected two callables"):
        made.ours().build()


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
    ("now", "outcome"), [(1000, "same"), (1009, "same"), (1015, "slower"), (900, "faster")]
)
def test_a_count_is_slower_by_itself(now: float, outcome: str) -> None:
    found = baseline_of(**HALF, instructions=(999.0, 1000.0, 1001.0))
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


# ------------------------------------------------------------------------------------- the command


def test_what_looks_slower_is_timed_again() -> None:
    class Fake:
        asked: list[list[str]] = []  # noqa: RUF012

        def again(self, keys: list[str]) -> list[Row]:
            self.asked.append(list(keys))
            return [row_of(1.01, 1.01)]

    fake: Any = Fake()
    found = baseline_of(**HALF)

    def suspects(result: report.Payload) -> list[str]:
        return [v.key for v in baseline.compare(found, result) if v.outcome == "slower"]

    result = ci.confirmed(fake, result_of(row_of(2.0, 2.0, 7.0)), suspects)
    assert fake.asked == [["store: call"]]
    (row,) = report.rows_of(result)
    assert (row.ratio_median, row.instructions) == (1.01, 7.0)
    assert result["counts"]["identity"] == IDENTITY


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes half a minute; the tests that are not about it go without."""
    monkeypatch.setattr(counts, "source_here", lambda: ("", "switched off for this test"))


@pytest.mark.usefixtures("uncounted")
def test_a_broken_case_fails_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BROKEN)
    files = [part for name in ("bad", "good") for part in ("--cases", tmp_path / f"{name}.py")]
    more = ("--cases", tmp_path / "none.py", "--device", "cpu", "--json", tmp_path / "r.json")
    status, out, err = bench(capsys, "--ci", *files, *more)
    assert status == 1
    assert "OSError: no such kernel" in out
    assert "no such file of cases" in out
    assert "good: copy" in out
    assert "note: instructions: switched off for this test" in out
    assert "1/3 good: copy" in err  # plain lines where there is no terminal
    rows = {row.key: row for row in report.rows_of(report.read(tmp_path / "r.json"))}
    assert (rows["good: copy"].ratio_median or 0) > 0
    assert (rows["good: copy"].gb_s or 0) > 0


@pytest.mark.usefixtures("uncounted")
def test_a_baseline_is_made_and_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.setenv("PATH", "")  # nothing to count with, in the runs' processes too
    guard = ("--ci", "--device", "cpu", "--cases", tmp_path / "good.py", "--baseline", tmp_path)
    status, out, _ = bench(capsys, *guard, "--update", "--runs", "2")
    assert (status, "1 figures of 2 runs" in out) == (0, True)
    made = baseline.read(next(tmp_path.glob("*-cores.json")))
    assert made.runs == {"quiet": 2}

    summary, reports = tmp_path / "summary.md", ("--junit", tmp_path / "j.xml")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    settings.cache_clear()
    status, out, _ = bench(capsys, *guard, *reports, "--gate", "none")
    assert status == 0
    assert "time / clone" in out
    assert "### jitkern bench" in summary.read_text()
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("tests") == "1"
    settings.cache_clear()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ci", "--update"], "--update: needs --baseline"),
        (["--ci", "--runs", "3"], "--runs, --beside: only with --update"),
        (["--ci", "--baseline", "/nowhere/b.json"], "/nowhere/b.json: no such baseline"),
        (["--ci", "--compare", "a", "b"], "not allowed with"),
        (["--ci", "--runs", "0"], "expected 1 or more"),
    ],
)
def test_a_wrong_command_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    status, _, err = bench(capsys, *argv)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.json"
    report.save(good, result_of(row_of()))
    for name, text, message in (
        ("none", None, "cannot be read: No such file"),
        ("text", "hello", "not JSON"),
        ("other", "{}", "not a result of jitkern bench"),
        ("new", '{"schema": 7, "benchmarks": {}}', "schema 7, this jitkern reads 1"),
    ):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        status, _, err = bench(capsys, "--compare", good, file)
        assert (status, message in err) == (1, True), err
    assert bench(capsys, "--compare", good, good)[0] == 0


def test_an_output_in_the_place_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = bench(capsys, "--ci", "--json", tmp_path / "file" / "r.json")
    assert status == 1
    assert "cannot be written" in err


# ------------------------------------------------------------------------------- fresh processes


@needs_nvrtc
def test_what_a_fresh_process_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitkern.bench import fresh

    monkeypatch.setattr(fresh, "SAMPLES", dict.fromkeys(fresh.SAMPLES, 2))
    with Worker("cpu", "9.0") as worker:
        found = FreshProcesses(CPU, worker)
        rows = list(found.rows(lambda _: True))
        more = list(found.rows(lambda key: "host module" in key))
    assert [row.case for row in rows] == [figure.case for figure in FIGURES]
    assert [row.error for row in rows] == [""] * len(FIGURES)
    assert all((row.ratio_median or 0) > 0 for row in rows)
    by_case = {row.case: row.median_us or 0.0 for row in rows}
    assert by_case["first call"] > by_case["load of the host module"]
    assert [row.case for row in more] == ["load of the host module"]


def test_without_a_compiler_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitkern.bench import fresh

    monkeypatch.setattr(fresh, "SAMPLES", dict.fromkeys(fresh.SAMPLES, 1))
    monkeypatch.setenv("JITKERN_NVRTC", "/nowhere/libnvrtc.so")
    with Worker("cpu", "9.0") as worker:
        rows = {row.case: row for row in FreshProcesses(CPU, worker).rows(lambda _: True)}
    assert rows["import of jitkern and tvm-ffi"].ratio_median
    assert "left out: " in rows["NVRTC compile, cold"].note
    assert rows["NVRTC compile, cold"].ratio_median is None
    assert "its kernel left out" in rows["first call"].note


def test_a_job_that_fails_is_an_error_and_the_worker_lives() -> None:
    with Worker("cpu", "9.0") as worker:
        with pytest.raises(JitkernError, match="nonsense: KeyError"):
            worker.ask("nonsense")
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(JitkernError, match="the worker process ended"):
            worker.ask("nonsense")


# ------------------------------------------------------------------------------------------ counts


def test_the_way_to_a_processors_counter() -> None:
    try:
        counter = counts.open_perf_counter(counts.SOFTWARE_TASK_CLOCK)
    except OSError as error:
        pytest.skip(f"no performance events here: {error}")
    before = int.from_bytes(os.read(counter, 8), "little")
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    ns = int.from_bytes(os.read(counter, 8), "little") - before
    os.close(counter)
    assert ns > 1e6
    with pytest.raises(OSError, match="perf_event_open"):
        counts.open_perf_counter((99, 0))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
@pytest.mark.skipif(not torch._C._valgrind_supported_platform(), reason="torch without its marks")
def test_a_count_does_not_vary_and_shows_more_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "source_here", lambda: ("callgrind", ""))
    text = "from jitkern.bench import case\n"
    for number, (name, loop) in enumerate((("a", 50), ("same as a", 50), ("a fifth more", 60))):
        text += f"""
@case({name!r})
def work_{number}(ctx):
    return (lambda: sum(i * i for i in range({loop}))), (lambda: None)
"""
    (tmp_path / "work.py").write_text(text)
    keys = ["work: a", "work: same as a", "work: a fifth more"]
    found = counts.count("cpu", "9.0", kernels=False, cases=[tmp_path / "work.py"], wanted=keys)
    assert found.note == ""
    a, same, more = (found.by_key[key] for key in keys)
    assert same == pytest.approx(a, rel=0.01)  # the first fills a cache of the interpreter
    assert 1.10 < more / a < 1.25
    assert found.identity["counted by"] == "callgrind"
    assert found.identity["valgrind"].startswith("valgrind-")


def test_no_counter_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no counter")

    monkeypatch.setattr(counts, "open_perf_counter", refuse)
    monkeypatch.setenv("PATH", "")
    source, reason = counts.source_here()
    assert source == ""
    assert "apt install valgrind" in reason
    found = counts.count("cpu", "9.0", kernels=False, cases=[], wanted=[])
    assert (found.by_key, found.note) == ({}, reason)


# ------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "bench/baselines").glob("*")))
def test_the_kept_baselines_can_be_read(file: Path) -> None:
    found = baseline.read(file)
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


@pytest.mark.cuda
def test_every_builtin_case_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = bench(capsys, "--ci", "--json", tmp_path / "r.json")
    assert status == 0, out
    rows = report.rows_of(report.read(tmp_path / "r.json"))
    assert not [row for row in rows if row.error]
    keys = [row.key for row in rows]
    assert "launch: launch of a user's kernel" in keys
