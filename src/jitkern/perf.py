"""Timing of memory kernels: CUDA events, graph replays, cold buffers, measured ceilings.

The two functions of everyday use are :func:`perf_cuda` and :func:`compare_memory_kernel_perf`.
The rest is what an honest comparison needs: several graphs timed in turn
(:func:`time_replays`), buffers that have left the L2 (:class:`ColdBuffers`), and a plain copy, the
ceiling of this very machine (:func:`copy_kernel`).
GB is 1e9 bytes.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from jitkern.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from jitkern.jit.device import DeviceModule

__all__ = [
    "ColdBuffers",
    "Replay",
    "Timing",
    "cache_bytes_of",
    "compare_memory_kernel_perf",
    "copy_kernel",
    "cpu_replay",
    "cuda_replay",
    "percent_of_ceiling",
    "perf_cpu",
    "perf_cuda",
    "time_replays",
]

logger = logging.getLogger("jitkern.perf")

T = TypeVar("T")
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


class ColdBuffers(Generic[T]):
    """Working sets to rotate over, so that none is in the cache when its turn comes again.

    Parameters
    ----------
    make : callable
        ``make(i)`` builds the i-th working set.
    bytes_each : int
        Bytes that one call on one working set touches.
    cache_bytes : int
        Size of the cache to defeat; :func:`cache_bytes_of` gives the device's.
    at_least, at_most : int
        Limits on the number of working sets. With ``at_most`` in force the total may be smaller
        than twice the cache: ``cold`` says so, and the caller then flushes between replays.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        bytes_each: int,
        *,
        cache_bytes: int,
        at_least: int = 2,
        at_most: int = 64,
    ) -> None:
        if bytes_each <= 0:
            raise ValueError(f"ColdBuffers: bytes_each: got {bytes_each}, expected at least 1")
        wanted = 2 * cache_bytes // bytes_each + 1
        count = max(at_least, min(at_most, wanted))
        self.cold = count >= wanted
        self._sets = [make(i) for i in range(count)]

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, i: int) -> T:
        return self._sets[i % len(self._sets)]


def cache_bytes_of(device: torch.device | str | int) -> int:
    """Return the L2 size of a CUDA device in bytes, or the figure assumed for a CPU."""
    import torch

    where = torch.device(device)
    if where.type != "cuda":
        return CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(where).L2_cache_size)


def perf_cuda(
    f: Call,
    *,
    init_stream: bool = True,
    repetitions: int = 10,
    cuda_graph_repetitions: int | None = 10,
) -> float:
    """Return the milliseconds one call of ``f`` takes on the current CUDA device.

    Parameters
    ----------
    f : callable
        Enqueues the work on the current stream. Called once for warm-up, then captured.
    init_stream : bool
        Time on a new stream (the default) instead of the current one. Graph capture needs a
        stream that is not the legacy default stream.
    repetitions : int
        Timed replays (or calls, without a graph); the mean is returned.
    cuda_graph_repetitions : int or None
        Calls captured into one CUDA graph, which hides the host's launch cost. ``None`` or 0
        times plain calls.

    Raises
    ------
    ValueError
        ``repetitions`` below 1, or a negative ``cuda_graph_repetitions``.
    UnsupportedError
        There is no CUDA device (also a ``RuntimeError``).

    Examples
    --------
    >>> ms = perf_cuda(lambda: store_cache(k_cache, v_cache, indices, k, v))  # doctest: +SKIP
    """
    if repetitions < 1:
        raise ValueError(f"perf_cuda: repetitions: got {repetitions}, expected at least 1")
    graph_calls = cuda_graph_repetitions or 0
    if graph_calls < 0:
        raise ValueError(
            f"perf_cuda: cuda_graph_repetitions: got {graph_calls}, expected None, 0 or more"
        )
    torch = _torch_with_cuda("perf_cuda")
    stream = torch.cuda.Stream() if init_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        f()
        replay = cuda_replay([f] * graph_calls) if graph_calls else Replay(f, 1)
        replay.run()
        tic = torch.cuda.Event(enable_timing=True)
        toc = torch.cuda.Event(enable_timing=True)
        tic.record()
        for _ in range(repetitions):
            replay.run()
        toc.record()
        toc.synchronize()
    return float(tic.elapsed_time(toc)) / (repetitions * replay.calls)


