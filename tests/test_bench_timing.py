"""What comparisons are made of: samples, replays in turn, cold buffers, the copy as a ceiling."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from jitkern.arch import Arch
from jitkern.bench import worker
from jitkern.bench.cases.common import copy_kernel, copy_module
from jitkern.bench.timing import (
    Call,
    ColdBuffers,
    Replay,
    Timing,
    cpu_replay,
    cuda_replay,
    time_replays,
)
from jitkern.errors import UnsupportedError


def test_timing_gives_median_spread_and_bandwidth() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median_ms == 3.0
    assert timing.iqr_ms == 2.0  # between 2.0 and 4.0: the outlier does not count
    assert timing.gb_s(6_000_000) == pytest.approx(2.0)
    assert Timing((1.0,)).iqr_ms == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said() -> None:
    with pytest.raises(UnsupportedError, match="time_replays: PyTorch sees no CUDA device"):
        time_replays({"one": Replay(lambda: None, 1)}, device="cuda")


def test_cold_buffers_cover_twice_the_cache() -> None:
    buffers = ColdBuffers(lambda i: i, 10, cache_bytes=100)
    assert len(buffers) == 21
    assert [buffers[i] for i in (0, 20, 21)] == [0, 20, 0]


@pytest.mark.parametrize(("bytes_each", "sets"), [(1, 8), (1000, 2)])
def test_cold_buffers_are_two_at_least_and_no_more_than_asked(bytes_each: int, sets: int) -> None:
    assert len(ColdBuffers(lambda i: i, bytes_each, cache_bytes=100, at_most=8)) == sets


def test_cold_buffers_hold_something() -> None:
    with pytest.raises(ValueError, match="ColdBuffers: bytes_each: got 0, expected at least 1"):
        ColdBuffers(lambda i: i, 0, cache_bytes=100)


def test_replays_take_turns_after_one_untimed_round() -> None:
    ran: list[str] = []

    def call(name: str) -> Call:
        return lambda: ran.append(name)

    replays = {"a": cpu_replay([call("a")] * 2), "b": cpu_replay([call("b")])}
    timings = time_replays(replays, device="cpu", rounds=2, before=call("-"))
    assert "".join(ran) == "-aa-b" + "-b-aa" + "-aa-b"
    assert {name: len(timing.samples_ms) for name, timing in timings.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("arch", ["8.0", "9.0", "10.0", "12.0"])
def test_copy_kernel_compiles(arch: str) -> None:
    assert copy_module().image(Arch.parse(arch))


@pytest.mark.cuda
def test_copy_kernel_copies() -> None:
    src = torch.randint(0, 255, (16 * 5001,), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    copy_kernel()(dst, src)
    assert torch.equal(dst, src)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        copy_kernel()(dst[:-1], src[:-1])


@pytest.mark.cuda
def test_results_of_one_graph_lie_apart() -> None:
    """Each call writes to memory of its own, which L2 does not hold of the call before."""
    places = []

    def call() -> torch.Tensor:
        result = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        places.append(result.data_ptr())
        return result.fill_(1)

    cuda_replay([call] * 4).run()
    torch.cuda.synchronize()
    assert len(set(places)) == 4


@pytest.mark.parametrize(
    ("call_s", "calls"),
    [(0.0, worker.SHORT_CALLS), (1.5 * worker.LONG_CALL_S, worker.LONG_CALLS)],
)
def test_long_calls_are_counted_a_few_times(
    monkeypatch: pytest.MonkeyPatch, call_s: float, calls: int
) -> None:
    """Whatever clock their case was given: hundreds of them would take Callgrind minutes."""
    counted: list[tuple[str, int]] = []
    done: list[float] = []
    case = SimpleNamespace(
        key="mine: long",
        clock="host",
        bytes_moved=0,
        make=lambda _: call_s,
        ours=lambda: SimpleNamespace(build=lambda: done.append),
    )
    counter = SimpleNamespace(count=lambda key, _, calls: counted.append((key, calls)))
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: sum(done)))
    worker._count_case(counter, case)
    assert counted == [("mine: long", calls)]
    assert len(done) == (2 if call_s else 2 + worker.UNCOUNTED_CALLS)
