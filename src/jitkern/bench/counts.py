"""Instructions of one call, counted by Callgrind: a figure that no neighbour changes.

Counts are the same on any x86-64 machine with the same software; ``identity`` says which. This
file is also the program that is counted, run by its path: it imports the standard library alone.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no")
_START_TIMEOUT_S, _TIMEOUT_OF_A_CASE_S = 600.0, 60.0

IMPORT, LOAD, KERNEL = STEPS = (
    "process: import of jitkern and tvm-ffi",
    "process: load of the host module",
    "process: warm load of a kernel",
)
ROW_BYTES = 4480
# Calls that are counted together, of a short call and of a long one.
SHORT_CALLS, LONG_CALLS, UNCOUNTED_CALLS = 200, 3, 20
LONG_CALL_S = 0.02  # as Callgrind runs it, 50 times as long as without


@dataclass(frozen=True)
class Counts:
    """Instructions per call by case, and by what software they were counted."""

    identity: dict[str, str] = field(default_factory=dict)
    by_key: dict[str, float] = field(default_factory=dict)
    note: str = ""  # why there are none, or not all


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
    """Return what has to be the same for two counts to be comparable."""
    import torch
    import tvm_ffi

    from jitkern.compilers.cxx import toolchain_id

    done = subprocess.run(["valgrind", "--version"], capture_output=True, text=True)
    return {
        "counted by": "callgrind",
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tvm_ffi": str(tvm_ffi.__version__),
        "libc": "-".join(platform.libc_ver()),
        "c++": toolchain_id() or "none: the host module of a wheel",
        "valgrind": done.stdout.strip(),
    }


def count(arch: str, *, files: Sequence[Path], wanted: Sequence[str], steps: bool) -> Counts:
    """Count these figures of files, with `steps` those of a first call; kernels are for `arch`."""
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as name:
        folder = Path(name)
        job = {
            "arch": arch,
            "files": [os.path.abspath(file) for file in files],
            "wanted": list(wanted),
            "steps": steps,
            "path": [os.path.abspath(one) for one in sys.path],
            "bytecode": str(folder / "bytecode"),
        }
        out = folder / "callgrind.out"
        try:
            environment = _environment(folder)
            if steps:  # what is counted shall find its bytecode and its kernels
                _run((), {**job, "wanted": []}, folder, environment)
            answer = _run((*_CALLGRIND, f"--callgrind-out-file={out}"), job, folder, environment)
            by_key = _read(out, answer["order"])
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return Counts(identity(), note=f"counting failed: {error}")
    return Counts(identity(), by_key, "; ".join(answer["errors"]))


def _environment(folder: Path) -> dict[str, str]:
    """Return the program's environment: its own caches, one order of every set, one thread."""
    from jitkern.cache.entry import read_entry
    from jitkern.cache.store import Cache
    from jitkern.env import process_environment
    from jitkern.host import module as host

    environment = process_environment()
    for variable in ("JITKERN_RECORD", "JITKERN_FREEZE", "JITKERN_LOG"):
        environment.pop(variable, None)
    found = host.find()
    if found.path is not None and found.source != "shipped":
        Cache(folder / "host", shared=True).publish(read_entry(found.path))
    return {
        **environment,
        "JITKERN_CACHE_DIR": str(folder / "kernels"),
        "JITKERN_CACHE_PATH": str(folder / "host"),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }


