"""Timing of memory kernels with mini-sglang's signatures."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from jitkern.args import int_arg
from jitkern.errors import UnsupportedError

logger: logging.Logger = logging.getLogger("jitkern.perf")


def perf_cuda(
    f: Callable[[], object],
    *,
    init_stream: bool = True,
    repetitions: int = 10,
    cuda_graph_repetitions: int | None = 10,
    fresh_outputs: bool = False,
) -> float:
    """Return the milliseconds one call of ``f`` takes on the current CUDA device.

    Caches are warm: calls follow each other, so inputs and outputs that fit the L2 cache stay
    there.

    Parameters
    ----------
    f : callable
        Queues the work on the current stream. Called once for warm-up, then captured.
    init_stream : bool
        Use a new stream, because the legacy default stream cannot be captured.
    repetitions : int
        Timed replays (or calls, without a graph); the mean is returned.
    cuda_graph_repetitions : int or None
        Calls captured into one CUDA graph, which hides the launch time of the host. ``None`` or 0:
        no graph, time plain calls.
    fresh_outputs : bool
        Keep the results of a graph's calls, so that each call writes to memory of its own. By
        default PyTorch gives a dropped result's memory to the next call, whose stores then hit the
        L2 cache.

    Raises
    ------
    UnsupportedError
        There is no CUDA device.
    """
    int_arg("perf_cuda", "repetitions", repetitions, 1)
    graph_calls = cuda_graph_repetitions or 0
    int_arg("perf_cuda", "cuda_graph_repetitions", graph_calls, 0)
    torch = _torch_with_cuda()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream() if init_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        f()
        replay = _graph_replay(f, graph_calls, fresh_outputs) if graph_calls else f
        replay()
        start.record()
        for _ in range(repetitions):
            replay()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / (repetitions * (graph_calls or 1))


def _torch_with_cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "perf_cuda: PyTorch sees no CUDA device; on a machine without a GPU use perf_cpu"
        )
    return torch


def _graph_replay(f: Callable[[], object], calls: int, keeps_results: bool) -> Callable[[], object]:
    """Capture `calls` calls of `f` into one CUDA graph and return its replay."""
    import torch

    graph, results = torch.cuda.CUDAGraph(), list[object]()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            result = f()
            if keeps_results:
                results.append(result)
            del result  # before the next call, which may take its memory
    return graph.replay


def perf_cpu(
    f: Callable[[], object], *, repetitions: int = 10, min_sample_ms: float = 1.0
) -> float:
    """Return the milliseconds one call of ``f`` takes on the CPU: the median of ``repetitions``.

    ``f`` is called once for warm-up. A sample repeats the call for about ``min_sample_ms``
    milliseconds.
    """
    int_arg("perf_cpu", "repetitions", repetitions, 1)
    f()
    calls = max(1, math.ceil(min_sample_ms / max(_host_ms(f, 1), 1e-5)))
    _host_ms(f, calls)  # warm-up
    return statistics.median(_host_ms(f, calls) for _ in range(repetitions))


def _host_ms(f: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        f()
    return (time.perf_counter() - start) * 1e3 / calls


def compare_memory_kernel_perf(
    *,
    baseline: Callable[[], object],
    our_impl: Callable[[], object],
    memory_footprint: int,
    description: str = "",
    extra_kwargs: dict[str, Any] | None = None,
    need_latency: bool = True,
) -> tuple[float, float]:
    """Time two implementations of one memory-bound operation and log their bandwidth.

    Parameters
    ----------
    baseline, our_impl : callable
        The function ``f`` of ``perf_cuda``, for each of the two.
    memory_footprint : int
        Bytes read plus bytes written by one call.
    description : str
        Start of the logged line (logger ``jitkern.perf``, level INFO).
    extra_kwargs : dict, optional
        More arguments of ``perf_cuda``.
    need_latency : bool
        Also log the milliseconds.

    Returns
    -------
    (float, float)
        GB/s (1e9 bytes per second) of the baseline and of our implementation.
    """
    int_arg("compare_memory_kernel_perf", "memory_footprint", memory_footprint, 1)
    bandwidths: list[float] = []
    parts: list[str] = []
    for label, f in (("Baseline", baseline), ("Our Impl", our_impl)):
        ms = perf_cuda(f, **(extra_kwargs or {}))
        bandwidths.append(memory_footprint / (ms * 1e6))
        latency = f"{ms:8.3f} ms | " if need_latency else ""
        parts.append(f"{label}: {latency}{bandwidths[-1]:8.3f} GB/s")
    logger.info("%s%s", description, " | ".join(parts))
    return bandwidths[0], bandwidths[1]
