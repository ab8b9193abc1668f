"""What comparisons are made of: replays that are timed in turn, by the host or by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jitkern.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

# What counts as "cache" on a CPU when the buffers rotate. Shared L3 slices of hundreds of MB are
# reported by virtual machines and cannot be defeated in a short run; the same for every peer.
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
    """Something that can be run again and again, and how many calls one run holds."""

    run: Call
    calls: int


def cache_bytes_of(device: torch.device | str | int) -> int:
    """Return the L2 size of a CUDA device in bytes, or the figure assumed for a CPU."""
    import torch

    where = torch.device(device)
    if where.type != "cuda":
        return CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(where).L2_cache_size)


def cuda_replay(calls: Sequence[Call]) -> Replay:
    """Capture ``calls``, in order, into one CUDA graph; every one must have run before."""
    torch = torch_with_cuda("cuda_replay")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept: a dropped result's memory would go to the next call, which L2 then still holds.
        results = [call() for call in calls]
    del results
    return Replay(graph.replay, len(calls))


def cpu_replay(calls: Sequence[Call]) -> Replay:
    """Run ``calls`` in order; also the way to time CUDA work that no graph can hold."""

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
    """Time several replays in turn, round after round, so that drift hits all of them alike.

    ``before`` runs ahead of each replay, untimed (an L2 flush, say). The first round is untimed.
    Every other round goes backwards, so that no replay always follows the same neighbour.
    """
    samples: dict[str, list[float]] = {name: [] for name in replays}
    timer = cuda_timer("time_replays") if device == "cuda" else host_ms
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
    """Return the milliseconds of the host for one of `count` calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e3 / count


def cuda_timer(who: str) -> Callable[[Call], float]:
    """Return what takes the milliseconds of the GPU between two events around a call."""
    torch = torch_with_cuda(who)
    tic = torch.cuda.Event(enable_timing=True)
    toc = torch.cuda.Event(enable_timing=True)

    def timer(call: Call) -> float:
        tic.record()
        call()
        toc.record()
        toc.synchronize()
        return float(tic.elapsed_time(toc))

    return timer


def torch_with_cuda(who: str) -> Any:
    """Return torch; raise UnsupportedError in the name of `who` where it sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"{who}: PyTorch sees no CUDA device; on a machine without a GPU use perf_cpu"
        )
    return torch
