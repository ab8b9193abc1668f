"""The benchmarks: results that are not timed, rows, short runs, tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import cases, harness, measure, report  # noqa: E402
from bench.case import Case, Context, Impl, Row  # noqa: E402

CPU = Context(device="cpu", quick=True)


def copy_case(*impls: Impl) -> Case:
    """Return a case that copies 64 KB; its buffers are (source, destination)."""
    return Case(
        op="copy",
        name="64 KB",
        params={},
        bytes_moved=2 << 16,
        make=lambda i: (torch.full((1 << 16,), i, dtype=torch.uint8), torch.empty(1 << 16).byte()),
        outputs=lambda b: (b[1],),
        reference=lambda b: (b[0].clone(),),
        impls=list(impls),
        calls=3,
    )


def copy(buffers: Any) -> None:
    buffers[1].copy_(buffers[0])


def test_measured_rows_compare_with_the_best_peer_and_the_ceiling() -> None:
    case = copy_case(
        Impl("ours", "ours", lambda: copy),
        Impl("theirs", "peer", lambda: copy),
        Impl("returned", "peer", lambda: lambda b: b[0].clone(), returns=True),
        Impl("limit", "ceiling", lambda: copy, check=False),
    )
    rows = measure.measure(CPU, case)
    assert [row.error for row in rows] == [""] * 4
    harness.compare(rows)
    ours = rows[0]
    assert ours.median_us is not None
    best = min(row.median_us or 0.0 for row in rows if row.role == "peer")
    assert ours.ratio_to_best_peer == pytest.approx(best / ours.median_us)
    assert rows[3].percent_of_ceiling == pytest.approx(100.0)
    assert ours.gb_s == pytest.approx((2 << 16) / (ours.median_us * 1e3))


def test_a_wrong_result_is_not_timed() -> None:
    failing = Mock(side_effect=OSError("no such device\nmore lines"))
    unbuildable = Mock(side_effect=ImportError("No module named 'peer'"))
    case = copy_case(
        Impl("writes nothing", "ours", lambda: lambda b: None),
        Impl("raises", "peer", lambda: failing),
        Impl("not installed", "peer", unbuildable),
    )
    nothing, broken, absent = measure.measure(CPU, case)
    assert "differs from the PyTorch reference" in nothing.error
    assert nothing.median_us is None
    assert broken.error == "OSError: no such device"
    assert absent.error == "ImportError: No module named 'peer'"


def test_short_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert harness.main(["store", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["machine"]["device"] == "cpu"
    ours = [row for row in data["benchmarks"]["store"]["rows"] if row["role"] == "ours"]
    assert ours
    for name in ("gb_s", "percent_of_ceiling", "ratio_to_best_peer"):
        assert all(row[name] > 0 for row in ours)
    assert "jitkern" in capsys.readouterr().out


def test_results_of_other_benchmarks_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    for machine, op, kept in (
        ("here", "store", {"store"}),
        ("here", "index", {"store", "index"}),
        ("there", "index", {"index"}),
    ):
        row = Row(op, "c", "jitkern", "ours", median_us=1.0)
        result = report.payload({"device": "cuda", "name": machine}, [row], quick=True)
        harness.write(path, result)
        assert set(report.read(path)["benchmarks"]) == kept


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("op", cases.NAMES)
def test_quick_run_on_a_gpu(op: str, tmp_path: Path) -> None:
    if op == "peer" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = tmp_path / "out.json"
    assert harness.main([op, "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["benchmarks"][op]["rows"]
    expected = ("does not compile for this row size", "No module named", "load_inline")
    expected += ("not here: ",)  # a peer's sources, which are fetched for a comparison
    failed = [row for row in rows if row["error"] and not any(e in row["error"] for e in expected)]
    assert not failed


def test_the_tables_of_the_docs_are_those_of_the_results() -> None:
    from bench import tables

    named = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        assert tables.with_tables(text) == text, f"{page.name}: run python -m bench.tables"
        named.update("+".join(re.findall(r"<!-- table: (\S+) -->", text)).split("+"))
    assert named - {""} == set(tables.TABLES)
