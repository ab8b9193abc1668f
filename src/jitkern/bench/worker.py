"""Runs in a process of its own, by path: what a fresh process pays, and what is counted.

The process imports torch and nothing of jitkern, then serves jobs, one JSON line each way. It forks
for every sample: a child is as fresh as a new process, but for the seconds that torch takes to
import, which are not ours. The job ``count`` is not forked; it may run under Callgrind.
Only the standard library is imported above, and nothing of jitkern outside the steps.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

ROW_BYTES = 4480

Times = dict[str, float]


def main() -> None:
    """Import torch, then serve jobs until standard input ends."""
    sys.path.pop(0)  # this folder, whose modules are not for anybody's `import report`
    import warnings

    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = _answer(job) if job["name"] == "count" else _in_child(job)
        print(json.dumps(answer), file=answers, flush=True)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": JOBS[job["name"]](job)}
    except BaseException as error:  # whatever it is, the parent shall hear of it
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        return {"error": last, "kind": type(error).__name__}


def _in_child(job: dict[str, Any]) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(json.dumps(_answer(job)))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"error": f"the process ended with status {status}", "kind": "RuntimeError"}
    answer: dict[str, Any] = json.loads(text)
    return answer


def _prepare(job: dict[str, Any]) -> None:
    sys.pycache_prefix = job["pycache"]
    sys.dont_write_bytecode = not job["write_bytecode"]
    sys.path[:0] = job["path"]
    sys.path += [folder for folder in job.get("more_path", ()) if folder not in sys.path]


# Nanoseconds that this thread ran, that it waited for a core, and in how many slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"


def _waited_ms() -> float:
    try:
        with open(_SCHEDSTAT) as file:
            return int(file.read().split()[1]) / 1e6
    except OSError:
        return 0.0  # a kernel without it: the figures are the clock's


def _ms(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call, less those in which others had the core.

    Beside two busy processes what takes 85 ms alone takes 175 to 250 by the clock, and 73 to 89 by
    this. What it sleeps, or waits for the disk, counts.
    """
    # The clock is read first and last: who loses the core in between is too slow in one sample,
    # and never too fast.
    start = time.perf_counter()
    waited_ms = _waited_ms()
    call()
    waited_ms = _waited_ms() - waited_ms
    return (time.perf_counter() - start) * 1e3 - waited_ms


def _empty_process_ms() -> float:
    """Return the milliseconds that the shortest program there is computes: it waits for nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e3


def warm(job: dict[str, Any]) -> Times:
    """Do what a server's first request does with a filled cache; each step with its yardstick."""
    _prepare(job)
    times = {"python -c pass": _empty_process_ms()}
    times |= first_steps(job)
    times["python -c pass, again"] = _empty_process_ms()
    return times


def first_steps(job: dict[str, Any]) -> Times:
    """The steps themselves, in order."""
    import ctypes

    times = {"import": _ms(import_jitkern)}
    if job["library"]:
        times["dlopen"] = _ms(lambda: ctypes.CDLL(job["library"]))
    times["host module"] = _ms(load_host_module)
    if job["kernels"]:
        times["first kernel"] = _ms(lambda: look_up("store", ROW_BYTES, job["arch"]))
        times["next kernel"] = _ms(lambda: look_up("index", ROW_BYTES, job["arch"]))
    times["first op"] = _ms(lambda: call_op(job["device"]))
    return times


def cold(job: dict[str, Any]) -> Times:
    """Compile one kernel into an empty cache, beside a bare compile of a fixed text."""
    _prepare(job)
    import_jitkern()
    load_host_module()
    bare = bare_compile(job["arch"], job["source"])
    bare()  # loads the compiler
    return {
        "bare compile": _ms(bare),
        "compile": _ms(lambda: look_up("store", ROW_BYTES, job["arch"])),
        "bare compile, again": _ms(bare),
    }


def describe(job: dict[str, Any]) -> dict[str, Any]:
    """Fill the caches for the samples; tell where the host module's library lies."""
    _prepare(job)
    import_jitkern()
    load_host_module()
    found: dict[str, Any] = {"library": library_of_host_module()}
    try:
        for op in ("store", "index"):
            look_up(op, ROW_BYTES, job["arch"])
        found["no_compiler"] = ""
    except Exception as error:
        if type(error).__name__ != "ToolchainError":
            raise
        found["no_compiler"] = str(error)
    call_op(job["device"])
    return found


# Calls that are counted together, of a short call and of a copy.
SHORT_CALLS, LONG_CALLS, UNCOUNTED_CALLS = 200, 3, 20
LONG_CALL_S = 0.02  # as Callgrind runs it, 50 times as long as without


