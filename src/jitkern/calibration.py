"""Figures of a machine by which "auto" decides: how they are measured, and where they are kept.

``jitkern calibrate`` writes them into the cache folder, for one model of GPU, driver and processor.
The host module reads them.
"""

from __future__ import annotations

import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import fs
from jitkern.cache.get import folders, user_cache
from jitkern.cache.trust import written_by_others
from jitkern.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

Curve = Sequence[tuple[float, float]]

# -- the file --------------------------------------------------------------------------------------

_FORMAT = 2


@dataclass(frozen=True)
class Machine:
    """The machine that figures hold for."""

    gpu: str
    driver: str
    cpu: str
    num_cores: int

    @property
    def file_name(self) -> str:
        return f"calibration-{fs.digest([_FORMAT, asdict(self)])}.json"


def machine_with(gpu: str, cuda_version: int) -> Machine:
    """Return this machine with a GPU of this name; `cuda_version` of its driver, such as 13000."""
    driver = kernel_driver() or f"for CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
    return Machine(gpu, driver, processor(), len(os.sched_getaffinity(0)))


def kernel_driver() -> str:
    """Return the version of the driver's kernel module, such as 580.95.05; empty if unknown."""
    text = fs.text_of(Path("/proc/driver/nvidia/version"))
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", text, re.MULTILINE)
    return found[1] if found else ""


