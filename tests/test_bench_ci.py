"""`jitkern bench --ci`: the command."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from guard import GOOD, HALF, IDENTITY, KIND, MACHINE, baseline_of, result_of, row_of

from jitkern.bench import Context, baseline, ci, counts, report
from jitkern.bench.baseline import Figure
from jitkern.bench.case import Row
from jitkern.cli import bench_cmd, main
from jitkern.cli.ui import Parser
from jitkern.env import settings

CPU = Context("cpu")
UPDATE = ["--update", "--baseline", "b"]

BROKEN = """
from jitkern.bench import case

@case("broken")
def broken(ctx):
    raise OSError("no such kernel")
"""


def bench(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    status = main(["bench", *map(str, argv)])
    return status, *capsys.readouterr()


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
def uncounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counting takes half a minute; the tests that are not about it go without."""
    monkeypatch.setattr(counts, "source_here", lambda _: ("", "switched off for this test"))
    yield
    settings.cache_clear()


@pytest.mark.usefixtures("uncounted")
def test_a_broken_case_fails_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would break the message into lines
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BROKEN)
    files = [part for name in ("bad", "good") for part in ("--cases", tmp_path / f"{name}.py")]
    more = ("--cases", "none.py", "--device", "cpu", "--json", tmp_path / "r.json")
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
    place, summary = tmp_path / "bench" / "baselines", tmp_path / "summary.md"  # not there yet
    guard = ("--ci", "--device", "cpu", "--cases", tmp_path / "good.py", "--baseline", place)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    settings.cache_clear()
    status, out, _ = bench(capsys, *guard, "--update", "--runs", "2")
    assert (status, "1 figures of 2 runs" in out) == (0, True)
    made = baseline.read(next(place.glob("*-cores.json")))
    assert made.runs == {"quiet": 2}
    baseline.write(made.path, replace(made, figures={**made.figures, "other: copy": Figure()}))
    status, out, _ = bench(capsys, *guard, "--update", "--only", "good")
    assert (status, "1 figures of 1 runs; 1 others stay as they were" in out) == (0, True)
    renewed = baseline.read(made.path)
    assert set(renewed.figures) == {"good: copy", "other: copy"}
    assert renewed.figures["good: copy"] != made.figures["good: copy"]
    baseline.write(made.path, made)
    assert not summary.exists()  # of single runs there is nothing to say

    reports = ("--junit", tmp_path / "j.xml")
    status, out, _ = bench(capsys, *guard, *reports, "--gate", "none")
    assert status == 0
    assert "time / clone" in out
    assert "### jitkern bench" in summary.read_text()
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("tests") == "1"

    status, _, err = bench(capsys, *guard, "--gate", "counts", "--require-counts")
    assert (status, err.count("\n")) == (2, 1)
    assert "bench: --require-counts: switched off for this test" in err


def test_busy_processes_end_with_who_started_them(forked_python: Any) -> None:
    code = """
import os, signal
from pathlib import Path
from jitkern.cli.bench_update import _busy
with _busy(2):
    print(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    busy = forked_python(code, check=False).stdout.split()
    assert len(busy) == 2

    def run(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    end = time.monotonic() + 60
    while any(map(run, busy)):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.usefixtures("uncounted")
def test_no_baseline_is_made_of_a_broken_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(BROKEN)
    monkeypatch.setenv("PATH", "")
    guard = ("--ci", "--device", "cpu", "--cases", tmp_path / "bad.py")
    status, _, err = bench(capsys, *guard, "--update", "--baseline", tmp_path / "b.json")
    assert status == 1
    assert "bench: --update: bad: broken: OSError: no such kernel" in err
    assert not (tmp_path / "b.json").exists()


def test_a_count_that_fails_closes_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the baseline holds no count of."""
    monkeypatch.setattr(counts, "source_here", lambda _: ("callgrind", ""))
    monkeypatch.setattr(counts, "identity", lambda _: IDENTITY)
    (tmp_path / "good.py").write_text(GOOD)
    guard = ("--ci", "--device", "cpu", "--cases", tmp_path / "good.py")
    guard += ("--baseline", tmp_path, "--require-counts")
    kind = report.kind_of(report.machine("cpu"))
    figures = {"good: copy": baseline.Figure("clone", **HALF)}
    for found, message in (
        (counts.Counts("callgrind", note="counting failed: no"), "counting failed: no"),
        (
            counts.Counts("callgrind", IDENTITY, {"good: copy": 7.0}),
            "good: copy: the baseline holds no count of it; renew it with --update",
        ),
    ):
        baseline.write(tmp_path / f"{kind}.json", baseline.Baseline(kind, figures, IDENTITY))
        monkeypatch.setattr(counts, "count", lambda *_, found=found, **__: found)
        status, _, err = bench(capsys, *guard)
        assert (status, f"bench: --require-counts: {message}" in err) == (1, True), err


