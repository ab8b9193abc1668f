"""`python -m bench --ci`: counts, baselines, verdicts, and the command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stems import ON_GPU

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import counts, guard, harness, report  # noqa: E402
from bench.case import Context, Row  # noqa: E402
from bench.cases import GUARDED  # noqa: E402

IDENTITY = {"counted by": "callgrind", "python": "3.12.1"}
KIND = "some-cpu-2-cores"

# A file of cases. `mine: call` is what the tests count.
MINE = """
import torch
from bench.cases.common import call_case
from jitkern import store_cache

caches, kv = torch.zeros(2, 64, 656).byte(), torch.zeros(2, 1, 656).byte()
arguments = (*caches, torch.zeros(1, dtype=torch.int32), *kv)

def checked():
    if kv.dtype != torch.uint8 or not kv.is_contiguous():
        raise TypeError("x")
    store_cache(*arguments)

def cases(ctx):
    yield call_case("mine", "call", lambda: store_cache(*arguments), arguments)
    yield call_case("mine", "the same", lambda: store_cache(*arguments), arguments)
    yield call_case("mine", "one more check", checked, arguments)
"""
KEYS = ["mine: call", "mine: the same", "mine: one more check"]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def row_of(instructions: float | None = 20_680, **fields: Any) -> Row:
    fields = {"against": "no-op", "ratio_median": 2.0, **fields}
    return Row("store", "call", "jitkern", "ours", instructions=instructions, **fields)


def baseline_of(*rows: Row, kind: str = KIND) -> guard.Baseline:
    return guard.new_baseline(rows or [row_of()], kind, IDENTITY)


def verdicts(
    baseline: guard.Baseline, *rows: Row, identity: dict[str, str] = IDENTITY, is_whole: bool = True
) -> dict[str, tuple[str, bool]]:
    verdicts = guard.compare(baseline, rows, KIND, identity, is_whole=is_whole)
    return {verdict.key: (verdict.outcome, verdict.fails) for verdict in verdicts}


@pytest.mark.parametrize(
    ("now", "outcome"),
    [
        (21_073, "same"),  # on another machine of the kind
        (21_450, "slower"),  # one more check by a Python function
        (19_000, "faster"),
    ],
)
def test_a_count_fails_if_it_rose_by_more_than_equal_runs_differ(now: float, outcome: str) -> None:
    row = row_of(now, ratio_median=40.0)  # a time does not fail
    for kind in (KIND, "other-2-cores"):
        (verdict,) = guard.compare(baseline_of(kind=kind), [row], KIND, IDENTITY, is_whole=True)
        assert (verdict.outcome, verdict.fails) == (outcome, outcome == "slower")
        assert (verdict.then["ratio"] is None) == (kind != KIND)


def test_verdicts_without_two_counts() -> None:
    gone = Row("store", "gone", "jitkern", "ours", instructions=9.0)
    broken = Row("index", "call", "jitkern", "ours", error="OSError: no")
    baseline = baseline_of(row_of(), gone)
    new = Row("store", "new", "jitkern", "ours", instructions=9.0)
    assert verdicts(baseline, row_of(), broken, new) == {
        "store: call": ("same", False),
        "index: call": ("broken", True),
        "store: new": ("new", False),
        "store: gone": ("missing", True),
    }
    assert "store: gone" not in verdicts(baseline, row_of(), is_whole=False)
    other = {**IDENTITY, "python": "3.13.0"}
    assert verdicts(baseline, row_of(90_000), identity=other) == {
        "store: call": ("not compared", False)
    }


@pytest.mark.parametrize("file", sorted((ROOT / "bench/baselines").glob("*")), ids=str)
def test_the_kept_baselines_notice_nine_percent_more(file: Path) -> None:
    baseline = report.read(file)
    assert (baseline["schema"], f"{baseline['kind']}.json") == (guard.SCHEMA, file.name)
    figures = [f["instructions"] for f in baseline["figures"].values() if f["instructions"]]
    assert bool(figures) == bool(baseline["counted_by"])
    assert all(guard.most_instructions(count) < 1.09 * count for count in figures)


# -- the command -----------------------------------------------------------------------------------

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command on the CPU; return its status and its output."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = harness.main(["--ci", "--device", "cpu", *map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def valgrind(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Count instructions: those of the dict that is returned."""
    by_key = dict.fromkeys(KEYS, 10_000.0)
    monkeypatch.setattr(counts, "why_not", lambda _: "")
    monkeypatch.setattr(counts, "identity", lambda: IDENTITY)
    monkeypatch.setattr(counts, "count", lambda *_: (by_key, {}))
    return by_key


def test_a_broken_case_fails_and_the_others_run(
    bench: Bench, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "why_not", lambda _: "switched off for this test")
    mine.write_text(MINE.replace("if kv.", "if no_such_name."))
    status, out, err = bench("--cases", mine, "--json", tmp_path / "r.json")
    assert status == 1
    assert "NameError: name 'no_such_name'" in out
    assert "instructions are not compared: switched off for this test" in out
    assert "mine: the same" in err
    rows = report.read(tmp_path / "r.json")["benchmarks"]["mine"]["rows"]
    assert [f"mine: {row['case']}" for row in rows] == KEYS
    assert rows[0]["ratio_median"] > 0


def test_a_baseline_is_made_and_a_planted_rise_fails_the_run(
    bench: Bench, mine: Path, tmp_path: Path, valgrind: dict[str, float]
) -> None:
    argv = ("--cases", mine, "--baseline", tmp_path / "baselines")
    status, out, _ = bench(*argv, "--update")
    assert (status, ": 3 figures" in out) == (0, True)
    for valgrind["mine: call"], status in ((10_000.0, 0), (10_390.0, 0), (10_900.0, 1)):
        got, out, _ = bench(*argv, "--require-counts")
        assert got == status
    assert re.search(r"mine: call +10,000 +10,900 +\+9.0%", out)


@pytest.mark.cuda
def test_every_own_case_on_a_gpu(tmp_path: Path) -> None:
    assert harness.main(["--ci", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["benchmarks"]
    assert "launch of a user's kernel" in [row["case"] for row in rows["launch"]["rows"]]


def test_every_own_case_computes_the_right_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "rounds", 1)
    rows = guard.measure_all(GUARDED, "cpu")
    assert not [row.key for row in rows if row.error or row.ratio_median is None]
    keys = {row.key for row in rows}
    assert len(keys) == len(rows) >= 40
    for op in ON_GPU:
        assert {f"{op}: call, checks only", f"{op}: call, 1 row"} <= keys