def perf_cpu(f: Call, *, repetitions: int = 10, min_sample_ms: float = 1.0) -> float:
    """Return the milliseconds one call of ``f`` takes on the CPU (median of the samples).

    Parameters
    ----------
    f : callable
        Called once for warm-up, then as often as a sample needs.
    repetitions : int
        Number of samples.
    min_sample_ms : float
        A sample repeats ``f`` until it is about this long, so that short calls are measurable.
    """
    if repetitions < 1:
        raise ValueError(f"perf_cpu: repetitions: got {repetitions}, expected at least 1")
    f()
    start = time.perf_counter()
    f()
    once_ms = (time.perf_counter() - start) * 1e3
    calls = max(1, math.ceil(min_sample_ms / max(once_ms, 1e-5)))
    timings = time_replays({"f": cpu_replay([f] * calls)}, device="cpu", rounds=repetitions)
    return timings["f"].median_ms


def compare_memory_kernel_perf(
    *,
    baseline: Call,
    our_impl: Call,
    memory_footprint: int,
    description: str = " ",
    extra_kwargs: dict[str, Any] | None = None,
    need_latency: bool = True,
) -> tuple[float, float]:
    """Time two implementations of one memory-bound operation and log their bandwidth.

    Parameters
    ----------
    baseline, our_impl : callable
        The two implementations, as :func:`perf_cuda` takes them.
    memory_footprint : int
        Bytes read plus bytes written by one call.
    description : str
        Goes in front of the logged line (logger ``jitkern.perf``, level INFO).
    extra_kwargs : dict, optional
        Passed on to :func:`perf_cuda`.
    need_latency : bool
        Log the milliseconds beside the bandwidth.

    Returns
    -------
    (float, float)
        GB/s of the baseline and of ours.
    """
    if memory_footprint <= 0:
        raise ValueError(
            f"compare_memory_kernel_perf: memory_footprint: got {memory_footprint}, "
            "expected the bytes that one call moves"
        )
    bandwidths: list[float] = []
    parts: list[str] = []
    for label, f in (("Baseline", baseline), ("Our Impl", our_impl)):
        ms = perf_cuda(f, **(extra_kwargs or {}))
        bandwidths.append(memory_footprint / (ms * 1e6))
        latency = f"{ms:8.3f} ms | " if need_latency else ""
        parts.append(f"{label}: {latency}{bandwidths[-1]:8.3f} GB/s")
    logger.info("%s%s", description, " | ".join(parts))
    return bandwidths[0], bandwidths[1]


def cuda_replay(calls: Sequence[Call]) -> Replay:
    """Capture ``calls``, in order, into one CUDA graph; every one must have run before."""
    torch = _torch_with_cuda("cuda_replay")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
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

    ``before`` runs ahead of each replay, outside the timed region (an L2 flush, say). One
    untimed round comes first.
    """
    samples: dict[str, list[float]] = {name: [] for name in replays}
    timer = _cuda_timer() if device == "cuda" else _time_on_cpu
    for round_number in range(rounds + 1):
        for name, replay in replays.items():
            if before is not None:
                before()
            ms = timer(replay.run) / replay.calls
            if round_number > 0:
                samples[name].append(ms)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def percent_of_ceiling(gb_s: float, ceiling_gb_s: float) -> float:
    """Return ``gb_s`` in percent of the measured ceiling."""
    if ceiling_gb_s <= 0:
        raise ValueError(f"percent_of_ceiling: ceiling_gb_s: got {ceiling_gb_s}, expected > 0")
    return 100.0 * gb_s / ceiling_gb_s


_COPY_THREADS = 256


def copy_kernel() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return ``copy(dst, src)``: contiguous CUDA tensors of equal size, a multiple of 16 bytes."""
    module = _copy_module()

    def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        vecs, rest = divmod(src.numel() * src.element_size(), 16)
        if rest or dst.numel() * dst.element_size() != vecs * 16:
            raise ValueError("copy_kernel: dst, src: expected equal sizes, multiples of 16 bytes")
        blocks = -(-vecs // _COPY_THREADS)
        module.launch("copy", dst, src, vecs, grid=blocks, block=_COPY_THREADS)

    return copy


@lru_cache(maxsize=1)
def _copy_module() -> DeviceModule:
    from jitkern.jit.loader import load_jit

    return load_jit(
        "copy",
        device_files=["perf/copy.cu"],
        device_wrappers=[("copy", f"jitkern::CopyKernel<{_COPY_THREADS}>")],
    )


def _torch_with_cuda(who: str) -> Any:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"{who}: PyTorch sees no CUDA device; on a machine without a GPU use perf_cpu"
        )
    return torch


def _time_on_cpu(run: Call) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _cuda_timer() -> Callable[[Call], float]:
    torch = _torch_with_cuda("time_replays")
    tic = torch.cuda.Event(enable_timing=True)
    toc = torch.cuda.Event(enable_timing=True)

    def timer(run: Call) -> float:
        tic.record()
        run()
        toc.record()
        toc.synchronize()
        return float(tic.elapsed_time(toc))

    return timer
