"""`jitkern bench --ci`: cases, counts, baselines, what is slower, and the command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import torch
from proved import unproved
from tiny import Use

from jitkern.bench import Context, Row, baseline, case, ci, counts, report
from jitkern.bench.baseline import Baseline, BaselineError, Figure
from jitkern.bench.case import CaseError, cases_of
from jitkern.cli import main

ROOT = Path(__file__).resolve().parent.parent
CPU = Context("cpu")
IDENTITY = {"counted by": "callgrind", "python": "3.12.1"}
MACHINE = {"device": "cpu", "name": "Some CPU", "cpu_cores": 2, "python": "3", "versions": {}}
KIND = "some-cpu-2-cores"

GOOD = """
import torch
from jitkern.bench import case

@case("copy", against="clone", bytes_moved=128)
def copy(ctx):
    x = torch.arange(64, device=ctx.device)
    y = torch.empty_like(x)
    return lambda: y.copy_(x), lambda: x.clone()
"""


def result_of(*rows: Row, identity: dict[str, str] | None = None, note: str = "") -> Any:
    identity = IDENTITY if identity is None else identity
    made = report.payload(MACHINE, rows, quick=False)
    return {**made, "counts": {"identity": identity, "note": note}}


def row_of(instructions: float | None = 20_680, **more: Any) -> Row:
    how = {"against": "no-op", "ratio_median": 2.0, **more}
    return Row("store", "call", "jitkern", "ours", instructions=instructions, **how)


def baseline_of(instructions: float | None = 20_680, kind: str = KIND) -> Baseline:
    return Baseline(kind, {"store: call": Figure("no-op", 2.0, instructions)}, IDENTITY)


def test_cases_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bench_mine.py"
    file.write_text(GOOD + "\n@case('second')\ndef second(ctx):\n    return len, len\n")
    found = cases_of(file, CPU)
    assert [one.key for one in found] == ["bench_mine: copy", "bench_mine: second"]
    assert found[0].reference_impl().name == "clone"
    made = case("x", device="cuda")(lambda ctx: (int, int))
    assert (made.cases(CPU), len(made.cases(Context("cuda")))) == ([], 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("1 +", "SyntaxError"),
        ("x = 1\n", "no function under @jitkern.bench.case and no cases(ctx)"),
        ("def cases(ctx):\n    return [1]\n", "cases(): 1, expected Case objects with two Impl"),
        ("def cases(ctx):\n    raise ValueError('bad size')\n", "ValueError: bad size"),
    ],
)
def test_a_bad_file_of_cases_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bench_mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CaseError) as raised:
        cases_of(file, CPU)
    assert message in str(raised.value) and str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("now", "outcome"),
    [
        (21_073, "same"),  # on another machine of the kind
        (21_450, "slower"),  # one more check by a function of Python
        (19_000, "faster"),
    ],
)
def test_a_count_that_rose_by_more_than_machines_differ_by_fails(now: float, outcome: str) -> None:
    row = row_of(now, ratio_median=40.0)  # a time ends no run
    for kind in (KIND, "other-2-cores"):  # times of another machine are not compared
        (verdict,) = baseline.compare(baseline_of(kind=kind), result_of(row))
        assert (verdict.outcome, verdict.fails) == (outcome, outcome == "slower")
        assert (verdict.then.ratio is None) == (kind != KIND)


def test_verdicts_without_two_counts() -> None:
    figures = dict.fromkeys(("store: gone", "process: load"), Figure("no-op", 2.0, 9.0))
    left_out = Row("process", "load", "jitkern", "ours", note="left out: no NVRTC")
    broken = Row("index", "call", "jitkern", "ours", error="OSError: no")
    result = result_of(row_of(), broken, left_out)
    found = baseline.compare(Baseline(KIND, figures, IDENTITY), result)
    assert {verdict.key: (verdict.outcome, verdict.fails) for verdict in found} == {
        "store: gone": ("missing", True),
        "store: call": ("new", False),
        "index: call": ("broken", True),
        "process: load": ("not compared", False),
    }
    (verdict,) = baseline.compare(baseline_of(), result_of(row_of(None), note="OSError: no"))
    assert verdict.outcome == "missing"
    only = baseline.compare(Baseline(KIND, figures, IDENTITY), result, lambda key: "call" in key)
    assert "store: gone" not in [verdict.key for verdict in only]


def test_a_baseline_comes_back_and_none_is_made_of_unmeasured_figures(tmp_path: Path) -> None:
    file = tmp_path / "new" / "b.json"
    baseline.write(file, result_of(row_of(100)))
    assert baseline.read(file) == baseline_of(100)
    with pytest.raises(BaselineError, match="store: call: broken, no baseline is made of it: OSE"):
        baseline.write(tmp_path / "b.json", result_of(row_of(error="OSError: no")))
    with pytest.raises(BaselineError, match="instructions: counting failed"):
        baseline.write(tmp_path / "b.json", result_of(row_of(), note="counting failed: no"))
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such baseline; to make one: jitkern bench --ci --baseline"),
        ("[" * 100_000, "not a baseline (RecursionError: "),
        ('{"schema": 99, "figures": {}}', "schema 99, this jitkern reads 2); to make it anew: "),
        ('{"schema": 2, "figures": {}}', "not a baseline (KeyError: "),
        ('{"schema": 2, "figures": {"a": {"x": 1}}}', "unexpected keyword argument 'x'"),
    ],
)
def test_a_bad_baseline_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "b.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BaselineError) as raised:
        baseline.read(file)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_the_baseline_of_this_kind_of_machine_is_used(tmp_path: Path) -> None:
    found, note = baseline.find(tmp_path, KIND, IDENTITY)
    assert found is None and f"no baseline of {KIND}" in note

    other = tmp_path / "other.json"
    baseline.write(other, {**result_of(row_of()), "machine": {**MACHINE, "name": "Other"}})
    found, note = baseline.find(tmp_path, KIND, IDENTITY)
    assert found is not None and "only instructions are compared, with other.json" in note
    assert baseline.find(tmp_path, KIND, {})[0] is None
    with pytest.raises(BaselineError, match="baseline of other-2-cores, this machine is some-cpu"):
        baseline.find(other, KIND, IDENTITY)

    baseline.write(tmp_path / f"{KIND}.json", result_of(row_of()))
    found, note = baseline.find(tmp_path, KIND, IDENTITY)
    assert found is not None and (found.kind, note) == (KIND, "")
    _, note = baseline.find(tmp_path, KIND, {**IDENTITY, "python": "3.13.0"})
    assert "instructions are not compared: python is 3.13.0, in the baseline 3.12.1" in note


@pytest.mark.parametrize("file", sorted((ROOT / "bench/baselines").glob("*")), ids=str)
def test_the_kept_baselines_would_notice_nine_percent_more(file: Path) -> None:
    found = baseline.read(file)
    assert f"{found.kind}.json" == file.name
    counted = [figure.instructions for figure in found.figures.values() if figure.instructions]
    assert all(baseline.most_instructions(one) < 1.09 * one for one in counted)


MINE = """\
import torch
from jitkern import store_cache
def checked(*tensors):
    if tensors[3].dtype != torch.uint8 or not tensors[3].is_contiguous():
        raise TypeError('x')
    store_cache(*tensors)
