"""Replays that are timed in turn, by the host's clock or by CUDA events."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Call = Callable[[], object]

# The cache size that rotating buffers exceed on a CPU. Virtual machines report shared L3 slices of
# hundreds of MB, which a short run cannot exceed; all peers get the same buffers.
CPU_CACHE_BYTES = 32 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, one sample per replay."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def iqr_ms(self) -> float:
        """Distance between the quartiles; 0.0 for a single sample."""
        if len(self.samples_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return high - low

    def gb_s(self, bytes_moved: int) -> float:
        return bytes_moved / (self.median_ms * 1e6)


class Replay(NamedTuple):
    """A function to run repeatedly, and the number of calls in one run."""

    run: Call
    calls: int


def cache_bytes_of(device: torch.device | str | int) -> int:
    """Return the L2 size of a CUDA device in bytes; CPU_CACHE_BYTES for a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def cuda_replay(calls: Sequence[Call]) -> Replay:
    """Capture ``calls``, in order, into one CUDA graph; each must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Results are kept during the capture: the memory of a dropped result would be reused by
        # the next call, whose stores then hit the L2.
        results = [call() for call in calls]
    del results
    return Replay(graph.replay, len(calls))


def cpu_replay(calls: Sequence[Call]) -> Replay:
    """Run ``calls`` in order; used for CUDA work too that cannot be captured."""

    def run() -> None:
        for call in calls:
            call()

    return Replay(run, len(calls))


def time_replays(
    replays: Mapping[str, Replay],
    *,
    device: Literal["cuda", "cpu"],
    rounds: int = 10,
    before: Call | None = None,
) -> dict[str, Timing]:
    """Time several replays in turn, round after round, so that drift affects all alike.

    ``before`` runs before each replay, untimed (an L2 flush, say). The first round is untimed.
    Every second round is in reverse order, so that no replay always follows the same one.
    """
    samples: dict[str, list[float]] = {name: [] for name in replays}
    timer = cuda_timer() if device == "cuda" else host_ms
    for round_number in range(rounds + 1):
        in_turn = list(replays.items())
        for name, replay in in_turn[:: 1 if round_number % 2 == 0 else -1]:
            if before is not None:
                before()
            ms = timer(replay.run) / replay.calls
            if round_number > 0:
                samples[name].append(ms)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def host_ms(call: Call, count: int = 1) -> float:
    """Return the host's milliseconds per call, over `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e3 / count


def cuda_timer() -> Callable[[Call], float]:
    """Return a function that measures the GPU milliseconds of a call between two events."""
    tic = torch.cuda.Event(enable_timing=True)
    toc = torch.cuda.Event(enable_timing=True)

    def timer(call: Call) -> float:
        tic.record()
        call()
        toc.record()
        toc.synchronize()
        return float(tic.elapsed_time(toc))

    return timer
