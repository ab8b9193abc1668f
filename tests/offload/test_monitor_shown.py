"""What others show of an OverlapMonitor: metrics, a plot, and ranges in a profiler."""

from __future__ import annotations

import importlib
import re
import time
from typing import Any

import pytest
import torch
from given import Given
from pipelines import bring, host_blocks, pipeline_of, take

from jitkern.errors import UnsupportedError
from jitkern.offload import OverlapMonitor, timeline


def test_metrics() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    monitor = OverlapMonitor(window=4, min_ratio=0, name="kv")
    given = Given(monitor)
    registry = prometheus.CollectorRegistry()
    registry.register(monitor.collector())
    given.add([(3.0, 2.0, 1.0)] * 6)
    text = prometheus.generate_latest(registry).decode()
    figures = dict(re.findall(r'^jitkern_pipeline_(\w+)\{pipeline="kv"\} (\S+)$', text, re.M))
    assert {name: float(value) for name, value in figures.items() if value != "NaN"} == {
        "iterations_total": 6,
        "timed_iterations_total": 6,
        "captured_iterations_total": 0,
        "dropped_iterations_total": 0,
        "moved_bytes_total": 6 << 20,
        "alarms_total": 0,
        "compute_seconds": 0.003,
        "transfer_seconds": 0.002,
        "stall_seconds": 0.001,
        "compute_transfer_ratio": 1.5,
        "stalled_ratio": 1.0,
        "transfer_bytes_per_second": (1 << 20) / 0.002,
        "slots": 3,
    }
    assert figures["fill_seconds"] == "NaN"


def test_metrics_of_several() -> None:
    """A family comes once, as a scraper wants it, with a sample for each."""
    prometheus = pytest.importorskip("prometheus_client")
    first, second = (OverlapMonitor(window=4, name=name) for name in ("weights", "kv"))
    Given(first).add([(3.0, 2.0, 1.0)] * 6)
    Given(second).add([(3.0, 2.0, 1.0)] * 2)
    registry = prometheus.CollectorRegistry()
    registry.register(first.collector(second))
    text = prometheus.generate_latest(registry).decode()
    assert text.count("# HELP jitkern_pipeline_iterations_total ") == 1
    found = re.findall(r'^jitkern_pipeline_iterations_total\{pipeline="(\w+)"\} (\S+)$', text, re.M)
    assert found == [("weights", "6.0"), ("kv", "2.0")]


def test_mistakes_of_metrics() -> None:
    text = "OverlapMonitor.collector: others: two monitors of the name 'pipeline', expected a name="
    with pytest.raises(ValueError, match=re.escape(text)):
        OverlapMonitor().collector(OverlapMonitor())
    text = r"^OverlapMonitor\.collector: others: str, expected an OverlapMonitor$"
    with pytest.raises(TypeError, match=text):
        OverlapMonitor().collector("kv")


def test_a_plot(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    monitor = OverlapMonitor(name="weights")
    pipeline = pipeline_of(torch.device("cpu"), 2, monitor=monitor)
    with pytest.raises(ValueError, match=r"^OverlapMonitor\.plot: no iteration, expected one"):
        monitor.plot(tmp_path / "none.png")
    blocks = host_blocks(9, torch.device("cpu"))
    for _ in pipeline.update(blocks, load=bring, store=take):
        pass
    monitor.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_stalls_of_a_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the end of the body before it, and is over when its own one begins."""
    drawn: list[Any] = []
    monkeypatch.setattr(timeline, "draw", lambda *given: drawn.extend(given))
    monitor = OverlapMonitor(name="weights")
    pipeline = pipeline_of(torch.device("cpu"), 1, monitor=monitor)
    for _ in pipeline.load(range(200), copy=lambda tensor, block: time.sleep(1e-4)):
        pass
    monitor.plot("timeline.png")
    _, name, moments, stalls = drawn
    assert (name, len(stalls[0])) == ("weights", monitor.snapshot().timed)
    spans = timeline.spans(moments, stalls)
    begins, ends = moments[2], moments[3]
    assert len(spans["load"]) == len(spans["compute"]) == len(stalls[0]) < 200
    assert len(spans["stall"]) == len(stalls[0]) - 1 and spans["store"] == []
    in_gap = 0
    for number, (begin, ms) in enumerate(spans["stall"], 1):
        assert begin + ms <= begins[number] + 1e-6
        in_gap += begin > ends[number - 1] + 1e-6
        assert begin >= ends[number - 1] - 1e-6
    assert in_gap < 20  # where the body before has no row


@pytest.mark.parametrize(
    ("missing", "use", "text"),
    [
        ("prometheus_client", "collector", "pip install 'jitkern[metrics]'"),
        ("matplotlib", "plot", "pip install 'jitkern[bench]'"),
    ],
)
def test_what_is_not_installed(
    missing: str, use: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def import_module(name: str) -> Any:
        if name.startswith(missing):
            raise ImportError(name)
        return real(name)

    module = {"collector": "metrics", "plot": "timeline"}[use]
    monkeypatch.setattr(real(f"jitkern.offload.{module}"), "import_module", import_module)
    call = getattr(OverlapMonitor(), use)
    with pytest.raises(UnsupportedError, match=f"{re.escape(text)}$"):
        call(*(["timeline.png"] if use == "plot" else []))


def test_ranges_need_nvtx() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has NVTX")
    text = "SlotPipeline: nvtx: this torch has no NVTX; install a CUDA build of torch"
    with pytest.raises(UnsupportedError, match=f"^{text}$"):
        pipeline_of(torch.device("cpu"), nvtx=True)


def test_ranges(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))
    pipeline = pipeline_of(device, 1, nvtx=True)
    said.clear()
    blocks = host_blocks(2, device)
    for _ in pipeline.update(blocks, load=bring, store=take):
        said.append("body")
    for _ in pipeline.load(blocks, copy=bring):
        break
    expected = [f"{what} {n}" for n in range(2) for what in ("load", "compute", "store")]
    assert [text for text in said if text not in ("end", "body")] == [
        *expected,
        *("load 2", "compute 2"),
    ]
    assert said.count("end") == 8
    assert said[2:5] == ["compute 0", "body", "end"]