def _run(
    prefix: Sequence[str], job: dict[str, Any], folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Return the answer of this file as a program; RuntimeError with its last words."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    done = subprocess.run(
        [*prefix, sys.executable, __file__, json.dumps(job), str(answer)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_START_TIMEOUT_S + _TIMEOUT_OF_A_CASE_S * len(job["wanted"]),
    )
    if done.returncode != 0 or not answer.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise RuntimeError(f"exit {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _read(out: Path, order: list[tuple[str, int]]) -> dict[str, float]:
    """Return the totals of the files that Callgrind has dumped, OUT.1 for the first round."""
    found: dict[str, float] = {}
    for position, (name, calls) in enumerate(order, start=1):
        dump = out.with_name(f"{out.name}.{position}")
        total = re.search(r"^totals: (\d+)", dump.read_text(errors="replace"), re.MULTILINE)
        if total is not None:
            count = int(total[1]) / calls
            found[name] = min(count, found.get(name, count))  # of the rounds of one figure
    return found


# -- the program that is counted -------------------------------------------------------------------


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Count the steps of a process and every wanted case; with none of them, fill the caches."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    torch.set_num_threads(1)
    # torch keeps its own bytecode.
    sys.pycache_prefix, sys.dont_write_bytecode = job["bytecode"], False
    sys.path += [one for one in job["path"] if one not in sys.path]
    counter = Counter(counts=bool(job["wanted"]))
    gc.disable()
    torch.manual_seed(0)  # the same rows in every run
    errors: list[str] = []
    if job["steps"]:
        counter.count(IMPORT, _import, 1)
        counter.count(LOAD, _load, 1)
        try:
            _look_up("store", job["arch"])
            counter.count(KERNEL, lambda: _look_up("index", job["arch"]), 1)
        except Exception as error:
            if type(error).__name__ != "ToolchainError":  # no NVRTC: its figure is left out
                raise
    for case in _cases(job["files"], errors) if job["wanted"] else ():
        if case.key in job["wanted"]:
            try:
                with torch.inference_mode():
                    _count_case(counter, case)
            except Exception as error:  # it is reported where the case is timed as well
                errors.append(f"{case.key}: {type(error).__name__}: {error}")
    return {"order": counter.order, "errors": errors}


def _import() -> None:
    """Import what an op's first call imports."""
    import tvm_ffi  # noqa: F401

    import jitkern
    from jitkern.ops import device_ops

    device_ops()
    _ = jitkern.store_cache


def _load() -> None:
    from jitkern.host import module as host

    host.module()


def _look_up(op: str, arch: str) -> None:
    """Get one kernel's image, from the cache or the compiler."""
    from jitkern.arch import Arch
    from jitkern.ops import device_ops

    module = device_ops()[op]
    module.kernel(*module.specialisations(ROW_BYTES)[0]).image(Arch.parse(arch))


def _cases(files: list[str], errors: list[str]) -> Any:
    from jitkern.bench.case import CaseError, Context, cases_of

    for file in files:
        try:
            yield from cases_of(Path(file), Context("cpu"))
        except CaseError as error:
            errors.append(str(error))


def _count_case(counter: Counter, case: Any) -> None:
    run, buffers = case.ours().build(), case.make(0)

    def call() -> None:
        run(buffers)

    call()
    start = time.perf_counter()
    call()
    # Hundreds of a long one would take Callgrind minutes, whatever clock it was given.
    short = case.clock == "host" or case.bytes_moved == 0
    short = short and time.perf_counter() - start < LONG_CALL_S
    for _ in range(UNCOUNTED_CALLS if short else 0):
        call()
    counter.count(case.key, call, SHORT_CALLS if short else LONG_CALLS)


class Counter:
    """Has Callgrind dump a file for each round; who started valgrind reads them, in `order`."""

    def __init__(self, counts: bool) -> None:
        self.order: list[tuple[str, int]] = []
        self._counts = counts
        if not counts:
            return
        import torch

        self._toggle = torch._C._valgrind_toggle
        self._dump = torch._C._valgrind_toggle_and_dump_stats
        # Up to here nothing was instrumented: torch's import would take a minute instead of 10 s.
        vgdb = subprocess.Popen(
            ["vgdb", f"--pid={os.getpid()}", "instrumentation", "on"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while vgdb.poll() is None:  # valgrind looks for its message while this program runs
            time.sleep(0.001)
        if vgdb.returncode != 0:
            raise OSError(f"vgdb could not switch Callgrind on: exit {vgdb.returncode}")

    def count(self, name: str, call: Callable[[], object], calls: int) -> None:
        """Make that many calls between two marks; of several, in three rounds."""
        if not self._counts:
            call()
            return
        for _ in range(3 if calls > 1 else 1):
            self._toggle()
            for _ in range(calls):
                call()
            self._dump()
            self.order.append((name, calls))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not for anybody's `import report`
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))