def processor() -> str:
    """Return the processor's model; its architecture if Linux does not say."""
    found = re.search(r"^model name\s*: *(.+)$", fs.text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def find(gpu: str, cuda_version: int) -> tuple[Path, Mapping[str, int]] | None:
    """Return the file of this machine and its figures; a damaged one is a warning."""
    machine = machine_with(gpu, cuda_version)
    for file in (folder / machine.file_name for folder in folders()):
        try:
            return file, _figures_in(file)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"jitkern: {file} is not used: {error}; run jitkern calibrate, or delete it"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return None


def _figures_in(file: Path) -> Mapping[str, int]:
    with open(fs.open_regular(file), "rb") as stream:
        if reason := written_by_others(os.fstat(stream.fileno())):
            raise ValueError(reason)
        figures: dict[str, Any] = fs.parse_json(stream.read(1 << 20))["figures"]
    if not all(type(value) is int and 0 < value < 1 << 62 for value in figures.values()):
        raise ValueError("figures are positive ints")
    return figures


def save(machine: Machine, figures: Mapping[str, int], **measured: Any) -> Path:
    """Write the figures of a machine to the user's cache; return the file."""
    file = user_cache().root / machine.file_name
    content = {"machine": asdict(machine), "figures": dict(figures), **measured}
    fs.make_folders(file.parent)  # 0700 under any umask: one that a group may write is not used
    fs.write_whole(file, fs.canonical_json(content) + b"\n", flush=True)
    return file


# -- calibrate -------------------------------------------------------------------------------------

_GIB = 1 << 30
_ROW_BYTES = 656  # an MLA row with its scales
_ROWS = 131_072
_SETS = 5  # lists of rows, each used once: afterwards the GPU's L2 has their page table entries
_NEVER = 1 << 60
_PACE = 0.61  # of the SMs' write speed to the host: above, all traffic of the GPU waits
_SPANS_GIB = (0.25, 0.5, 1, 1.5, 2, 4, 8, 16, 32)
_PIECES_KIB = (16, 32, 64, 128, 256, 512, 1024)
_SMALL_MIB = (0.25, 0.5, 1, 2, 4, 8, 16)
_POOLS_GIB = (32, 16, 8, 4)  # less would not exceed the reach of the link's address translation


@dataclass(frozen=True)
class Calibration:
    """The figures that "auto" reads, and the curves of (x, GB/s) that they were derived from.

    Curves of rows of 656 bytes are over the GiB of their pool or the threads of the CPU, those of
    small calls over their MiB, those of blocks over the KiB of one layer.
    """

    machine: Machine  # for which the figures hold
    figures: Mapping[str, int]
    curves: Mapping[str, Curve]
    took_s: float
    file: Path  # where they are kept


def calibrate(say: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measure this machine for "auto", in under a minute, and keep the figures beside the cache.

    This process uses them from now on, and later ones on a machine with the same GPU, driver and
    processor. Without them the figures of an H200 hold. It pins a quarter of the free memory, 4 to
    32 GiB, and wants an idle machine. `say` receives the name of each measurement.

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
    cache, host = user_cache(), module()
    cache.check()
    fs.require_writable(cache.root, "set JITKERN_CACHE_DIR to a directory of yours")
    pool_gib = _pool_gib(fs.free_bytes() or 0)
    names = [str(host["gpu_name"](ordinal)) for ordinal in range(torch.cuda.device_count())]
    gpu = names[torch.cuda.current_device()]
    machine = machine_with(gpu, int(host["driver_version"]()))
    say(f"pinning {pool_gib} GiB")
    # On a stream of its own: the default one takes no batch of copies.
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with PinnedPool(pool_gib * _GIB, progress=False) as pool, torch.cuda.stream(stream):
        curves = _measure(pool.tensor(), pool_gib, say)
    figures = figures_of(curves)
    file = save(machine, figures, curves=curves)
    for ordinal in (i for i, name in enumerate(names) if name == gpu):
        for name, value in figures.items():
            host["set_figure"](ordinal, name, value)
    return Calibration(machine, figures, curves, time.perf_counter() - started, file)


def _pool_gib(free: int) -> int:
    """Return the size of the pool: a quarter of what is free."""
    for gib in _POOLS_GIB:
        if 4 * gib * _GIB <= free:
            return gib
    raise UnsupportedError(
        f"calibrate: {free / _GIB:.1f} GiB of host memory are free, expected 16 or more, of "
        "which a quarter is pinned; end what takes it, or raise the container's limit"
    )


def figures_of(curves: Mapping[str, Curve]) -> dict[str, int]:
    """Return the figures that "auto" reads, from the curves of ``Calibration``."""
    spans, threads = curves["as they come"], curves["both ways, of threads"]
    nearby = [(gib, spans[0][1]) for gib, _ in spans]
    reach_gib = _up_to(spans, nearby, 0.9)
    in_order = curves["in order"][-1][1]
    fast = [count for count, gb_s in threads if gb_s >= 1.03 * in_order]
    figures = {
        "reach_bytes": _NEVER if reach_gib == spans[-1][0] else reach_gib * _GIB,
        # Small calls take more of the machine, so at the same speed the other way is better.
        "small_call_bytes": _up_to(curves["small"], curves["large"], 1.01) * (1 << 20),
        "both_threads": min(fast, default=2 * threads[-1][0]),
    }
    for name, way in (("", ""), ("_to_host", " to the host")):
        by_sms, by_engine = curves[f"blocks{way} by SMs"], curves[f"blocks{way} by the engine"]
        # The engine may be a tenth slower: it takes no SM from a model beside it.
        figures[f"sm_piece_bytes{name}"] = _up_to(by_sms, by_engine, 1 / 0.9) * 1024
    figures["paced_to_host_mb_s"] = 1000 * _PACE * max(gb_s for _, gb_s in by_sms)
    return {name: int(value) for name, value in figures.items()}


def _up_to(curve: Curve, other: Curve, times: float) -> float:
    """Return the last point up to which a way is at least so many times as fast as the other."""
    found = curve[0][0] / 2
    for (point, gb_s), (_, others_gb_s) in zip(curve, other, strict=True):
        if gb_s < times * others_gb_s:
            break
        found = point
    return found


# -- measuring -------------------------------------------------------------------------------------


def _measure(pool: Tensor, pool_gib: int, say: Callable[[str], None]) -> dict[str, Curve]:
    """Return the curves of random rows and blocks between the pool and the GPU."""
    import torch

    from jitkern.host.module import module
    from jitkern.ops.copy_blocks import copy_blocks
    from jitkern.ops.h2d_gather import h2d_gather

    on_gpu = torch.empty(4 * _ROWS, _ROW_BYTES, dtype=torch.uint8, device="cuda")
    ordinal, figure = on_gpu.device.index, "small_call_bytes"

    def gather(gib: float, count: int = _ROWS, *, on: str = "cuda", **how: Any) -> float:
        num_rows = int(gib * _GIB) // _ROW_BYTES
        src = pool[: num_rows * _ROW_BYTES].view(num_rows, _ROW_BYTES)
        num_sets = _SETS if count == _ROWS else 5 * _SETS  # anything disturbs a call of 25 us
        sets = [_pairs(num_rows, len(on_gpu), count).to(on) for _ in range(num_sets)]
        return _gb_s(lambda pairs: h2d_gather(src, on_gpu, pairs, **how), sets, count * _ROW_BYTES)

    def small(limit: int) -> list[tuple[float, float]]:
        module()["set_figure"](ordinal, figure, limit)
        how: dict[str, Any] = {"order": "given", "dedup": False, "method": "sm"}
        counts = [(mib, int(mib * (1 << 20)) // _ROW_BYTES) for mib in _SMALL_MIB]
        return [(mib, gather(0.25, count, **how)) for mib, count in counts]

    def blocks(kib: int, method: Any, to_host: str) -> float:
        layers, piece_bytes = 32, kib * 1024
        count = (256 << 20) // (layers * piece_bytes)
        host = pool[: 2 * _GIB].view(layers, -1, piece_bytes)
        gpu = on_gpu.view(-1)[: 256 << 20].view(layers, -1, piece_bytes)
        dst, src = (host, gpu) if to_host else (gpu, host)
        sets = [_pairs(src.shape[1], dst.shape[1], count).cpu() for _ in range(_SETS)]
        return _gb_s(lambda pairs: copy_blocks(src, dst, pairs, method=method), sets, 256 << 20)

    say("how far the link's address translation reaches")
    spans = [gib for gib in _SPANS_GIB if gib <= pool_gib]
    curves: dict[str, Curve] = {}
    curves["as they come"] = [(gib, gather(gib, order="given", method="sm")) for gib in spans]
    say("small calls")
    before = int(module()["figures"](ordinal)[figure])
    try:
        curves |= {"small": small(_NEVER), "large": small(1)}
    finally:
        module()["set_figure"](ordinal, figure, before)
    say("blocks by SMs and by the copy engine")
    for to_host in ("", " to the host"):
        for method, by in (("sm", "SMs"), ("engine", "the engine")):
            curve = [(kib, blocks(kib, method, to_host)) for kib in _PIECES_KIB]
            curves[f"blocks{to_host} by {by}"] = curve
    say("by the CPU and by SMs at once")
    curves["in order"] = [(spans[-1], gather(spans[-1], order="host", method="sm"))]
    most = max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))
    counts = [*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < most), most]
    on_cpu: dict[str, Any] = {"on": "cpu", "method": "both"}
    both = [(count, gather(spans[-1], num_threads=count, **on_cpu)) for count in counts]
    return {**curves, "both ways, of threads": both}


def _pairs(num_from: int, num_to: int, count: int) -> Tensor:
    """Return random (source, destination), all distinct."""
    import torch

    return torch.stack([torch.randperm(n, device="cuda")[:count] for n in (num_from, num_to)], 1)


def _gb_s(run: Callable[[Tensor], None], sets: Sequence[Tensor], num_bytes: int) -> float:
    """Return the speed of the fastest call, without the first, which may compile and pin."""
    import torch

    taken = []
    for pairs in sets:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run(pairs)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return num_bytes / min(taken[1:]) / 1e9
