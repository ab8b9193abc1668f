"""What an OverlapMonitor measures on a GPU: an order of moments, whoever else has the GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from pipelines import bring, pipeline_of
from torch import Tensor

from jitkern.offload import OverlapMonitor, SlotPipeline
from jitkern.offload.monitor import _STALL

pytestmark = pytest.mark.cuda

WORDS = 1 << 18  # of int32: 1 MiB a slot
SLOW_CYCLES = 1_000_000  # about 0.6 ms
NEAR_MS = 2e-3  # a float of ms, and the clock of events


def pipeline_of_32(monitor: OverlapMonitor) -> tuple[SlotPipeline, list[Tensor]]:
    """Return a pipeline of 3 slots, and 32 blocks."""
    shape = {"slot_shape": [WORDS], "dtype": torch.int32}
    blocks = list(torch.zeros(32, WORDS, dtype=torch.int32).pin_memory())
    return pipeline_of(torch.device("cuda"), 3, monitor=monitor, **shape), blocks


def moments_of(monitor: OverlapMonitor, count: int) -> list[list[float]]:
    """Return begin and end of each load and body of the last iterations, and its stall."""
    rows = list(monitor._rows)[-count:]
    assert len(rows) == count
    return [[*row[:4], row[_STALL]] for row in rows]


def check_order(rows: list[list[float]], depth: int, least_ms: tuple[float, float]) -> None:
    """Hold what waits for what, and how long a load and a body take at least, to their times."""
    previous_load = previous_body = -math.inf
    for number, (load, loaded, body, done, stall) in enumerate(rows):
        assert load + least_ms[0] <= loaded + NEAR_MS
        assert loaded <= body + NEAR_MS
        assert body + least_ms[1] <= done + NEAR_MS
        assert load >= previous_load - NEAR_MS  # one stream of loads
        assert body >= previous_body - NEAR_MS
        if number >= depth:  # the slot was free
            assert load >= rows[number - depth][3] - NEAR_MS
        # What the body waited for its load, once the body before it was over.
        expected = max(0.0, min(loaded, body) - previous_body) if number else 0.0
        assert stall == pytest.approx(expected, abs=NEAR_MS)
        previous_load, previous_body = loaded, done


def test_what_the_monitor_measures() -> None:
    """The order of moments, and how long something takes at least, whoever else has the GPU."""
    monitor = OverlapMonitor(window=32, every=1)
    pipeline, blocks = pipeline_of_32(monitor)
    sleep_ms = SLOW_CYCLES / 4e6  # no clock is faster

    def copy(tensor: Tensor, block: Tensor) -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        bring(tensor, block)

    for run, body_cycles in enumerate((2 * SLOW_CYCLES, 0), 1):
        for _ in pipeline.load(blocks, copy=copy):
            torch.cuda._sleep(body_cycles)
        torch.cuda.synchronize()
        found = monitor.snapshot()
        assert (found.iterations, found.timed, found.dropped) == (32 * run, 32 * run, 0)
        assert found.bytes_moved == 32 * run * WORDS * 4
        rows = moments_of(monitor, 32)
        check_order(rows, 3, (sleep_ms, body_cycles / 4e6))
        # Means are of what lies between the first moment and the last, without what overlaps.
        took_ms = rows[-1][3] - rows[0][0]
        assert 32 * found.transfer_ms <= took_ms + 0.1
        assert 32 * (found.compute_ms + found.stall_ms) <= took_ms + 0.1
        bodies_ms = sum(row[3] - row[2] for row in rows)
        assert 32 * found.compute_ms == pytest.approx(bodies_ms, rel=1e-3)
        assert found.fill_ms == pytest.approx(rows[0][2] - rows[0][0], abs=NEAR_MS)
        assert found.ratio == pytest.approx(found.compute_ms / found.transfer_ms)
        if body_cycles:  # a load runs beside the body before its own
            assert any(row[0] < before[3] for before, row in pairwise(rows))
        else:  # a body that does nothing waits for its load
            assert found.stall_share > 0 and found.stall_ms > 0