@pytest.mark.parametrize(
    ("counted_by", "kind", "message"),
    [
        ({}, KIND, "the baseline holds none; renew it with --update"),
        ({**IDENTITY, "python": "3.0"}, KIND, "python is 3.12.1, in the baseline 3.0"),
        ({**IDENTITY, "python": "3.0"}, "other-cpu", f"no baseline of {KIND} in"),
    ],
    ids=["no counts", "other software", "none that fits"],
)
def test_a_gate_on_counts_may_not_stand_open(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    counted_by: dict[str, str],
    kind: str,
    message: str,
) -> None:
    monkeypatch.setattr(counts, "source_here", lambda _: ("callgrind", ""))
    monkeypatch.setattr(counts, "identity", lambda _: IDENTITY)
    monkeypatch.setattr(report, "machine", lambda _: MACHINE)
    found = replace(baseline_of(kind, **HALF), counted_by=counted_by)
    baseline.write(tmp_path / f"{kind}.json", found)
    status, _, err = bench(capsys, "--ci", "--baseline", tmp_path, "--require-counts")
    assert (status, err.count("\n")) == (2, 1)
    assert "bench: --require-counts: " in err
    assert message in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ci", "--update"], "--update: needs --baseline"),
        (["--ci", "--require-counts"], "--require-counts: needs --baseline"),
        (["--ci", "--runs", "3"], "bench: --runs: only with --update"),
        (["--ci", "--runs", "1", "--beside", "2"], "bench: --runs, --beside: only with --update"),
        (["--ci", *UPDATE, "--junit", "j"], "bench: --junit: only without --update, which"),
        (["--ci", *UPDATE, "--gate", "all"], "bench: --gate: only without --update, which"),
        (["--compare", "a", "b", "--only", "store"], "bench: --only: only with --ci"),
        (["--compare", "a", "b", "--gate=all"], "bench: --gate: only with --ci"),
        (["--compare", "a", "b", "--markdown", "m"], "bench: --markdown: only with --ci"),
        (["--compare", "a", "b", *UPDATE], "bench: --baseline, --update: only with --ci"),
        (["--compare", "a", "b", "--device", "cpu"], "bench: --device: only with --ci"),
        (UPDATE, "bench: expected --ci or --compare A B"),
        (["--baseline=b"], "bench: expected --ci or --compare A B"),
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


def test_every_option_is_for_the_guard_or_the_harness() -> None:
    """Else it goes to a checkout's harness, whose usage says nothing of it."""
    parser = Parser()
    bench_cmd.configure(parser)
    options = set(re.findall(r"--[a-z-]+", parser.format_usage()))
    unknown = {option for option in options if not bench_cmd.is_for_guard([option])}
    assert unknown == {"--json", "--device"}


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
    status, _, err = bench(capsys, "--ci", "--junit", tmp_path)
    assert status == 2
    assert f"bench: {tmp_path}: a directory, expected a file to write" in err.replace("\n", "")


@pytest.mark.cuda
def test_every_builtin_case_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = bench(capsys, "--ci", "--json", tmp_path / "r.json")
    assert status == 0, out
    rows = report.rows_of(report.read(tmp_path / "r.json"))
    assert not [row for row in rows if row.error]
    keys = [row.key for row in rows]
    assert "launch: launch of a user's kernel" in keys
