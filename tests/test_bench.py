"""The benchmark harness: what it refuses to time, what it reports, and a short run on the CPU."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_nvcc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import figures, goals, harness, peers, said  # noqa: E402
from bench.cases.h2d_gather import line_efficiency  # noqa: E402
from jitkern.bench import Case, Context, Impl, Row, measure, report  # noqa: E402

CPU = Context(device="cpu", quick=True)


def copy_case(*impls: Impl) -> Case:
    """A case that copies 64 KB; its buffers are (source, destination)."""
    return Case(
        op="copy",
        name="64 KB",
        params={},
        bytes_moved=2 << 16,
        bytes_note="read once, written once",
        make=lambda i: (torch.full((1 << 16,), i, dtype=torch.uint8), torch.empty(1 << 16).byte()),
        outputs=lambda b: (b[1],),
        reference=lambda b: (b[0].clone(),),
        impls=list(impls),
        calls=3,
    )


def copy(buffers: Any) -> None:
    buffers[1].copy_(buffers[0])


def failing(_: Any) -> None:
    raise OSError("no such device\nmore lines")


def unbuildable() -> Any:
    raise ImportError("No module named 'peer'")


def test_measured_rows_compare_with_the_best_peer_and_the_ceiling() -> None:
    rows = measure.measure(
        CPU,
        copy_case(
            Impl("ours", "ours", lambda: copy),
            Impl("theirs", "peer", lambda: copy),
            Impl("returned", "peer", lambda: lambda b: b[0].clone(), returns=True),
            Impl("limit", "ceiling", lambda: copy, check=False),
        ),
    )
    assert [row.error for row in rows] == [""] * 4
    ours = rows[0]
    assert ours.median_us is not None
    best = min(row.median_us or 0.0 for row in rows if row.role == "peer")
    assert ours.ratio_to_best_peer == pytest.approx(best / ours.median_us)
    assert rows[3].percent_of_ceiling == pytest.approx(100.0)
    assert ours.gb_s == pytest.approx((2 << 16) / (ours.median_us * 1e3))


def test_a_wrong_result_is_not_timed() -> None:
    nothing, broken, absent = measure.measure(
        CPU,
        copy_case(
            Impl("writes nothing", "ours", lambda: lambda b: None),
            Impl("raises", "peer", lambda: failing),
            Impl("not installed", "peer", unbuildable),
        ),
    )
    assert "differs from the PyTorch reference" in nothing.error
    assert nothing.median_us is None
    assert broken.error == "OSError: no such device"
    assert absent.error == "ImportError: No module named 'peer'"


def test_random_rows_are_finite_and_not_constant() -> None:
    rows = measure.random_rows(64, 656, "cpu")
    assert rows.shape == (64, 328)
    assert rows.dtype == torch.bfloat16
    assert torch.isfinite(rows.float()).all()
    assert len(rows.view(torch.int16).unique()) > 1000


def test_line_efficiency_counts_lines() -> None:
    assert line_efficiency(512) == 1.0
    # 656 B start at multiples of 16 B, at most 112 B into a line: always 6 lines
    assert line_efficiency(656) == pytest.approx(656 / (6 * 128))
    assert line_efficiency(100) < 100 / 128  # some rows of 100 B lie on two lines


def test_a_build_runs_once_also_when_it_fails() -> None:
    calls: list[int] = []

    def build() -> object:
        calls.append(1)
        raise ValueError("never")

    once = peers.Once(build)
    for _ in range(2):
        with pytest.raises(ValueError, match="never"):
            once()
    assert len(calls) == 1


def test_peers_that_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def anew(folder: str) -> object:  # each is built once
        monkeypatch.setattr(peers, "FOLDER", folder)
        for name in ("folder", "vllm_merge_state"):
            monkeypatch.setattr(peers, name, peers.Once(getattr(peers, name)._build))
        return peers.vllm_merge_state()

    with pytest.raises(LookupError, match="JITKERN_BENCH_PEERS names no folder"):
        anew("")
    (tmp_path / "peers.py").write_text("def vllm_merge_state():\n    return max\n")
    assert anew(str(tmp_path)) is max


def test_short_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert harness.main(["store", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["machine"]["device"] == "cpu"
    rows = data["benchmarks"]["store"]["rows"]
    ours = [row for row in rows if row["role"] == "ours"]
    assert ours
    assert all(row["gb_s"] > 0 and row["percent_of_ceiling"] > 0 for row in ours)
    assert all(row["ratio_to_best_peer"] > 0 for row in ours)
    assert "jitkern" in capsys.readouterr().out


def test_results_of_other_benchmarks_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    def write(machine: str, op: str, us: float) -> None:
        row = Row(op, "c", "jitkern", "ours", median_us=us)
        report.write(
            path,
            report.payload({"device": "cuda", "name": machine}, [row], quick=True),
            goals=goals.recorded,
        )

    write("here", "store", 1.0)
    write("here", "index", 2.0)
    assert set(report.read(path)["benchmarks"]) == {"store", "index"}
    assert report.read(path)["goals"] == []
    write("there", "index", 2.0)
    assert set(report.read(path)["benchmarks"]) == {"index"}


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        harness.main(["stoer"])
    assert stopped.value.code == 2
    assert "'stoer': expected one of store, index" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plots_are_drawn(tmp_path: Path) -> None:
    from bench import plots

    def row(op: str, impl: str, role: str, gb_s: float, **params: Any) -> Row:
        case = " ".join(map(str, params.values()))
        made = Row(op, case, impl, role, params, median_us=1.0, gb_s=gb_s)
        made.bytes_moved, made.percent_of_ceiling = 172_000_000, 90.0
        return made

    rows: list[Row] = []
    for n in (1, 1024, 131_072):
        for impl, role in (("jitkern", "ours"), ("torch", "peer"), ("copy", "ceiling")):
            rows.append(row("store", impl, role, 10.0 * n, row_bytes=656, rows=n))
    for impl, role in (("jitkern", "ours"), ("1 byte loads", "peer"), ("memcpy", "ceiling")):
        rows.append(row("h2d_gather", impl, role, 50.0, sources="repeats", row_bytes=656, rows=9))
        for size in (512, 656, 4096):
            rows.append(row("h2d_gather", impl, role, 48.0, sources="distinct", row_bytes=size))
    for impl in ("jitkern", "engine, contiguous, h2d", "copy_blocks d2h", "copy_blocks d2h, 2 SMs"):
        rows.append(row("beside", impl, "ours", 30.0, batch=32, slowdown=1.04))
    for gib in (0.2, 4, 64):
        for impl, role in (("jitkern", "ours"), ("6 aligned", "peer"), ("memcpy", "ceiling")):
            for kind in ("gather", "scatter"):
                pool = {"kind": kind, "rows": 9, "row_bytes": 656, "pool_gib": gib}
                rows.append(row("pools", impl, role, 48.0, **pool, law="uniform"))
    made = plots.draw(report.payload({"name": "a machine"}, rows, quick=True), tmp_path)
    assert sorted(path.name for path in made) == [
        "beside.png",
        "h2d_ladder.png",
        "h2d_row_sizes.png",
        "pools.png",
        "store_bandwidth.png",
    ]
    assert all(path.stat().st_size > 5000 for path in made)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("peer", ["rows", "ladder"])
def test_nvcc_peers_compile(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jitkern.env import settings

    if not torch.cuda.is_available():
        monkeypatch.setenv("JITKERN_ARCH", "9.0")
        settings.cache_clear()
    assert getattr(peers, peer)() is not None


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("op", harness.OPS)
def test_quick_run_on_a_gpu(op: str, tmp_path: Path) -> None:
    if op in ("comm", "peer") and torch.cuda.device_count() < 2:
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
        assert tables.made(text) == text, f"{page.name}: python -m bench.tables makes it anew"
        named |= {
            one for group in re.findall(r"<!-- table: (\S+) -->", text) for one in group.split("+")
        }
    assert named == set(tables.TABLES)


@pytest.mark.parametrize("name", said.PAGES)
def test_the_figures_of_a_page_are_those_of_the_results(name: str) -> None:
    page = (ROOT / name).read_text()
    assert figures.made(name, page, said.on(name)) == page, "python -m bench.tables makes it anew"


@pytest.mark.parametrize("name", said.PAGES)
def test_each_changed_figure_is_noticed_and_put_right(name: str) -> None:
    page = (ROOT / name).read_text()
    pieces = [piece for piece in said.on(name) if piece.figures]
    for piece in pieces:
        (place,) = piece.find(page)
        for start, end in place.regs[1:]:
            changed = page[:start] + "1,234.5" + page[end:]
            assert figures.made(name, changed, [piece]) == page


def test_a_piece_that_is_lost_twice_there_or_untrue_is_an_error_that_names_it() -> None:
    page = "A call\ntakes 3.5 us, a copy 2.0."
    piece = figures.said("A call takes {:.1f} us", 4.26)
    assert figures.made("p.md", page, [piece]) == page.replace("3.5", "4.3")
    for text in ("One call takes 3.5", page * 2):
        with pytest.raises(ValueError, match=r"p\.md: [02] times .*: A call takes \{:\.1f\} us"):
            figures.made("p.md", text, [piece])
    for untrue in (figures.said("a copy {}", 2.0, holds=False), figures.said("a copy {}", -2.0)):
        with pytest.raises(ValueError, match=r"p\.md: the words are no longer true: a copy \{\}"):
            figures.made("p.md", page, [piece, untrue])


def test_a_case_that_no_run_has_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"nvidia-h200: store: 0 x 'no case', 'jitkern'"):
        figures.Bench("store").us("no case")
