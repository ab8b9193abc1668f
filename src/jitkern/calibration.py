"""Figures of a machine by which "auto" decides: how they are measured, and where they are kept.

``jitkern calibrate`` writes them beside the cache, for one model of GPU, driver and processor. The
host module reads them, so nothing that measures is imported before it measures.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.cache.get import folders, user_cache
from jitkern.cache.trust import written_by_others
from jitkern.errors import UnsupportedError
from jitkern.fs import (
    canonical_json,
    digest,
    free_bytes,
    make_folders,
    open_regular,
    parse_json,
    require_writable,
    write_whole,
)

if TYPE_CHECKING:
    from torch import Tensor

Say = Callable[[str], None]
Curve = Sequence[tuple[float, float]]

# -- the file --------------------------------------------------------------------------------------

_MAX_BYTES = 1 << 20
_FORMAT = 1


@dataclass(frozen=True)
class Machine:
    """The machine that figures hold for."""

    gpu: str
    driver: str
    cpu: str
    num_cores: int

    @property
    def file_name(self) -> str:
        """Name of the file of its figures."""
        return f"calibration-{digest(asdict(self))}.json"

    def __str__(self) -> str:
        return f"{self.gpu}, driver {self.driver}, {self.num_cores} cores of {self.cpu}"


def machine_with(gpu: str, cuda_version: int) -> Machine:
    """Return this machine with a GPU of this name; `cuda_version` of its driver, such as 13000."""
    driver = kernel_driver() or f"for CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
    return Machine(gpu, driver, processor(), len(os.sched_getaffinity(0)))


def kernel_driver() -> str:
    """Return the version of the driver's kernel module, such as 580.95.05; empty if unknown."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def processor() -> str:
    """Return the processor's model; its architecture if Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured_figures(gpu: str, cuda_version: int) -> Mapping[str, int]:
    """Return the figures that were measured on a machine like this one, if any."""
    found = find(gpu, cuda_version)
    return {} if found is None else found[1]["figures"]


def find(gpu: str, cuda_version: int) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the file of this machine and its content; one that is damaged is a warning."""
    machine = machine_with(gpu, cuda_version)
    for folder in folders():
        file = folder / machine.file_name
        try:
            return file, _content(file, machine)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            warnings.warn(
                f"jitkern: {file} is not used: {reason}; run jitkern calibrate, or delete it",
                RuntimeWarning,
                stacklevel=2,
            )
    return None


def _content(file: Path, machine: Machine) -> Mapping[str, Any]:
    with open(open_regular(file), "rb") as stream:
        if reason := written_by_others(os.fstat(stream.fileno())):
            raise ValueError(reason)
        content = parse_json(stream.read(_MAX_BYTES))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"not of format {_FORMAT}")
    if content.get("machine") != asdict(machine):
        raise ValueError("of another machine")
    figures = content.get("figures")
    if not isinstance(figures, dict) or not all(
        type(value) is int and 0 < value < 1 << 62 for value in figures.values()
    ):
        raise ValueError("figures are positive ints")
    return content


def save(machine: Machine, figures: Mapping[str, int], **measured: Any) -> Path:
    """Write the figures of a machine to the user's cache; return the file."""
    file = user_cache().root / machine.file_name
    content = {"format": _FORMAT, "machine": asdict(machine), "figures": dict(figures), **measured}
    make_folders(file.parent)  # 0700 under any umask: a cache that a group may write is not used
    write_whole(file, canonical_json(content) + b"\n", flush=True)
    return file


# -- calibrate -------------------------------------------------------------------------------------

