"""The first call of a new row size: NVRTC of device code beside nvcc of a whole source file.

Every figure comes from fresh processes on two cores, after `import torch`, with an empty kernel
cache (cold) or the one that a process before left (warm). Runs with and without a GPU; with one, it
is the op itself that is called and waited for, so loading the image is in.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.case import Context, Row, error_row
from jitkern.env import settings

ROOT = Path(__file__).resolve().parents[2]
# A multiple of 128, so that the nvcc peer compiles too, and sizes that no cache holds already.
ROW_BYTES, OTHER_ROW_BYTES = 4480, 4352
# Of a file of peers one kernel only is instantiated.
INLINE = {
    "store": f"peer::store<{ROW_BYTES}>",
    "index": f"peer::index<{ROW_BYTES}, 1>",
    "h2d_gather": f"peer::gather<{ROW_BYTES}>",
}
LARGE_CALL, FIRST_KERNEL = "h2d_gather, large call", "first kernel of a process"
# What a process does, the implementation that it times, and its role; in this order: warm ones
# find what cold ones leave.
MODES = [
    ("cold", "jitkern: NVRTC, cold", "ours"),
    ("warm", "jitkern: warm, new process", "ours"),
    *((f"inline:{op}", "load_inline with nvcc, cold", "peer") for op in INLINE),
    ("inline_warm", "load_module of it, new process", "peer"),
]
NUM_CORES, NUM_PROCESSES, TIMEOUT_S = 2, 3, 240

Calls = dict[str, Callable[[], object]]


def run(ctx: Context) -> Iterator[Row]:
    from jitkern.host import library as host

    host.module()  # built, if need be: no process that is timed shall do that
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as work:
        for mode, name, role in MODES:
            if ctx.quick and mode in ("inline:index", "inline:h2d_gather"):
                continue
            ctx.say(f"first_call: {name} {mode.partition(':')[2]}")
            processes = range(1 if ctx.quick else NUM_PROCESSES)
            try:
                runs = [_figures(mode, ctx.device, Path(work)) for _ in processes]
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                yield error_row("first_call", mode, name, role, error)
                continue
            for case in runs[0]:
                us = statistics.median(figures[case] for figures in runs) * 1e3
                yield Row("first_call", case, name, role, median_us=us)


def _figures(mode: str, device: str, work: Path) -> dict[str, float]:
    dropped = ("JITKERN_RECORD", "JITKERN_FREEZE", "PYTHONDONTWRITEBYTECODE")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in dropped},
        "JITKERN_CACHE_DIR": str(work / "kernels"),
        "JITKERN_CACHE_PATH": str(settings().cache_dir),  # the host module, as in a wheel
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "CUDA_CACHE_DISABLE": "1",  # NVRTC 13 has a cache of its own, with which 40 ms are 15
        "PYTHONPYCACHEPREFIX": str(work / "bytecode"),  # as pip leaves it beside a module
        "PYTHONWARNINGS": "ignore",
    }
    # Before Python starts: OpenBLAS has a thread a core that it finds, and 32 of them on two cores
    # made 80 ms of the first kernel's 12.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:NUM_CORES]))
    worker = [sys.executable, "-m", "bench.cases.first_call", mode, device, str(work)]
    command = ["taskset", "--cpu-list", cores, *worker]
    how = {"cwd": ROOT, "env": environment, "timeout": TIMEOUT_S}
    done = subprocess.run(command, **how, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"exit {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- in the process that is measured ---------------------------------------------------------------


def _worker(mode: str, device: str, work: Path) -> dict[str, float]:
    if mode == "cold":
        shutil.rmtree(work / "kernels", ignore_errors=True)
    import torch

    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else int
    torch.zeros(1, device=device)
    wait()

    def ms(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        wait()
        return (time.perf_counter() - start) * 1e3

    if "inline" in mode:
        _prepare_nvcc()
    if mode in ("cold", "warm"):
        imported = ms(lambda: [import_module("tvm_ffi"), import_module("jitkern.ops").device_ops()])
        calls = _real_calls() if on_gpu else _image_lookups()
        return {"import": imported, **{case: ms(call) for case, call in calls.items()}}
    if mode == "inline_warm":
        load = import_module("tvm_ffi").load_module
        found = sorted(work.glob("inline/*/*.so"))
        return {path.parent.name: ms(partial(load, str(path))) for path in found}
    op = mode.partition(":")[2]
    shutil.rmtree(work / "inline" / op, ignore_errors=True)
    return {op: ms(partial(_load_inline, op, work))}


def _image_lookups() -> Calls:
    from jitkern.arch import Arch
    from jitkern.ops import device_ops

    modules = device_ops()

    def look_up(op: str, row_bytes: int, *rest: int) -> Callable[[], object]:
        """Look up a kernel for vectors of 16 bytes and int32 indices."""
        return lambda: modules[op].kernel(row_bytes, 16, 4, *rest).image(Arch.parse("9.0"))

    small, large = (1, 0), (1, 1)  # line_aligned and large
    return {
        FIRST_KERNEL: look_up("store", OTHER_ROW_BYTES),
        "store": look_up("store", ROW_BYTES),
        "index": look_up("index", ROW_BYTES),
        "h2d_gather": look_up("h2d_gather", ROW_BYTES, *small),
        LARGE_CALL: look_up("h2d_gather", ROW_BYTES, *large),
    }


def _real_calls() -> Calls:
    import torch

    import jitkern

    other, cache, rows = (
        torch.ones(64, row_bytes, dtype=torch.uint8, device="cuda")
        for row_bytes in (OTHER_ROW_BYTES, ROW_BYTES, ROW_BYTES)
    )
    indices = torch.arange(8, dtype=torch.int32, device="cuda")
    pairs = torch.stack([indices, indices], 1)
    host_rows = torch.ones(64, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    return {
        FIRST_KERNEL: lambda: jitkern.store_cache(other[8:], None, indices, other[:8]),
        "store": lambda: jitkern.store_cache(cache[:32], cache[32:], indices, rows[:8], rows[8:16]),
        "index": lambda: jitkern.indexing(cache, indices, output=rows[:8]),
        "h2d_gather": lambda: jitkern.h2d_gather(host_rows, cache, pairs),
        LARGE_CALL: lambda: jitkern.h2d_gather(host_rows, cache, pairs, num_sms=2),
    }


def _load_inline(op: str, work: Path) -> Any:
    import tvm_ffi.cpp

    folder, source = work / "inline" / op, ROOT / "bench" / "peers" / "rows.cu"
    folder.mkdir(parents=True, exist_ok=True)
    export = f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({op}, ({INLINE[op]}));"
    return tvm_ffi.cpp.load_inline(
        name=f"inline_{op}",
        cuda_sources=f'#include "{source}"\n#include <tvm/ffi/function.h>\n{export}\n',
        build_directory=str(folder),
    )


def _prepare_nvcc() -> None:
    """Set what load_inline looks for itself, also where nvcc on PATH is a wrapper script."""
    import torch

    from jitkern.compilers.find import find_cuda_home

    os.environ["CUDA_HOME"] = str(find_cuda_home().path)
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = f"{major}.{minor}"


if __name__ == "__main__":
    print(json.dumps(_worker(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
