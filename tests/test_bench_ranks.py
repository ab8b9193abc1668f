"""Benchmarks of several ranks: what comes back if one of them fails, and what they agree on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from proved import unproved

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import ranks  # noqa: E402
from bench.peers import host_pool  # noqa: E402
from jitkern.bench import Context  # noqa: E402
from jitkern.offload import memory  # noqa: E402

MODULE = """
import os
import time
from jitkern.bench import Row

def measure_ranks(ranks, quick):
    text = ranks.first_text("of rank 1" if ranks.rank else "")
    yield Row("fake", text, "jitkern", "ours", median_us=1.0)
    if ranks.rank == 1:
        {does}
    ranks.barrier()
    yield Row("fake", "second", "jitkern", "ours", median_us=2.0)
"""


@unproved("bench ranks", "bench/ranks.py", "tests/test_bench_ranks.py")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("pass", ""),
        ("raise ValueError('no more')", "RuntimeError: rank 1: ValueError: no more"),
        # Or of rank 0, if it has noticed before.
        ("os._exit(3)", "RuntimeError: rank (1: process 1 terminated with exit code 3|0: .*)"),
        ("time.sleep(600)", "RuntimeError: 2 ranks were not done within 15 s"),
    ],
)
def test_rows_come_back_and_a_rank_that_fails_ends_the_others(
    does: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake_ranks.py").write_text(MODULE.format(does=does))
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in does:
        monkeypatch.setattr(ranks, "TIMEOUT_S", 15)
    first, second = ranks.run("fake", "fake_ranks", Context("cpu", quick=True))
    assert (first.case, first.median_us) == ("of rank 1", 1.0)
    assert second.case == ("2 ranks" if error else "second")
    assert re.fullmatch(error, second.error)


def test_a_pool_leaves_half_of_the_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_pool.FREE_GIB, raising=False)
    monkeypatch.setattr(host_pool, "free_bytes", lambda: 31 << 30)
    assert host_pool.lacks(16) == ""
    assert "31.0 GiB of host memory are free" in host_pool.lacks(64)
    # A virtual machine that tells of a part of its memory.
    monkeypatch.setenv(host_pool.FREE_GIB, "256")
    assert host_pool.lacks(64) == ""
    assert host_pool.lacks(160)
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    monkeypatch.setenv(host_pool.FREE_GIB, "1")
    with host_pool.trusted():
        memory.require_free(1 << 30)
    with pytest.raises(MemoryError):
        memory.require_free(1)