_GIB = 1 << 30
_ROW_BYTES = 656  # an MLA row with its scales, as in all measurements of this project
_ROWS = 131_072
_DEVICE_ROWS = 4 * _ROWS
_SETS = 5  # of row numbers, each used once: a second time the GPU's L2 knows their pages
_NEVER = 1 << 60
_PAGE_BYTES = 64 << 10  # that the link's translation treats as one
_WORTH = 1.03  # how much faster a way has to be that takes more of the machine
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
        What they come from: GB/s of rows of 656 bytes over the GiB of their pool or the threads of
        the CPU, GB/s of blocks over the KiB of one layer, microseconds of small calls over MiB;
        with two such GPUs also of their sums (``one shot``, ``two shots``).
    took_s : float
    file : Path
        Where they are kept.
    """

    machine: Machine
    figures: Mapping[str, int]
    curves: Mapping[str, list[tuple[float, float]]]
    took_s: float
    file: Path


def calibrate(say: Say = lambda _: None) -> Calibration:
    """Measure this machine for "auto", in under a minute, and keep the figures beside the cache.

    They are used from now on, by this process and by later ones on a machine with the same GPU,
    driver and processor; without them those of an H200 are. It pins 4 to 32 GiB of memory, a
    quarter of what is free, and wants an idle machine.

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

    from jitkern.host.module import module
    from jitkern.offload import PinnedPool

    if not torch.cuda.is_available():
        raise UnsupportedError("calibrate: no GPU; run it where the ops will run")
    started = time.perf_counter()
    cache = user_cache()
    cache.check()
    require_writable(cache.root, "set JITKERN_CACHE_DIR to a directory of yours")
    pool_gib = _pool_gib(free_bytes() or 0)
    machine = _this_machine(torch.cuda.current_device())
    say(f"pinning {pool_gib} GiB")
    # On a stream of its own: the default one takes no batch of copies.
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with PinnedPool(pool_gib * _GIB, progress=False) as pool, torch.cuda.stream(stream):
        curves = _measure(_Bench(pool.tensor()), pool_gib, say)
    alike = [one for one in range(torch.cuda.device_count()) if _this_machine(one) == machine]
    if len(alike) > 1:
        say("sums over two GPUs")
        curves |= _sums(alike[:2])
    figures = figures_of(curves)
    took_s = time.perf_counter() - started
    file = save(machine, figures, curves=curves, took_s=took_s, unix_s=time.time())
    for ordinal in alike:
        for name, value in figures.items():
            module()["set_figure"](ordinal, name, value)
    return Calibration(machine, figures, curves, took_s, file)


def _measure(bench: _Bench, pool_gib: int, say: Say) -> dict[str, list[tuple[float, float]]]:
    import torch

    spans = [gib for gib in (0.25, 0.5, 1, 1.5, 2, 4, 8, 16, 32) if gib <= pool_gib]
    far = [gib for gib in spans if gib >= 4]
    most = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))
    threads = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < most] + [most]
    say("how far the link's address translation reaches")
    curves = {
        "as they come": [(gib, bench.gather(gib, order="given", method="sm")) for gib in spans]
    }
    say("small calls")
    curves["small"], curves["large"] = bench.small_calls()
    say("blocks by SMs and by the copy engine")
    for to_host in ("", " to the host"):
        for way, by in (("sm", "SMs"), ("engine", "the engine")):
            curves[f"blocks{to_host} by {by}"] = [
                (kib, bench.blocks(kib, way, to_host)) for kib in _PIECES_KIB
            ]
    say("ways through the CPU")
    curves |= {
        "in order": [(gib, bench.gather(gib, order="host", method="sm")) for gib in spans],
        "both ways, of threads": [
            (n, bench.gather(spans[-1], on_host=True, method="both", num_threads=n))
            for n in threads
        ],
        "scatter, in order": [(gib, bench.scatter(gib, method="sm")) for gib in far],
        "scatter by the CPU": [
            (gib, bench.scatter(gib, method="cpu", num_threads=threads[-1])) for gib in far
        ],
        "scatter by the CPU, of threads": [
            (n, bench.scatter(spans[-1], method="cpu", num_threads=n)) for n in threads
        ],
    }
    return curves


