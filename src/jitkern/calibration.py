"""``calibrate``: measure what "auto" decides by on this machine, and keep it."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.errors import UnsupportedError
from jitkern.free_memory import free_bytes
from jitkern.host import tuning
from jitkern.host.module import module
from jitkern.ops.copy_blocks import copy_blocks
from jitkern.ops.d2h_scatter import d2h_scatter
from jitkern.ops.h2d_gather import h2d_gather

if TYPE_CHECKING:
    from torch import Tensor

Say = Callable[[str], None]

_GIB = 1 << 30
_ROW_BYTES = 656  # an MLA row with its scales, which all measurements of this project have
_ROWS = 131_072
_DEVICE_ROWS = 4 * _ROWS
_SETS = 5  # of row numbers, each used once: a second time the GPU's L2 knows their pages
_NEVER = 1 << 60
_PAGE_BYTES = 64 << 10  # that the link's translation knows as one
_WORTH = 1.03  # beside another way, which takes more of the machine
_PACE = 0.61  # of what SMs can write to the host: above, all traffic of the GPU waits
_PIECES_KIB = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_LAYERS = 32
_SUMS_MIB = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
_SUMS = 200  # of a graph
_POOLS_GIB = (32, 16, 8, 4)  # below, nothing is far beyond what the link's translation reaches


@dataclass(frozen=True)
class Calibration:
    """What was measured, and the figures that follow.

    Attributes
    ----------
    machine : Machine
        What they hold for.
    figures : mapping of str to int
        What "auto" reads.
    curves : mapping of str to list of (float, float)
        What they come from: GB/s of random rows of 656 bytes over the size of their pool in GiB
        (``as they come``, ``in order``, ``both ways``, ``scatter, in order``, ``scatter by the
        CPU``) or over the number of the CPU's threads (``by the CPU, of threads``, ``both ways, of
        threads``, ``scatter by the CPU, of threads``); GB/s of blocks of 32 layers over the KiB of
        one layer (``blocks by SMs``, ``blocks by the engine``, ``blocks to the host by SMs``,
        ``blocks to the host by the engine``); microseconds of small calls over their MiB
        (``small``, ``large``), and with two such GPUs of sums over both (``one shot``, ``two
        shots``).
    took_s : float
    file : Path
        Where they are kept.
    """

    machine: tuning.Machine
    figures: Mapping[str, int]
    curves: Mapping[str, list[tuple[float, float]]]
    took_s: float
    file: Path


def calibrate(say: Say = lambda _: None) -> Calibration:
    """Measure this machine for "auto", in under a minute, and keep the figures beside the cache.

    They are used from now on, in this process and in all that start later on a machine with the
    same GPU, driver and processor; without them those of an H200 are. It takes a pool of pinned
    memory of 4 to 32 GiB, a quarter of what is free, and wants an idle machine.

    Parameters
    ----------
    say
        Is told what is being measured.

    Raises
    ------
    UnsupportedError
        No GPU, or less than 16 GiB of host memory free.
    CacheError
        The figures cannot be written, or others could write to them.
    """
    import torch

    from jitkern.offload import PinnedPool

    if not torch.cuda.is_available():
        raise UnsupportedError("calibrate: no GPU; run it where the ops will run")
    started = time.perf_counter()
    tuning.check_writable()
    pool_gib = _pool_gib(free_bytes() or 0)
    machine = this_machine(torch.cuda.current_device())
    say(f"pinning {pool_gib} GiB")
    # On a stream of its own: the default one takes no batch of copies.
    with (
        PinnedPool(pool_gib * _GIB, progress=False) as pool,
        _as_before() as set_figure,
        torch.cuda.stream(torch.cuda.Stream()),  # type: ignore[no-untyped-call]
    ):
        bench = _Bench(pool.tensor())
        say("how far the link's address translation reaches")
        spans = [gib for gib in (0.25, 0.5, 1, 1.5, 2, 4, 8, 16, 32) if gib <= pool_gib]
        as_they_come = [(gib, bench.gather(gib, order="given")) for gib in spans]
        say("small calls")
        small, large = bench.small_calls(set_figure)
        say("blocks by SMs and by the copy engine")
        blocks = {
            f"blocks{to_host} by {by}": [
                (kib, bench.blocks(kib, way, to_host)) for kib in _PIECES_KIB
            ]
            for to_host in ("", " to the host")
            for way, by in (("sm", "SMs"), ("engine", "the engine"))
        }
        say("ways through the CPU")
        threads = _thread_counts()
        far = [gib for gib in spans if gib >= 4]
        curves: dict[str, list[tuple[float, float]]] = {
            "as they come": as_they_come,
            "in order": [(gib, bench.gather(gib, order="source")) for gib in spans],
            "small": small,
            "large": large,
            **blocks,
            "by the CPU, of threads": [(n, bench.by_cpu(spans[-1], "cpu", n)) for n in threads],
            "both ways, of threads": [(n, bench.by_cpu(spans[-1], "both", n)) for n in threads],
            "both ways": [(gib, bench.by_cpu(gib, "both", threads[-1])) for gib in far],
            "scatter, in order": [(gib, bench.scatter(gib, "sm")) for gib in far],
            "scatter by the CPU": [(gib, bench.scatter(gib, "cpu", threads[-1])) for gib in far],
            "scatter by the CPU, of threads": [
                (n, bench.scatter(spans[-1], "cpu", n)) for n in threads
            ],
        }
    say("sums over two GPUs")
    alike = [one for one in range(torch.cuda.device_count()) if this_machine(one) == machine]
    curves |= _sums(alike[:2])
    figures = figures_of(curves)
    took_s = time.perf_counter() - started
    file = tuning.save(machine, figures, curves=curves, took_s=took_s, unix_s=time.time())
    for ordinal in alike:
        for name, value in figures.items():
            module()["set_figure"](ordinal, name, value)
    return Calibration(machine, figures, curves, took_s, file)


def this_machine(ordinal: int) -> tuning.Machine:
    """Return what this process runs on, with the GPU of this number."""
    host = module()
    return tuning.machine_with(str(host["gpu_name"](ordinal)), int(host["driver_version"]()))


def _pool_gib(free: int) -> int:
    """Return the size of the pool: a quarter of what is free."""
    for gib in _POOLS_GIB:
        if 4 * gib * _GIB <= free:
            return gib
    raise UnsupportedError(
        f"calibrate: {free / _GIB:.1f} GiB of host memory are free, expected 16 or more, of "
        "which a quarter is pinned; end what takes it, or raise the container's limit"
    )


# -- what follows from what was measured -----------------------------------------------------------


def figures_of(curves: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, int]:
    """Return the figures that "auto" reads, of the curves of :class:`Calibration`."""
    in_order, scatter = dict(curves["in order"]), dict(curves["scatter, in order"])
    farthest = max(scatter)
    figures = {
        "reach_bytes": _reach_bytes(curves["as they come"]),
        "small_call_bytes": _faster_bytes(curves["small"], curves["large"]),
        "sm_piece_bytes": _sm_piece_bytes(curves["blocks by SMs"], curves["blocks by the engine"]),
        "sm_piece_bytes_to_host": _sm_piece_bytes(
            curves["blocks to the host by SMs"], curves["blocks to the host by the engine"]
        ),
        "paced_to_host_mb_s": int(
            1000 * _PACE * max(speed for _, speed in curves["blocks to the host by SMs"])
        ),
        "page_miss_bytes": _page_miss_bytes(curves["in order"]),
        "both_threads": _threads(curves["both ways, of threads"], in_order[farthest]),
        "cpu_scatter_span_bytes": _span_bytes(curves["scatter by the CPU"], scatter),
        "cpu_scatter_threads": _threads(
            curves["scatter by the CPU, of threads"], scatter[farthest]
        ),
        "one_shot_bytes": _faster_bytes(curves["one shot"], curves["two shots"])
        if "one shot" in curves
        else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _reach_bytes(gb_s: Sequence[tuple[float, float]]) -> int | None:
    """Return the span up to which random rows hit in the link's address translation.

    Beyond it a part ``1 - reach / span`` of the rows misses, and each that does takes as much
    longer: far off a row's time is a straight line over ``1 / span``. The knee is not sharp: the
    least reach counts that a span with more than noise tells of, for to sort in vain costs 10 us.
    """
    row_ns = [(gib, _ROW_BYTES / speed) for gib, speed in gb_s]
    hit_ns = row_ns[0][1]
    far = [(1 / gib, ns) for gib, ns in row_ns if gib >= 4]
    if len(far) < 2:
        return None
    _, all_miss_ns = statistics.linear_regression(*zip(*far, strict=True))
    if all_miss_ns < 1.2 * hit_ns:
        return _NEVER
    missed = [(gib, (ns - hit_ns) / (all_miss_ns - hit_ns)) for gib, ns in row_ns]
    reach_gib = min(gib * (1 - part) for gib, part in missed if part > 0.1)
    return int(_GIB * max(reach_gib, gb_s[0][0]))  # beside other work any point may be slow


def _page_miss_bytes(gb_s: Sequence[tuple[float, float]]) -> int | None:
    """Return what the link carries while it translates a page, of rows in order.

    Of spans so large that most rows are alone on their page.
    """
    best = max(speed for _, speed in gb_s)
    found = []
    for gib, speed in gb_s:
        pages = gib * _GIB / _PAGE_BYTES
        if 1.2 * pages >= _ROWS:
            touched = -pages * math.expm1(-_ROWS / pages)
            found.append(_ROWS * _ROW_BYTES * (best / speed) / touched)
    return round(statistics.median(found)) if found else None


def _faster_bytes(
    small: Sequence[tuple[float, float]], large: Sequence[tuple[float, float]]
) -> int:
    """Return the size of the largest call up to which all are faster in the way of small ones.

    That takes more of the machine, so where both are as fast the other is better.
    """
    found = small[0][0] / 4
    for (mib, small_us), (_, large_us) in zip(small, large, strict=True):
        if 1.01 * small_us > large_us:
            break
        found = mib
    return int(found * (1 << 20))


def _sm_piece_bytes(
    by_sms: Sequence[tuple[float, float]], by_engine: Sequence[tuple[float, float]]
) -> int:
    """Return the largest piece of a block that SMs move faster than the copy engine.

    Up to a tenth it may be slower: it takes no SM from a model beside it.
    """
    found = by_sms[0][0] / 2
    for (kib, sms), (_, engine) in zip(by_sms, by_engine, strict=True):
        if engine > 0.9 * sms:
            break
        found = kib
    return int(found * 1024)


def _span_bytes(gb_s: Sequence[tuple[float, float]], beside: Mapping[float, float]) -> int:
    """Return the span from which on a way is faster than that beside it."""
    found = 2 * max(gib for gib, _ in gb_s)  # beyond what was measured
    for gib, speed in sorted(gb_s, reverse=True):
        if speed < _WORTH * beside[gib]:
            break
        found = gib
    return int(0.95 * found * _GIB)  # whole rows take a little less


def _threads(gb_s: Sequence[tuple[float, float]], beside: float) -> int:
    """Return the number of threads from which on a way is faster than that beside it."""
    found = 2 * max(n for n, _ in gb_s)
    for n, speed in sorted(gb_s, reverse=True):
        if speed < _WORTH * beside:
            break
        found = n
    return int(found)


# -- measuring -------------------------------------------------------------------------------------


@contextmanager
def _as_before() -> Iterator[Callable[[str, int], None]]:
    """Give a function that sets a figure of the current GPU, until the body is left."""
    import torch

    ordinal = torch.cuda.current_device()
    before = dict(module()["figures"](ordinal))

    def set_figure(name: str, value: int) -> None:
        module()["set_figure"](ordinal, name, value)

    try:
        yield set_figure
    finally:
        for name, value in before.items():
            set_figure(str(name), int(value))


def _thread_counts() -> list[int]:
    """1, 2, 4, ... and as many as a call takes by default."""
    import torch

    most = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most] + [most]


def _sums(ordinals: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """Return microseconds over MiB; nothing without two GPUs that address each other's memory."""
    import torch
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from jitkern.comm import PeerMemory, PeerReducer

    num_bytes = PeerReducer.workspace_bytes_for(2, 4 << 20)
    devices = [torch.device("cuda", ordinal) for ordinal in ordinals]
    if len(devices) < 2:
        return {}
    store = HashStore()  # the ranks are threads of this process

    def join(rank: int) -> PeerMemory:
        return PeerMemory(num_bytes, store, rank=rank, size=2, device=devices[rank], timeout_s=60)

    try:
        with ThreadPoolExecutor(2) as threads:
            peers = list(threads.map(join, range(2)))
    except UnsupportedError:
        return {}
    reducers = [
        PeerReducer(peer.addresses, rank, 2, num_bytes, device=devices[rank])
        for rank, peer in enumerate(peers)
    ]
    for reducer in reducers:
        reducer.reset()
    curves = {
        name: [(mib, _us_of_sums(reducers, mib, algorithm)) for mib in _SUMS_MIB]
        for name, algorithm in (("one shot", "one_shot"), ("two shots", "two_shot"))
    }
    for peer in peers:
        peer.close()
    return curves


