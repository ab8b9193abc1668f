"""What a fresh process pays, and what one call takes in instructions: `jitkern bench --ci`."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from needs import needs_nvrtc

from jitkern.bench import Context, counts
from jitkern.bench.client import Worker
from jitkern.bench.fresh import FIGURES, FreshProcesses
from jitkern.errors import JitkernError, ToolchainError

CPU = Context("cpu")


# ------------------------------------------------------------------------------- fresh processes


@needs_nvrtc
def test_what_a_fresh_process_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitkern.bench import fresh
    from jitkern.bench import worker as its_steps

    monkeypatch.setattr(fresh, "SAMPLES", dict.fromkeys(fresh.SAMPLES, 2))
    for op in ("store", "index"):  # what this user has is not found there
        its_steps.look_up(op, its_steps.ROW_BYTES, "9.0")
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


def test_a_worker_that_cannot_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise ToolchainError("no C++ compiler")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("jitkern.host.module.find", none)
    with pytest.raises(ToolchainError):
        Worker("cpu", "9.0")
    assert list(tmp_path.iterdir()) == []


def test_the_way_to_a_processors_counter() -> None:
    try:
        counter = counts.open_perf_counter(counts.SOFTWARE_TASK_CLOCK)
    except OSError as error:
        pytest.skip(f"no performance events here: {error}")
    before = int.from_bytes(os.read(counter, 8), "little")
    end = time.thread_time() + 0.01  # of the processor, not of a clock that runs while others do
    while time.thread_time() < end:
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
    monkeypatch.setattr(counts, "source_here", lambda _: ("callgrind", ""))
    # A module beside it, as where it is timed.
    (tmp_path / "mine.py").write_text("def work(loop): return sum(i * i for i in range(loop))\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "from jitkern.bench import case\nimport mine\n"
    for number, (name, loop) in enumerate((("a", 50), ("same as a", 50), ("a fifth more", 60))):
        text += f"""
@case({name!r})
def work_{number}(ctx):
    return (lambda: mine.work({loop})), (lambda: None)
"""
    (tmp_path / "work.py").write_text(text)
    keys = ["work: a", "work: same as a", "work: a fifth more"]
    (tmp_path / "bad.py").write_text("import nowhere_at_all\n")
    cases = [tmp_path / "work.py", tmp_path / "bad.py"]
    found = counts.count("cpu", "9.0", kernels=False, cases=cases, wanted=keys)
    assert "nowhere_at_all" in found.note  # nothing goes uncounted unsaid
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
    source, reason = counts.source_here("cpu")
    assert source == ""
    assert "apt install valgrind" in reason
    found = counts.count("cpu", "9.0", kernels=False, cases=[], wanted=[])
    assert (found.by_key, found.note) == ({}, reason)