def _sums(ordinals: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """Return microseconds over MiB; nothing if the GPUs do not address each other's memory."""
    import torch
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from jitkern.comm import PeerMemory, PeerReducer

    num_bytes = PeerReducer.workspace_bytes_for(2, 4 << 20)
    devices = [torch.device("cuda", ordinal) for ordinal in ordinals]
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


def _us_of_sums(reducers: Sequence[Any], mib: float, algorithm: str) -> float:
    """Return the microseconds of a sum in a CUDA graph of each GPU."""
    import torch

    xs = [
        torch.zeros(int(mib * (1 << 19)), dtype=torch.bfloat16, device=one.device)
        for one in reducers
    ]
    graphs: list[Any] = []
    for is_warm in (False, True):
        for reducer, x in zip(reducers, xs, strict=True):
            if not is_warm:
                reducer.all_reduce(x, algorithm=algorithm)
                continue
            graphs.append(torch.cuda.CUDAGraph())
            stream: Any = torch.cuda.Stream(reducer.device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(reducer.device), torch.cuda.graph(graphs[-1], stream=stream):
                for _ in range(_SUMS):
                    reducer.all_reduce(x, algorithm=algorithm)
        for reducer in reducers:
            reducer.synchronize()
    taken = []
    for _ in range(_SETS):
        started = time.perf_counter()
        for graph in graphs:
            graph.replay()
        for reducer in reducers:
            reducer.synchronize()
        taken.append(time.perf_counter() - started)
    return 1e6 * min(taken) / _SUMS


def _this_machine(ordinal: int) -> Machine:
    from jitkern.host.module import module

    host = module()
    return machine_with(str(host["gpu_name"](ordinal)), int(host["driver_version"]()))


def _pool_gib(free: int) -> int:
    """Return the size of the pool: a quarter of what is free."""
    for gib in _POOLS_GIB:
        if 4 * gib * _GIB <= free:
            return gib
    raise UnsupportedError(
        f"calibrate: {free / _GIB:.1f} GiB of host memory are free, expected 16 or more, of "
        "which a quarter is pinned; end what takes it, or raise the container's limit"
    )


# -- figures that follow from curves ---------------------------------------------------------------


def figures_of(curves: Mapping[str, Curve]) -> dict[str, int]:
    """Return the figures that "auto" reads, from the curves of :class:`Calibration`."""
    in_order, scatter = dict(curves["in order"]), dict(curves["scatter, in order"])
    farthest = max(scatter)
    scatter_span = _wins_from(curves["scatter by the CPU"], scatter.__getitem__)
    most_to_host = max(speed for _, speed in curves["blocks to the host by SMs"])
    figures: dict[str, float | None] = {
        "reach_bytes": _reach_bytes(curves["as they come"]),
        # Small calls take more of the machine, so at the same speed the other way is better.
        "small_call_bytes": _small_bytes(curves["small"], curves["large"]),
        "sm_piece_bytes": _sm_piece_bytes(curves, ""),
        "sm_piece_bytes_to_host": _sm_piece_bytes(curves, " to the host"),
        "paced_to_host_mb_s": 1000 * _PACE * most_to_host,
        "page_miss_bytes": _page_miss_bytes(curves["in order"]),
        "both_threads": _wins_from(curves["both ways, of threads"], lambda _: in_order[farthest]),
        "cpu_scatter_span_bytes": 0.95 * scatter_span * _GIB,  # whole rows take a little less
        "cpu_scatter_threads": _wins_from(
            curves["scatter by the CPU, of threads"], lambda _: scatter[farthest]
        ),
        "one_shot_bytes": _small_bytes(curves["one shot"], curves["two shots"])
        if "one shot" in curves
        else None,
    }
    return {name: int(value) for name, value in figures.items() if value is not None}


def _reach_bytes(gb_s: Curve) -> float | None:
    """Return the span up to which random rows hit in the link's address translation.

    Beyond it a part ``1 - reach / span`` of the rows misses, and each miss takes as much longer:
    far off, the time of a row is a straight line over ``1 / span``. The knee is not sharp, so the
    least reach counts that any span with more than noise tells: sorting in vain costs only 10 us.
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
    return _GIB * max(reach_gib, gb_s[0][0])  # beside other work any point may be slow


def _page_miss_bytes(gb_s: Curve) -> int | None:
    """Return what the link carries while it translates a page, of rows in order.

    From spans so large that most rows are alone on their page.
    """
    best = max(speed for _, speed in gb_s)
    found = []
    for gib, speed in gb_s:
        pages = gib * _GIB / _PAGE_BYTES
        if 1.2 * pages >= _ROWS:
            touched = -pages * math.expm1(-_ROWS / pages)
            found.append(_ROWS * _ROW_BYTES * (best / speed) / touched)
    return round(statistics.median(found)) if found else None


def _small_bytes(small_us: Curve, large_us: Curve) -> float:
    """Return the size up to which the way of small calls is the faster one."""
    found = small_us[0][0] / 4
    for (mib, small), (_, large) in zip(small_us, large_us, strict=True):
        if 1.01 * small > large:
            break
        found = mib
    return found * (1 << 20)


def _sm_piece_bytes(curves: Mapping[str, Curve], to_host: str) -> float:
    """Return the largest piece of a block that SMs move faster than the copy engine.

    The engine may be a tenth slower: it takes no SM from a model beside it.
    """
    by_sms, by_engine = curves[f"blocks{to_host} by SMs"], curves[f"blocks{to_host} by the engine"]
    found = by_sms[0][0] / 2
    for (kib, sms), (_, engine) in zip(by_sms, by_engine, strict=True):
        if engine > 0.9 * sms:
            break
        found = kib
    return found * 1024


def _wins_from(gb_s: Curve, other: Callable[[float], float]) -> float:
    """Return the point from which on a way is faster than the other; beyond all if it never is."""
    found = 2 * max(x for x, _ in gb_s)
    for x, speed in sorted(gb_s, reverse=True):
        if speed < _WORTH * other(x):
            break
        found = x
    return found


# -- measuring -------------------------------------------------------------------------------------


class _Bench:
    """Random distinct rows of a pool of pinned memory, moved to the GPU and back."""

    def __init__(self, pool: Tensor) -> None:
        import torch

        self._pool = pool
        self._dst = torch.empty(_DEVICE_ROWS, _ROW_BYTES, dtype=torch.uint8, device="cuda")

    def gather(self, gib: float, *, on_host: bool = False, **how: Any) -> float:
        """Return GB/s to the GPU, with the row numbers there or on the host."""
        from jitkern.ops.h2d_gather import h2d_gather

        src = self._rows(gib)
        sets = self._sets(len(src), _ROWS)
        sets = sets if on_host else [pairs.cuda() for pairs in sets]
        return self._gb_s(lambda pairs: h2d_gather(src, self._dst, pairs, **how), sets)

    def scatter(self, gib: float, **how: Any) -> float:
        """Return GB/s into the pool, with the row numbers on the host."""
        from jitkern.ops.d2h_scatter import d2h_scatter

        dst = self._rows(gib)
        sets = [pairs.flip(1).contiguous() for pairs in self._sets(len(dst), _ROWS)]
        return self._gb_s(lambda pairs: d2h_scatter(self._dst, dst, pairs, **how), sets)

    def blocks(self, kib: float, method: Any, to_host: str) -> float:
        """Return GB/s of 256 MiB in blocks of so many KiB a layer, their numbers on the host."""
        import torch

        from jitkern.ops.copy_blocks import copy_blocks

        piece_bytes = int(kib * 1024)
        block_bytes = _LAYERS * piece_bytes
        count = (256 << 20) // block_bytes
        host = self._pool[: 2 * _GIB].view(_LAYERS, -1, piece_bytes)
        gpu = self._dst.view(-1)[: count * block_bytes].view(_LAYERS, -1, piece_bytes)
        dst, src = (host, gpu) if to_host else (gpu, host)
        picked = [[torch.randperm(t.shape[1])[:count] for t in (src, dst)] for _ in range(_SETS)]
        sets = [torch.stack(pairs, 1) for pairs in picked]
        taken = _seconds(lambda pairs: copy_blocks(src, dst, pairs, method=method), sets)
        return count * block_bytes / statistics.median(taken) / 1e9

    def small_calls(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Return the microseconds of calls of 0.25 to 16 MiB as small ones and as large ones."""
        import torch

        from jitkern.host.module import module
        from jitkern.ops.h2d_gather import h2d_gather

        src, ordinal, name = self._rows(0.25), torch.cuda.current_device(), "small_call_bytes"
        before = int(module()["figures"](ordinal)[name])
        found: dict[int, list[tuple[float, float]]] = {_NEVER: [], 1: []}

        def run(pairs: Tensor) -> None:
            h2d_gather(src, self._dst, pairs, order="given", dedup=False, method="sm")

        try:
            for mib in (0.25, 0.5, 1, 2, 4, 8, 16):
                count = int(mib * (1 << 20)) // _ROW_BYTES
                sets = [pairs.cuda() for pairs in self._sets(len(src), count, 5 * _SETS)]
                for limit, times in found.items():
                    module()["set_figure"](ordinal, name, limit)
                    # The least: a call of 25 us, and the wait for it, is disturbed by anything.
                    times.append((mib, 1e6 * min(_seconds(run, sets))))
        finally:
            module()["set_figure"](ordinal, name, before)
        return found[_NEVER], found[1]

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
        seconds = statistics.median(_seconds(run, sets))
        return min(map(len, sets)) * _ROW_BYTES / seconds / 1e9


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
