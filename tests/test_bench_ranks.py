"""Benchmarks of several ranks: what comes back where one of them fails, and what they agree on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import ranks  # noqa: E402
from bench.peers import host_pool  # noqa: E402
from jitkern.bench import Context, Row  # noqa: E402

CPU = Context("cpu", quick=True)
MODULE = """
import sys
import time
from jitkern.bench import Row

def measure_ranks(ranks, quick):
    said = ranks.first_text("of rank 1" if ranks.rank else "")
    yield Row("fake", said, "jitkern", "ours", median_us=1.0)
    if ranks.rank == 1:
        print("rank 1 was here", flush=True)
        {does}
    ranks.barrier()
    yield Row("fake", "second", "jitkern", "ours", median_us=2.0)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Write a benchmark whose rank 1 does something while rank 0 waits for it."""
    (tmp_path / "fake_ranks.py").write_text(MODULE.format(does=request.param))
    monkeypatch.syspath_prepend(tmp_path)
    return "fake_ranks"


def measured(module: str) -> tuple[list[Row], str]:
    """Return the rows that come, and the text of the error behind them."""
    rows: list[Row] = []
    try:
        for row in ranks.rows_of(module, CPU, 2):
            rows.append(row)
    except RuntimeError as error:
        return rows, str(error)
    return rows, ""


@pytest.mark.slow
@pytest.mark.parametrize("fake", ["pass"], indirect=True)
def test_the_rows_of_rank_0_come_back(fake: str) -> None:
    rows, error = measured(fake)
    assert error == ""
    assert [(row.case, row.median_us) for row in rows] == [("of rank 1", 1.0), ("second", 2.0)]


@pytest.mark.slow
@pytest.mark.parametrize("fake", ["raise ValueError('no more')", "sys.exit(3)"], indirect=True)
def test_a_rank_that_fails_ends_the_others(fake: str, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    rows, error = measured(fake)
    assert time.monotonic() - started < ranks.TIMEOUT_S / 2
    assert [row.case for row in rows] == ["of rank 1"]  # what was measured stays
    first, where, *rest = error.splitlines()
    assert first in (
        "rank 1 of 2 exited with 1: ValueError: no more",
        "rank 1 of 2 exited with 3: rank 1 was here",
    )
    assert where == "-- rank 1:"
    assert rest.index("rank 1 was here") < rest.index("-- rank 0:")


@pytest.mark.slow
@pytest.mark.parametrize("fake", ["time.sleep(600)"], indirect=True)
def test_ranks_that_hang_are_an_error_with_what_they_said(
    fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 20)
    said: list[str] = []
    monkeypatch.setattr(ranks, "sizes", lambda ctx: [2])
    *rows, failed = ranks.run("fake", fake, Context("cpu", True, said.append))
    assert [row.case for row in rows] == ["of rank 1"]
    assert failed.case == "2 ranks"
    assert failed.error == "RuntimeError: ranks 0, 1 of 2 were not done within 20 s"
    assert said[0] == "fake: 2 ranks"
    assert "rank 1 was here" in said[1]


def test_a_pool_leaves_half_of_the_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_pool.FREE_GIB, raising=False)
    monkeypatch.setattr(host_pool, "free_bytes", lambda: 31 << 30)
    assert host_pool.lacks(16) == ""
    assert "31.0 GiB of host memory are free" in host_pool.lacks(64)
    # A virtual machine that tells of a part of its memory.
    monkeypatch.setenv(host_pool.FREE_GIB, "256")
    assert host_pool.lacks(64) == ""
    assert host_pool.lacks(160)
    monkeypatch.setattr(host_pool, "free_bytes", lambda: None)
    monkeypatch.delenv(host_pool.FREE_GIB)
    assert host_pool.lacks(0.2)


def test_a_pool_goes_by_what_is_said_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from jitkern.offload import memory

    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    monkeypatch.setenv(host_pool.FREE_GIB, "1")
    with host_pool.trusted():
        memory.require_free(1 << 30)
    with pytest.raises(MemoryError):
        memory.require_free(1)
