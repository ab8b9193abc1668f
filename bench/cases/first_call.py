"""The first call of a new row size: NVRTC of device code beside nvcc of a whole source file.

Every figure comes from fresh processes on two cores, after `import torch`, with an empty kernel
cache (cold) or the one that a process before left (warm). Runs with and without a GPU; with one, it
is the op itself that is called and waited for, so loading the image is in.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jitkern.bench.case import Context, Row, error_row
from jitkern.env import settings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "bench" / "peers"
# A multiple of 128, so that the nvcc peer compiles too, and sizes that no cache holds already.
ROW_BYTES, OTHER_ROW_BYTES = 4480, 4352
OPS = ("store", "index", "h2d_gather")
LARGE_CALL = "h2d_gather, large call"
FIRST_KERNEL = "first kernel of a process"
COLD, INLINE_COLD = "jitkern: NVRTC, cold", "load_inline with nvcc, cold"
WARM, INLINE_WARM = "jitkern: warm, new process", "load_module of it, new process"
FRESH = "first call of a process, imports included"
FRESH_IMPLS = {
    "fresh": "jitkern: warm",
    "fresh, no bytecode": "jitkern: warm, no bytecode",
    "inline_fresh": "load_inline of what is built",
    "inline_fresh, no bytecode": "load_inline of what is built, no bytecode",
}
NUM_CORES = 2
NUM_PROCESSES = 3  # the median of them
# Of each file one kernel only is instantiated.
INLINE = {
    "store": ("rows.cu", f"peer::StoreKernel<{ROW_BYTES}>::run"),
    "index": ("rows.cu", f"peer::IndexKernel<{ROW_BYTES}, 1>::run"),
    "h2d_gather": ("rows.cu", f"peer::GatherKernel<{ROW_BYTES}>::run"),
}
TIMEOUT_S = 240


def run(ctx: Context) -> Iterator[Row]:
    from jitkern.host import module as host

    host.module()  # built, if need be: no process that is timed shall do that
    processes = 1 if ctx.quick else NUM_PROCESSES
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as work:
        bench = _Bench(ctx, Path(work))
        yield from bench.rows("cold", COLD, "ours", processes)
        yield from bench.rows("warm", WARM, "ours", processes)
        for op in OPS[:1] if ctx.quick else OPS:
            yield from bench.rows(f"inline:{op}", INLINE_COLD, "peer", processes)
        yield from bench.rows("inline_warm", INLINE_WARM, "peer", processes)
        for mode, name in FRESH_IMPLS.items():
            yield from bench.rows(mode, name, "peer" if "inline" in mode else "ours", processes)


class _Bench:
    """Starts the processes that are measured, all on the same two cores."""

    def __init__(self, ctx: Context, work: Path) -> None:
        self._ctx = ctx
        self._work = work
        self._kernels = work / "kernels"
        self._cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
        self._params = {"row_bytes": ROW_BYTES, "device": ctx.device, "cores": len(self._cores)}
        self._environment = {
            **os.environ,
            "JITKERN_CACHE_DIR": str(self._kernels),
            "JITKERN_CACHE_PATH": str(settings().cache_dir),  # the host module, as in a wheel
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "CUDA_CACHE_DISABLE": "1",  # NVRTC 13 has a cache of its own, with which 40 ms are 15
            "PYTHONPYCACHEPREFIX": str(work / "bytecode"),  # as pip leaves it beside a module
            "PYTHONWARNINGS": "ignore",
        }
        for variable in (
            "JITKERN_RECORD",
            "JITKERN_FREEZE",
            "PYTHONDONTWRITEBYTECODE",
        ):
            self._environment.pop(variable, None)

    def rows(self, mode: str, name: str, role: str, processes: int = 1) -> list[Row]:
        """Return a row for each figure of `mode`, the median over that many processes."""
        self._ctx.say(f"first_call: {name} {mode.partition(':')[2]}")
        runs: list[dict[str, dict[str, Any]]] = []
        try:
            for _ in range(processes):
                if mode == "cold":
                    shutil.rmtree(self._kernels, ignore_errors=True)
                runs.append(self._figures(mode))
        except (RuntimeError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
            return [error_row("first_call", mode, name, role, error)]
        rows = []
        for case, figure in runs[0].items():
            row = Row("first_call", case, name, role, self._params)
            row.median_us = statistics.median(run[case]["ms"] for run in runs) * 1e3
            row.note = figure.get("note", "")
            rows.append(row)
        return rows

    def _figures(self, mode: str) -> dict[str, dict[str, Any]]:
        module = "bench.cases.first_call"
        arguments = [mode, self._ctx.device, str(self._work)]
        lines = self._run([sys.executable, "-m", module, *arguments])
        figures: dict[str, dict[str, Any]] = json.loads(lines[-1])
        return figures

    def _run(self, command: list[str]) -> list[str]:
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)  # inherited
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        finally:
            os.sched_setaffinity(0, everywhere)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"exit {done.returncode}: {last}")
        return done.stdout.strip().splitlines()


# What follows runs in the process that is measured.


def _kernels(device: str) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {
        "import": {"ms": _ms(_import), "note": "jitkern's ops and tvm-ffi, torch was there"}
    }
    calls = _real_calls() if device == "cuda" else _image_lookups()
    for case, call in calls.items():
        figures[case] = {"ms": _ms(call), "note": "the call" if device == "cuda" else "image only"}
    if device == "cuda":
        figures[FIRST_KERNEL]["note"] += "; loading of the host module included"
    return figures


def _import() -> None:
    import tvm_ffi  # noqa: F401

    from jitkern.ops import device_ops

    device_ops()


def _image_lookups() -> dict[str, Callable[[], object]]:
    from jitkern.arch import Arch
    from jitkern.ops import device_ops

    modules = device_ops()

    def look_up(op: str, row_bytes: int, number: int = 0) -> Callable[[], object]:
        spec = modules[op].specialisations(row_bytes)[number]
        return lambda: modules[op].kernel(*spec).image(Arch.parse("9.0"))

    return {
        FIRST_KERNEL: look_up("store", OTHER_ROW_BYTES),
        **{op: look_up(op, ROW_BYTES) for op in OPS},
        LARGE_CALL: look_up("h2d_gather", ROW_BYTES, 1),
    }


def _real_calls() -> dict[str, Callable[[], object]]:
    import torch

    import jitkern

    other_cache, other_rows, k_cache, v_cache = (
        torch.zeros(64, row_bytes, dtype=torch.uint8, device="cuda")
        for row_bytes in (OTHER_ROW_BYTES, OTHER_ROW_BYTES, ROW_BYTES, ROW_BYTES)
    )
    rows = torch.ones(8, ROW_BYTES, dtype=torch.uint8, device="cuda")
    indices = torch.arange(8, dtype=torch.int32, device="cuda")
    pairs = torch.stack([indices, indices], 1)
    host_rows = torch.ones(64, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    calls: dict[str, Callable[[], object]] = {
        FIRST_KERNEL: lambda: jitkern.store_cache(other_cache, None, indices, other_rows[:8]),
        "store": lambda: jitkern.store_cache(k_cache, v_cache, indices, rows, rows),
        "index": lambda: jitkern.indexing(k_cache, indices, output=rows),
        "h2d_gather": lambda: jitkern.h2d_gather(host_rows, k_cache, pairs),
        LARGE_CALL: lambda: jitkern.h2d_gather(host_rows, k_cache, pairs, num_sms=2),
    }
    torch.cuda.synchronize()
    return {case: _and_wait(call) for case, call in calls.items()}


def _fresh(device: str) -> dict[str, dict[str, Any]]:
    call = _store_call(device)
    for name in [name for name in sys.modules if name.partition(".")[0] == "jitkern"]:
        del sys.modules[name]  # what this module has imported of it

    def first_call() -> None:
        import jitkern

        call(jitkern.store_cache)

    return {FRESH: {"ms": _ms(first_call), "note": "import of torch and its CUDA context not"}}


def _inline_fresh(device: str, work: Path) -> dict[str, dict[str, Any]]:
    _prepare_nvcc()
    call = _store_call(device)

    def first_call() -> None:
        module = _load_inline("store", work)
        call(lambda k_cache, v_cache, indices, k, v: module.store(k_cache, v_cache, indices, k, v))

    return {FRESH: {"ms": _ms(first_call), "note": "with ninja's look at what is there"}}


def _store_call(device: str) -> Callable[[Callable[..., object]], None]:
    """Return what calls a store with ready tensors, and waits for it."""
    import torch

    k_cache, v_cache = torch.zeros(2, 64, ROW_BYTES, dtype=torch.uint8, device=device)
    k, v = torch.ones(2, 8, ROW_BYTES, dtype=torch.uint8, device=device)
    indices = torch.arange(8, dtype=torch.int32, device=device)

    def call(store: Callable[..., object]) -> None:
        store(k_cache, v_cache, indices, k, v)
        if device == "cuda":
            torch.cuda.synchronize()

    call(lambda *_: None)
    return call


def _and_wait(call: Callable[[], object]) -> Callable[[], None]:
    import torch

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def _inline(op: str, work: Path) -> dict[str, dict[str, Any]]:
    _prepare_nvcc()
    shutil.rmtree(_inline_folder(op, work), ignore_errors=True)
    return {op: {"ms": _ms(lambda: _load_inline(op, work))}}


def _inline_folder(op: str, work: Path) -> Path:
    return work / f"inline_{op}"


def _load_inline(op: str, work: Path) -> Any:
    import tvm_ffi.cpp

    file, run_function = INLINE[op]
    export = f"\nTVM_FFI_DLL_EXPORT_TYPED_FUNC({op}, ({run_function}));\n"
    source = (SOURCES / file).read_text() + "#include <tvm/ffi/function.h>" + export
    folder = _inline_folder(op, work)
    folder.mkdir(exist_ok=True)
    return tvm_ffi.cpp.load_inline(
        name=f"inline_{op}", cuda_sources=source, build_directory=str(folder)
    )


def _inline_warm(work: Path) -> dict[str, dict[str, Any]]:
    import tvm_ffi

    figures = {}
    for library in sorted(work.glob("inline_*/*.so")):
        ms = _ms(lambda path=str(library): tvm_ffi.load_module(path))
        figures[library.parent.name.removeprefix("inline_")] = {"ms": ms}
    return figures


def _prepare_nvcc() -> None:
    """Set what load_inline looks for itself, also where nvcc on PATH is a wrapper script."""
    import torch

    from jitkern.compilers.find import find_cuda_home

    os.environ["CUDA_HOME"] = str(find_cuda_home().path)
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = f"{major}.{minor}"


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _worker(mode: str, device: str, work: Path) -> dict[str, dict[str, Any]]:
    import torch

    if device == "cuda":
        torch.zeros(1, device="cuda")
    if "no bytecode" in mode:
        # Of what is imported from here on: torch is there.
        sys.pycache_prefix, sys.dont_write_bytecode = str(work / "none"), True
    if mode.startswith("fresh"):
        return _fresh(device)
    if mode.startswith("inline_fresh"):
        return _inline_fresh(device, work)
    if mode in ("cold", "warm"):
        return _kernels(device)
    if mode == "inline_warm":
        return _inline_warm(work)
    return _inline(mode.partition(":")[2], work)


if __name__ == "__main__":
    print(json.dumps(_worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
