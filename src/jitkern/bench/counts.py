"""Instructions of one call: a figure that does not vary, where the machine can count them.

The processor's own counter by ``perf_event_open``; where there is none (most virtual machines),
Callgrind, if valgrind is installed: PyTorch brings the marks that start and stop it. Callgrind
shows programs a processor of its own, so that its counts are the same on any x86-64 machine with
the same software: :func:`identity` says which.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitkern.bench.client import JOB_TIMEOUT_S, Worker
from jitkern.errors import JitkernError

# From linux/perf_event.h: the hardware event "instructions", and a software one that every kernel
# counts, with which the way here is tested where there is no hardware counter.
HARDWARE_INSTRUCTIONS = (0, 1)
SOFTWARE_TASK_CLOCK = (1, 1)
_PERF_ATTR_BYTES = 128
_EXCLUDE_KERNEL_AND_HYPERVISOR = (1 << 5) | (1 << 6)
_CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no")
_TIMEOUT_OF_A_CASE_S = 30.0
_SYSTEM_CALL = {"x86_64": 298, "aarch64": 241}


@dataclass(frozen=True)
class Counts:
    """Instructions per call by case, how they were counted, and by what software."""

    source: str  # "perf", "callgrind" or ""
    identity: dict[str, str] = field(default_factory=dict)
    by_key: dict[str, float] = field(default_factory=dict)
    note: str = ""  # why there are none


def open_perf_counter(event: tuple[int, int] = HARDWARE_INSTRUCTIONS) -> int:
    """Return a file descriptor from which this thread's count is read; OSError where there is none.

    Examples
    --------
    >>> counter = open_perf_counter(SOFTWARE_TASK_CLOCK)
    >>> int.from_bytes(os.read(counter, 8), "little") > 0
    True
    """
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        raise OSError(f"perf_event_open: not known on {platform.machine()}")
    kind, config = event
    attributes = bytearray(_PERF_ATTR_BYTES)
    struct.pack_into("IIQ", attributes, 0, kind, _PERF_ATTR_BYTES, config)
    struct.pack_into("Q", attributes, 40, _EXCLUDE_KERNEL_AND_HYPERVISOR)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * _PERF_ATTR_BYTES).from_buffer(attributes)
    descriptor = int(libc.syscall(number, buffer, 0, -1, -1, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}")
    return descriptor


def source_here(device: str) -> tuple[str, str]:
    """Return how instructions can be counted on this machine, and if they cannot, why.

    Of a run on a GPU only by the processor itself.
    """
    try:
        os.close(open_perf_counter())
        return "perf", ""
    except OSError:
        pass
    if device == "cuda":
        return "", "no hardware counter, and valgrind does not know the CUDA driver"
    missing = [name for name in ("valgrind", "vgdb") if shutil.which(name) is None]
    if missing:
        return "", "no hardware counter, and valgrind is not installed (apt install valgrind)"
    import torch

    if not torch._C._valgrind_supported_platform():
        return "", "no hardware counter, and this build of torch has no marks for valgrind"
    return "callgrind", ""


def count(
    device: str,
    arch: str,
    *,
    kernels: bool,
    cases: Sequence[Path],
    wanted: Sequence[str],
) -> Counts:
    """Count these figures.

    `cases` are files of cases, none for jitkern's own and the steps of a first call; `kernels`
    says whether these can be compiled here.
    """
    source, note = source_here(device)
    if not source:
        return Counts("", note=note)
    # One order of every set and dict, one thread.
    environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="jitkern-bench-") as name:
        out = Path(name) / "callgrind.out"
        prefix = (*_CALLGRIND, f"--callgrind-out-file={out}") if source == "callgrind" else ()
        try:
            if not cases:
                # So that all that is counted finds its bytecode and its kernels.
                with Worker(device, arch, caches=out.parent) as plain:
                    plain.ask("describe")
            with Worker(
                device, arch, caches=out.parent, prefix=prefix, environment=environment
            ) as worker:
                answer = worker.ask(
                    "count",
                    timeout_s=max(JOB_TIMEOUT_S, _TIMEOUT_OF_A_CASE_S * len(wanted)),
                    source=source,
                    kernels=kernels,
                    cases=[str(file) for file in cases],
                    wanted=list(wanted),
                    # A file of cases finds what it imports as it does where it is timed.
                    more_path=[os.path.abspath(folder) for folder in sys.path],
                )
                if source == "callgrind":
                    worker.close()
            by_key = answer["counts"] if source == "perf" else _read(out, answer["order"])
        except (JitkernError, OSError, subprocess.TimeoutExpired) as error:
            return Counts(source, note=f"counting failed: {error}")
    return Counts(source, identity(source), by_key, "; ".join(answer["errors"].values()))


def _read(out: Path, order: list[tuple[str, int]]) -> dict[str, float]:
    """Return the totals of the files that Callgrind has dumped, OUT.1 for the first figure."""
    found: dict[str, float] = {}
    for position, (name, calls) in enumerate(order, start=1):
        dump = out.with_name(f"{out.name}.{position}")
        total = re.search(r"^totals: (\d+)", dump.read_text(errors="replace"), re.MULTILINE)
        if total is not None:
            count = int(total[1]) / calls
            found[name] = min(count, found.get(name, count))  # the rounds of one figure
    return found


def identity(source: str) -> dict[str, str]:
    """Return what has to be the same for two counts to be comparable."""
    import torch
    import tvm_ffi

    from jitkern import calibration
    from jitkern.compilers.identity import toolchain_id

    described: dict[str, Any] = {
        "counted by": source,
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "libc": "-".join(platform.libc_ver()),
        "c++": toolchain_id() or "none: the host module of a wheel",
    }
    if source == "callgrind":
        done = subprocess.run(["valgrind", "--version"], capture_output=True, text=True)
        described["valgrind"] = done.stdout.strip()
    else:
        described["cpu"] = calibration.processor()
    return {name: str(value) for name, value in described.items()}
