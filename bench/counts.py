"""Instructions per call, counted by Callgrind: other load on the machine does not change them.

`torch.utils.benchmark` can count too, but instruments the import of torch: a minute for each
statement. Here one process, `python -m bench.counts`, counts all figures, and switches Callgrind on
after that import. Counts are equal on all x86-64 machines with the same software (`identity`).
"""

import compileall
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no")
TIMEOUT_S = 1800.0
# Else counts differ between runs, since sets have another order and OpenMP starts threads, and
# between processors: "rep movsb", which glibc uses from a size on that depends on the processor,
# counts as one instruction per byte.
LIMITS = ("rep_movsb", "rep_stosb", "non_temporal")
TUNABLES = ":".join(f"glibc.cpu.x86_{limit}_threshold={1 << 30}" for limit in LIMITS)
REPRODUCIBLE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": TUNABLES}
IMPORT = "process: import of jitkern and tvm-ffi"
LOAD = "process: load of the host module"
KERNEL = "process: warm load of a kernel"
STEPS = (IMPORT, LOAD, KERNEL)  # a process takes them before its first call
ARCH, ROW_BYTES, VEC_BYTES, INDEX_BYTES = "9.0", 4480, 16, 4  # the kernel whose load is counted
SHORT_CALLS, LONG_CALLS, UNCOUNTED_CALLS = 200, 3, 20
LONG_CALL_S = 0.02  # under Callgrind, which makes a call 50 times as long


def why_not(device: str) -> str:
    """Return why instructions cannot be counted on this machine; empty if they can."""
    import torch

    if device == "cuda":
        return "valgrind does not know the CUDA driver"
    if not (shutil.which("valgrind") and shutil.which("vgdb")):
        return "valgrind is not installed (apt install valgrind)"
    if not torch._C._valgrind_supported_platform():
        return "this build of torch has no marks for valgrind"
    return ""


def identity() -> dict[str, str]:
    """Return the software that must be equal for two counts to be comparable."""
    import torch
    import tvm_ffi

    from jitkern.compilers.cxx import toolchain_id

    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True)
    return {
        "counted by": "callgrind",
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tvm_ffi": str(tvm_ffi.__version__),
        "libc": "-".join(platform.libc_ver()),
        "c++": toolchain_id() or "none: the host module of a wheel",
        "valgrind": valgrind.stdout.strip(),
    }


def count(sources: Sequence[str], keys: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the instructions per call of these figures, and the errors of the others.

    `sources` are names of modules in `bench.cases`, or paths of files with cases.
    """
    import jitkern

    if KERNEL in keys:
        jitkern.warm(["store", "index"], row_bytes=[ROW_BYTES], archs=[ARCH])
        # Without bytecode, as under PYTHONDONTWRITEBYTECODE, an import takes 2.8 times as many.
        compileall.compile_dir(Path(jitkern.__file__).parent, quiet=1)
    cases = [key for key in keys if key not in STEPS]
    jobs = [(sources[::2], keys), (sources[1::2], cases)] if len(sources) > 1 else [(sources, keys)]
    with ThreadPoolExecutor() as threads:  # Callgrind uses one core
        parts = list(threads.map(_count_in_process, *zip(*jobs, strict=True)))
    counts, errors = ({k: v for part in parts for k, v in part[i].items()} for i in (0, 1))
    return counts, errors


def _count_in_process(sources: Sequence[str], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the counts and the errors of a process under Callgrind."""
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as folder:
        out = Path(folder, "callgrind.out")
        answer = Path(folder, "answer.json")
        job = json.dumps([list(sources), list(keys), str(out), str(answer)])
        done = subprocess.run(
            [*CALLGRIND, f"--callgrind-out-file={out}", sys.executable, "-m", "bench.counts", job],
            cwd=ROOT,
            env={**os.environ, **REPRODUCIBLE},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"counting failed: exit {done.returncode}:\n{done.stderr}")
        result: list[dict[str, Any]] = json.loads(answer.read_text())
    return result


# -- the process that is counted -------------------------------------------------------------------


def main(sources: Sequence[str], keys: Sequence[str], out: str, answer: str) -> None:
    """Count the figures and write `[counts, errors]` into the file `answer`."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same rows in every run
    gc.disable()
    callgrind = Callgrind(out)
    counts: dict[str, float] = {}
    errors: dict[str, str] = {}
    if KERNEL in keys:
        counts[IMPORT] = callgrind.count(_import, 1)
        counts[LOAD] = callgrind.count(_load, 1)
        _look_up("store")  # imports what a first look-up needs
        counts[KERNEL] = callgrind.count(lambda: _look_up("index"), 1)

    from bench.case import Context
    from bench.cases import cases_of

    for case in (case for source in sources for case in cases_of(source, Context("cpu"))):
        if case.key in keys:
            try:
                with torch.inference_mode():
                    counts[case.key] = _count_case(callgrind, case)
            except Exception as error:
                errors[case.key] = f"{type(error).__name__}: {error}"
    Path(answer).write_text(json.dumps([counts, errors]))


def _import() -> None:
    """Import what an op's first call imports."""
    import tvm_ffi  # noqa: F401

    import jitkern
    from jitkern.ops import device_ops

    device_ops()
    _ = jitkern.store_cache


def _load() -> None:
    from jitkern.host import library as host

    host.module()


def _look_up(op: str) -> None:
    """Load the image of a kernel for int32 indices from the cache."""
    from jitkern.arch import Arch
    from jitkern.ops import device_ops

    device_ops()[op].kernel(ROW_BYTES, VEC_BYTES, INDEX_BYTES).image(Arch.parse(ARCH))


def _count_case(callgrind: "Callgrind", case: Any) -> float:
    run, buffers = case.ours().build(), case.make(0)

    def call() -> None:
        run(buffers)

    call()
    start = time.perf_counter()
    call()
    took_s = time.perf_counter() - start
    # 200 calls that move much would take Callgrind minutes.
    is_short = took_s < LONG_CALL_S and (case.clock == "host" or case.bytes_moved == 0)
    for _ in range(UNCOUNTED_CALLS if is_short else 0):
        call()
    return callgrind.count(call, SHORT_CALLS if is_short else LONG_CALLS)


class Callgrind:
    """Counts the calls of this process, which runs under Callgrind."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._dumps = 0
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = ["vgdb", f"--pid={os.getpid()}", "instrumentation", "on"]
        vgdb = subprocess.Popen(command, **quiet)
        while vgdb.poll() is None:  # valgrind receives the message while this process runs
            time.sleep(0.001)
        if vgdb.returncode != 0:
            raise OSError(f"vgdb could not switch Callgrind on: exit {vgdb.returncode}")

    def count(self, call: Callable[[], object], calls: int) -> float:
        """Return the instructions per call: the least of three rounds if there are many calls."""
        import torch

        totals = []
        for _ in range(3 if calls > 1 else 1):
            torch._C._valgrind_toggle()
            for _ in range(calls):
                call()
            torch._C._valgrind_toggle_and_dump_stats()
            self._dumps += 1
            dump = Path(f"{self._out}.{self._dumps}").read_bytes()
            totals.append(int(dump.rpartition(b"\ntotals: ")[2]) / calls)
        return min(totals)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