def _us_of_sums(reducers: Sequence[Any], mib: float, algorithm: Any) -> float:
    import torch

    count = int(mib * (1 << 19))
    xs = [torch.zeros(count, dtype=torch.bfloat16, device=one.device) for one in reducers]

    def call_all() -> None:
        for reducer, x in zip(reducers, xs, strict=True):
            reducer.all_reduce(x, algorithm=algorithm)

    def finish() -> None:
        for reducer in reducers:
            reducer.synchronize()

    call_all()
    finish()
    graphs = []
    for reducer, x in zip(reducers, xs, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        stream: Any = torch.cuda.Stream(reducer.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(reducer.device), torch.cuda.graph(graphs[-1], stream=stream):
            for _ in range(_SUMS):
                reducer.all_reduce(x, algorithm=algorithm)
    taken = []
    for _ in range(_SETS):
        finish()
        started = time.perf_counter()
        for graph in graphs:
            graph.replay()
        finish()
        taken.append(time.perf_counter() - started)
    return 1e6 * min(taken) / _SUMS


class _Bench:
    """Random distinct rows of a pool, as many times as there are sets of their numbers."""

    def __init__(self, pool: Tensor) -> None:
        import torch

        self._pool = pool
        self._dst = torch.empty(_DEVICE_ROWS, _ROW_BYTES, dtype=torch.uint8, device="cuda")

    def gather(self, gib: float, order: Any) -> float:
        """Return GB/s of SMs, the row numbers on the GPU."""
        src = self._rows(gib)
        sets = [pairs.cuda() for pairs in self._sets(len(src), _ROWS)]
        return self._gb_s(lambda pairs: h2d_gather(src, self._dst, pairs, order=order), sets)

    def by_cpu(self, gib: float, method: Any, num_threads: int) -> float:
        """Return GB/s with row numbers on the host."""
        src = self._rows(gib)

        def run(pairs: Tensor) -> None:
            h2d_gather(src, self._dst, pairs, method=method, num_threads=num_threads)

        return self._gb_s(run, self._sets(len(src), _ROWS))

    def scatter(self, gib: float, method: Any, num_threads: int | None = None) -> float:
        """Return GB/s into the pool, with row numbers on the host."""
        dst = self._rows(gib)

        def run(pairs: Tensor) -> None:
            d2h_scatter(self._dst, dst, pairs, method=method, num_threads=num_threads)

        sets = [pairs.flip(1).contiguous() for pairs in self._sets(len(dst), _ROWS)]
        return self._gb_s(run, sets)

    def blocks(self, kib: float, method: Any, to_host: str) -> float:
        """Return GB/s of 256 MiB in blocks of so many KiB a layer, their numbers on the host."""
        import torch

        piece_bytes = int(kib * 1024)
        block_bytes = _LAYERS * piece_bytes
        count = (256 << 20) // block_bytes
        host = self._pool[: 2 * _GIB].view(_LAYERS, -1, piece_bytes)
        gpu = self._dst.view(-1)[: count * block_bytes].view(_LAYERS, -1, piece_bytes)
        dst, src = (host, gpu) if to_host else (gpu, host)
        picked = [[torch.randperm(t.shape[1])[:count] for t in (src, dst)] for _ in range(_SETS)]
        sets = [torch.stack(pairs, 1) for pairs in picked]
        run = lambda pairs: copy_blocks(dst, src, pairs, method=method)  # noqa: E731
        return count * block_bytes / statistics.median(self._seconds(run, sets)) / 1e9

    def small_calls(
        self, set_figure: Callable[[str, int], None]
    ) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Return the microseconds of calls of 0.25 to 16 MiB as small ones and as large ones."""
        src = self._rows(0.25)
        found: dict[int, list[tuple[float, float]]] = {_NEVER: [], 1: []}
        for mib in (0.25, 0.5, 1, 2, 4, 8, 16):
            count = int(mib * (1 << 20)) // _ROW_BYTES
            sets = [pairs.cuda() for pairs in self._sets(len(src), count, 5 * _SETS)]
            for limit, times in found.items():
                set_figure("small_call_bytes", limit)
                # The least: a call of 25 us, and the wait for it, is disturbed by anything.
                taken = self._seconds(self._gather_given(src), sets)
                times.append((mib, 1e6 * min(taken)))
        return found[_NEVER], found[1]

    def _gather_given(self, src: Tensor) -> Callable[[Tensor], None]:
        return lambda pairs: h2d_gather(src, self._dst, pairs, order="given", dedup=False)

    def _rows(self, gib: float) -> Tensor:
        count = int(gib * _GIB) // _ROW_BYTES
        return self._pool[: count * _ROW_BYTES].view(count, _ROW_BYTES)

    def _sets(self, num_rows: int, count: int, num_sets: int = _SETS) -> list[Tensor]:
        """Return (row of the pool, row of the GPU), all distinct, on the host."""
        import torch

        sets = []
        for _ in range(num_sets):
            drawn: Any = torch.randint(num_rows, (count + count // 4,), device="cuda")
            rows = drawn.unique()
            rows = rows[torch.randperm(len(rows), device="cuda")][:count]
            to = torch.randperm(_DEVICE_ROWS, device="cuda")[: len(rows)]
            sets.append(torch.stack([rows, to], 1).cpu())
        return sets

    def _gb_s(self, run: Callable[[Tensor], None], sets: Sequence[Tensor]) -> float:
        seconds = statistics.median(self._seconds(run, sets))
        return min(map(len, sets)) * _ROW_BYTES / seconds / 1e9

    @staticmethod
    def _seconds(run: Callable[[Tensor], None], sets: Sequence[Tensor]) -> list[float]:
        """Return what each call took but the first, which may compile and pin."""
        import torch

        taken = []
        for pairs in sets:
            torch.cuda.synchronize()
            started = time.perf_counter()
            run(pairs)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return taken[1:]