"""
WORK = """\
import mine, torch
from functools import partial
from jitkern.bench import case
def add(name, call):
    caches, kv = torch.zeros(2, 64, 656).byte(), torch.zeros(2, 1, 656).byte()
    bound = partial(call, *caches, torch.zeros(1, dtype=torch.int32), *kv)
    globals()[name] = case(name)(lambda ctx: (bound, len))
add('a', mine.store_cache)
add('the same', mine.store_cache)
add('one more check', mine.checked)
"""


@unproved("counts", "src/jitkern/bench/*.py", "tests/test_bench_guard.py")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
@pytest.mark.skipif(not torch._C._valgrind_supported_platform(), reason="torch without its marks")
def test_a_count_does_not_vary_and_one_more_check_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)  # a module beside it, as where it is timed
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "bad.py").write_text("import nowhere_at_all\n")
    keys = ["work: a", "work: the same", "work: one more check"]
    files = [tmp_path / "work.py", tmp_path / "bad.py"]
    found = counts.count("9.0", files=files, wanted=keys, steps=False)
    assert "nowhere_at_all" in found.note  # nothing goes uncounted unsaid
    a, same, more = (found.by_key[key] for key in keys)
    assert same <= baseline.most_instructions(a)
    assert a <= baseline.most_instructions(same)
    assert more > baseline.most_instructions(max(a, same))
    assert found.identity["counted by"] == "callgrind"


@pytest.mark.parametrize(
    ("call_s", "calls"), [(0.0, counts.SHORT_CALLS), (1.5 * counts.LONG_CALL_S, counts.LONG_CALLS)]
)
def test_long_calls_are_counted_a_few_times(
    monkeypatch: pytest.MonkeyPatch, call_s: float, calls: int
) -> None:
    """Whatever clock their case was given: hundreds of them would take Callgrind minutes."""
    done: list[float] = []
    case = Mock(key="mine: long", clock="host", bytes_moved=0)
    case.make.return_value = call_s
    case.ours().build.return_value = done.append
    monkeypatch.setattr(counts, "time", Mock(perf_counter=lambda: sum(done)))
    counts._count_case(counter := Mock(), case)
    counter.count.assert_called_once_with("mine: long", ANY, calls)


def test_no_valgrind_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "apt install valgrind" in counts.why_not("cpu")
    assert "CUDA driver" in counts.why_not("cuda")


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command; its status, and what it wrote."""
    return lambda *argv: (main(["bench", *map(str, argv)]), *capsys.readouterr())