def count(job: dict[str, Any]) -> dict[str, Any]:
    """Count the steps of a first call, then every case; nothing is timed."""
    import gc

    import torch

    _prepare(job)
    counter: Any = PerfCounter() if job["source"] == "perf" else CallgrindCounter()
    gc.disable()
    torch.manual_seed(0)  # the same rows in every run
    if not job["cases"]:
        counter.count("process: import of jitkern and tvm-ffi", import_jitkern, 1)
        counter.count("process: load of the host module", load_host_module, 1)
        if job["kernels"]:
            look_up("store", ROW_BYTES, job["arch"])
            counter.count(
                "process: warm load of a kernel",
                lambda: look_up("index", ROW_BYTES, job["arch"]),
                1,
            )
    errors: dict[str, str] = {}
    for case in _cases(job, errors):
        if case.key not in job["wanted"]:
            continue
        try:
            with torch.inference_mode():
                _count_case(counter, case)
        except Exception as error:  # it is reported where the case is timed as well
            errors[case.key] = f"{type(error).__name__}: {error}"
    return {"counts": counter.counts, "order": counter.order, "errors": errors}


def _count_case(counter: Any, case: Any) -> None:
    run, buffers = case.ours().build(), case.make(0)
    short = case.clock == "host" or case.bytes_moved == 0

    def call() -> None:
        run(buffers)

    call()
    start = time.perf_counter()
    call()
    # Hundreds of a long one would take Callgrind minutes, whatever clock it was given.
    short = short and time.perf_counter() - start < LONG_CALL_S
    for _ in range(UNCOUNTED_CALLS if short else 0):
        call()
    counter.count(case.key, call, SHORT_CALLS if short else LONG_CALLS)


def _cases(job: dict[str, Any], errors: dict[str, str]) -> Any:
    from pathlib import Path

    from jitkern.bench.case import CaseError, Context, cases_of
    from jitkern.bench.cases import builtin_cases

    ctx = Context(job["device"])
    if not job["cases"]:
        yield from builtin_cases(ctx)
    for file in job["cases"]:
        try:
            yield from cases_of(Path(file), ctx)
        except CaseError as error:
            errors[file] = str(error)


class PerfCounter:
    """Instructions that this thread retires in user mode, by the processor's own counter."""

    def __init__(self) -> None:
        from jitkern.bench.counts import open_perf_counter

        self._file = open_perf_counter()
        self.counts: dict[str, float] = {}
        self.order: list[tuple[str, int]] = []

    def count(self, name: str, call: Callable[[], object], calls: int) -> None:
        """Add the count of one call: of a short one the least of several rounds."""
        found = []
        for _ in range(5 if calls > 1 else 1):
            before = self._read()
            for _ in range(calls):
                call()
            found.append((self._read() - before) / calls)
        self.counts[name] = min(found)

    def _read(self) -> int:
        return int.from_bytes(os.read(self._file, 8), "little")


class CallgrindCounter:
    """Dumps a file for each figure; who started valgrind reads them, in this order."""

    def __init__(self) -> None:
        import torch

        self.counts: dict[str, float] = {}
        self.order: list[tuple[str, int]] = []
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
        """Run that many calls between two marks; of short ones the least of three rounds."""
        for _ in range(3 if calls > 1 else 1):
            self._toggle()
            for _ in range(calls):
                call()
            self._dump()
            self.order.append((name, calls))


JOBS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "warm": warm,
    "cold": cold,
    "describe": describe,
    "count": count,
}


# What the steps are made of: the one place here that knows jitkern.


def import_jitkern() -> None:
    """Import what an op's first call imports."""
    import tvm_ffi  # noqa: F401

    import jitkern
    from jitkern.ops import device_ops

    device_ops()
    _ = jitkern.store_cache


def load_host_module() -> None:
    """Load the one C++ module."""
    from jitkern.host import module as host

    host.module()


def library_of_host_module() -> str:
    """Return the file that it was loaded from."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("jitkern_host.so"):
                return line.split(maxsplit=5)[5].strip()
    return ""


def look_up(op: str, row_bytes: int, arch: str) -> bytes:
    """Return one kernel's image, from the cache or the compiler."""
    from jitkern.arch import Arch
    from jitkern.ops import device_ops

    module = device_ops()[op]
    kernels = module.kernel(*module.specialisations(row_bytes)[0])
    image: bytes = kernels.image(Arch.parse(arch))
    return image


def bare_compile(arch: str, source: str) -> Callable[[], object]:
    """Return a compile by the same compiler, without cache, headers or template arguments."""
    from jitkern.arch import Arch
    from jitkern.compilers import nvrtc

    return lambda: nvrtc.compile(source, name="bare.cu", headers={}, arch=Arch.parse(arch))


def call_op(device: str) -> None:
    """Call an op as a user does, and wait for it."""
    import torch

    import jitkern

    caches = torch.zeros(2, 64, ROW_BYTES, dtype=torch.uint8, device=device)
    rows = torch.ones(8, ROW_BYTES, dtype=torch.uint8, device=device)
    indices = torch.arange(8, dtype=torch.int32, device=device)
    jitkern.store_cache(caches[0], caches[1], indices, rows, rows)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
