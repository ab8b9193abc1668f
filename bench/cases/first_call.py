"""The first call of a new row size: NVRTC of device code beside nvcc of a whole source file.

Every figure comes from a fresh process, after `import torch`, with an empty kernel cache (cold) or
the one that the process before left (warm). Runs with and without a GPU; with one, it is the op
itself that is called and waited for, so loading the image is in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.measure import Context, Row, error_row
from jitkern.env import settings

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "bench" / "peers"
# A multiple of 128, so that the nvcc peer compiles too, and a size that no cache holds already.
ROW_BYTES = 4480
OPS = ("store", "index", "h2d_gather")
INLINE = {
    "store": ("rows.cu", f"peer::StoreKernel<{ROW_BYTES}>::run"),
    "index": ("rows.cu", f"peer::IndexKernel<{ROW_BYTES}, 1>::run"),
    "h2d_gather": ("ladder.cu", "ladder::gather"),
}
TIMEOUT_S = 240


def run(ctx: Context) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as work:
        if not ctx.quick:
            yield from _in_process(ctx, "host", work, "jitkern: host module, once per machine")
        yield from _in_process(ctx, "cold", work, "jitkern: NVRTC, cold")
        yield from _in_process(ctx, "warm", work, "jitkern: warm, new process")
        for op in OPS[:1] if ctx.quick else OPS:
            yield from _in_process(ctx, f"inline:{op}", work, "load_inline with nvcc, cold")
        yield from _in_process(ctx, "inline_warm", work, "load_module of it, new process")


def _in_process(ctx: Context, mode: str, work: str, name: str) -> list[Row]:
    ctx.say(f"first_call: {name} {mode.partition(':')[2]}")
    role = "ours" if name.startswith("jitkern") else "peer"
    environment = {
        **os.environ,
        "JITKERN_CACHE_DIR": str(Path(work) / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "PYTHONWARNINGS": "ignore",
    }
    for variable in ("JITKERN_CACHE_PATH", "JITKERN_RECORD", "JITKERN_FREEZE"):
        environment.pop(variable, None)
    if ctx.quick:  # the host module as this run has it, instead of building another one
        environment["JITKERN_CACHE_PATH"] = str(settings().cache_dir)
    command = [sys.executable, "-m", "bench.cases.first_call", mode, ctx.device, work]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"exit {done.returncode}: {last}")
        figures: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    except (RuntimeError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return [error_row("first_call", mode, name, role, error)]
    rows = []
    for op, figure in figures.items():
        row = Row("first_call", op, name, role, {"row_bytes": ROW_BYTES, "device": ctx.device})
        row.median_us = figure["ms"] * 1e3
        row.note = figure.get("note", "")
        rows.append(row)
    return rows


# What follows runs in the process that is measured.


def _host() -> dict[str, dict[str, Any]]:
    from jitkern.jit import host

    return {"host module": {"ms": _ms(host.module)}}


def _kernels(device: str) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {
        "import": {"ms": _ms(_import), "note": "jitkern's ops and tvm-ffi, torch was there"}
    }
    calls = _real_calls() if device == "cuda" else _image_lookups()
    for op, call in calls.items():
        figures[op] = {"ms": _ms(call), "note": "the call" if device == "cuda" else "image only"}
    if device == "cuda":
        figures[OPS[0]]["note"] += "; loading of the host module included"
    return figures


def _import() -> None:
    import tvm_ffi  # noqa: F401

    from jitkern.ops import device_ops

    device_ops()


def _image_lookups() -> dict[str, Callable[[], object]]:
    from jitkern.jit.toolchain import Arch
    from jitkern.ops import device_ops

    def look_up(module: Any) -> Callable[[], object]:
        spec = module.specialisations(ROW_BYTES)[0]
        return lambda: module.kernel(*spec).image(Arch.parse("9.0"))

    modules = device_ops()
    return {op: look_up(modules[op]) for op in OPS}


def _real_calls() -> dict[str, Callable[[], object]]:
    import torch

    import jitkern

    k_cache = torch.zeros(64, ROW_BYTES, dtype=torch.uint8, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    rows = torch.ones(8, ROW_BYTES, dtype=torch.uint8, device="cuda")
    indices = torch.arange(8, dtype=torch.int32, device="cuda")
    pairs = torch.stack([indices, indices], 1)
    host_rows = torch.ones(64, ROW_BYTES, dtype=torch.uint8, pin_memory=True)

    def store() -> None:
        jitkern.store_cache(k_cache, v_cache, indices, rows, rows)
        torch.cuda.synchronize()

    def index() -> None:
        jitkern.indexing(k_cache, indices, output=rows)
        torch.cuda.synchronize()

    def h2d_gather() -> None:
        jitkern.h2d_gather(host_rows, k_cache, pairs)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return {"store": store, "index": index, "h2d_gather": h2d_gather}


def _inline(op: str, work: Path) -> dict[str, dict[str, Any]]:
    import tvm_ffi.cpp

    _prepare_nvcc()
    file, run_function = INLINE[op]
    export = f"\nTVM_FFI_DLL_EXPORT_TYPED_FUNC({op}, ({run_function}));\n"
    source = (PEERS / file).read_text() + "#include <tvm/ffi/function.h>" + export
    directory = work / f"inline_{op}"
    directory.mkdir()

    def build() -> object:
        return tvm_ffi.cpp.load_inline(
            name=f"inline_{op}", cuda_sources=source, build_directory=str(directory)
        )

    return {op: {"ms": _ms(build)}}


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

    from jitkern.jit.toolchain import find_cuda_home

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
    if mode == "host":
        return _host()
    if mode in ("cold", "warm"):
        return _kernels(device)
    if mode == "inline_warm":
        return _inline_warm(work)
    return _inline(mode.partition(":")[2], work)


if __name__ == "__main__":
    print(json.dumps(_worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