@pytest.fixture
def valgrind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where instructions can be counted."""
    monkeypatch.setattr(counts, "why_not", lambda _: "")
    monkeypatch.setattr(counts, "identity", lambda: IDENTITY)


def test_a_broken_case_fails_and_the_others_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "why_not", lambda _: "switched off for this test")
    monkeypatch.chdir(tmp_path)  # a long path would break the message into lines
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(GOOD.replace("x = ", "x = no_such_kernel + "))
    files = ["--cases", "bad.py", "--cases", "good.py", "--cases", "none.py"]
    status, out, err = bench("--ci", *files, "--device", "cpu", "--json", "r.json")
    assert status == 1
    assert "NameError: name 'no_such_kernel'" in out and "No such file or directory" in out
    assert "note: instructions: switched off for this test" in out
    assert "1/3 good: copy" in err  # plain lines where there is no terminal
    rows = {row.key: row for row in report.rows_of(report.read(Path("r.json")))}
    assert (rows["good: copy"].ratio_median or 0) > 0 and (rows["good: copy"].gb_s or 0) > 0


@pytest.mark.usefixtures("valgrind")
def test_a_baseline_is_made_and_a_planted_rise_fails_the_run(
    bench: Bench, tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    counted = {"good: copy": 10_000.0}
    monkeypatch.setattr(counts, "count", lambda *_, **__: counts.Counts(IDENTITY, counted))
    place, summary = tmp_path / "bench" / "baselines", tmp_path / "summary.md"  # not there yet
    guard = ("--ci", "--device", "cpu", "--cases", tmp_path / "good.py", "--baseline", place)
    status, out, _ = bench(*guard, "--update")
    assert (status, ": 1 figures" in out) == (0, True)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    use()
    for counted["good: copy"], status in ((10_000.0, 0), (10_390.0, 0), (10_900.0, 1)):
        assert bench(*guard, "--require-counts")[0] == status
    assert re.search(r"good: copy +10,000 +10,900 +\+9.0%", summary.read_text())


@pytest.mark.parametrize(
    ("counted_by", "kind", "message"),
    [
        ({}, KIND, "the baseline holds none; renew it with --update"),
        ({**IDENTITY, "python": "3.0"}, KIND, "python is 3.12.1, in the baseline 3.0"),
        ({**IDENTITY, "python": "3.0"}, "Other CPU", f"no baseline of {KIND} in"),
    ],
    ids=["no counts", "other software", "none that fits"],
)
@pytest.mark.usefixtures("valgrind")
def test_a_gate_on_counts_may_not_stand_open(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counted_by: dict[str, str],
    kind: str,
    message: str,
) -> None:
    monkeypatch.setattr(report, "machine", lambda _: MACHINE)
    machine = MACHINE if kind == KIND else {**MACHINE, "name": kind}
    result = {**result_of(row_of(), identity=counted_by), "machine": machine}
    baseline.write(tmp_path / f"{report.kind_of(machine)}.json", result)
    status, _, err = bench("--ci", "--baseline", tmp_path, "--require-counts")
    assert (status, err.count("\n")) == (2, 1)
    assert "bench: --require-counts: " in err and message in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ci", "--update"], "--update: needs --baseline"),
        (["--ci", "--update", "--only", "x", "--baseline", "b"], "--update: writes all figures"),
        (["--ci", "--require-counts"], "--require-counts: needs --baseline"),
        (["--ci", "--baseline", "/nowhere/b.json"], "/nowhere/b.json: no such baseline"),
        (["--ci", "--json", "/"], "/: a directory, expected a file to write"),
    ],
)
def test_a_wrong_command_is_one_line(bench: Bench, argv: list[str], message: str) -> None:
    status, _, err = bench(*argv)
    assert (status, message in err, err.count("\n")) == (2, True, 1)


@pytest.mark.cuda
def test_every_own_case_on_a_gpu(bench: Bench, tmp_path: Path) -> None:
    status, out, _ = bench("--ci", "--json", tmp_path / "r.json")
    assert status == 0, out
    rows = report.rows_of(report.read(tmp_path / "r.json"))
    assert not [row for row in rows if row.error]
    assert "launch: launch of a user's kernel" in [row.key for row in rows]


def test_every_own_case_computes_the_right_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    from stems import ON_GPU

    monkeypatch.syspath_prepend(ROOT)
    from bench.cases import guarded

    monkeypatch.setattr(Context, "rounds", 1)
    monkeypatch.setattr(counts, "why_not", lambda _: "not for this test")
    rows = report.rows_of(ci.run("cpu", guarded()))
    assert not [row.key for row in rows if row.error or row.ratio_median is None]
    keys = {row.key for row in rows}
    assert len(keys) == len(rows) >= 45
    for op in ON_GPU:
        assert {f"{op}: call, checks only", f"{op}: call, 1 row"} <= keys
