"""Compiling kernels before they are needed: what there is to build, and many builds at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jitkern.arch import Arch
from jitkern.cache.get import Lookup
from jitkern.errors import CompileError
from jitkern.host import module as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.loader import load_device, load_library
from jitkern.jit.record import Specialisation
from jitkern.ops import device_ops

# NVRTC 13.5 took 146 MB for one compile at a time and 12 MB more for each further thread; nvcc
# takes about 200 MB a compile. Twice that leaves room for kernels larger than jitkern's own.
_COMPILE_BYTES = 400 << 20


@dataclass(frozen=True)
class Job:
    """One thing to have: a kernel for one arch, or a library."""

    name: str
    parameters: str
    arch: str
    build: Callable[[], Lookup[Any]]

    def run(self) -> Outcome:
        """Build it, unless it is there already; raises what `build` raises."""
        return Outcome(self, self.build())


class Outcome(NamedTuple):
    """What became of a job; `lookup` is None where it did not compile."""

    job: Job
    lookup: Lookup[Any] | None

    @property
    def source(self) -> str:
        """``compiled``, ``cached``, ``shipped``, ``memo`` or ``failed``."""
        return "failed" if self.lookup is None else self.lookup.source


def host_module_job() -> Job:
    """Return the job of the host module."""
    return Job("host module", "", "", host.find)


def op_jobs(op: str, row_bytes: int, archs: Iterable[Arch]) -> list[Job]:
    """Return the jobs of one op and row size: each specialisation for each arch."""
    module = device_ops()[op]
    kernels = [module.kernel(*spec) for spec in module.specialisations(row_bytes)]
    return [_kernel_job(kernel, arch) for kernel in kernels for arch in archs]


def recorded_jobs(
    recorded: Iterable[Specialisation], archs: Sequence[Arch] = (), *, load: bool = False
) -> list[Job]:
    """Return the jobs of a recorded run.

    Parameters
    ----------
    recorded
        What :func:`jitkern.jit.record.replay` has read.
    archs
        What to compile kernels for, instead of what each was recorded for. nvcc builds libraries
        for JITKERN_ARCH, else for the GPU here.
    load
        Load the libraries too, which runs code in them; by default they are only built.

    Raises
    ------
    ValueError
        A recorded arch is not known.
    """
    jobs: dict[str, Job] = {}
    for used in recorded:
        name, *parameters = used.args
        if "device_files" not in used.options:
            build = partial(load_library, used, load=load)
            jobs[used.to_json()] = Job(name, ", ".join(parameters), "", build)
            continue
        kernel = load_device(used)
        for arch in archs or (Arch.parse(used.arch),):
            # Recorded for 9.0 and for 10.0, and one of them is asked for: one job.
            jobs.setdefault(replace(used, arch=str(arch)).to_json(), _kernel_job(kernel, arch))
    return list(jobs.values())


def _kernel_job(kernel: DeviceModule, arch: Arch) -> Job:
    return Job(kernel.op, ", ".join(kernel.args), str(arch), lambda: kernel.lookup(arch))


def run_all(
    jobs: Sequence[Job], threads: int, advance: Callable[[Job], None] = lambda _: None
) -> tuple[list[Outcome], list[CompileError]]:
    """Run `jobs` on `threads` threads; the outcomes are in the order of the jobs.

    What does not compile is an outcome and an error of the result; any other failure ends it.
    """
    outcomes: dict[int, Outcome] = {}
    failures: list[CompileError] = []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="jitkern-warm")
    try:
        pending = {pool.submit(job.run): i for i, job in enumerate(jobs)}
        for future in as_completed(pending):
            i = pending[future]
            try:
                outcomes[i] = future.result()
            except CompileError as error:
                outcomes[i] = Outcome(jobs[i], None)
                failures.append(error)
            advance(jobs[i])
    finally:
        pool.shutdown(cancel_futures=True)
    return [outcomes[i] for i in sorted(outcomes)], failures


def default_threads() -> int:
    """Return how many compiles to run at a time: this process's cores, as far as memory allows."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _free_memory_bytes() // _COMPILE_BYTES))


def _free_memory_bytes() -> int:
    """Memory that can be had, within the limit of the control group that a container runs in."""
    free = 1 << 62
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, now = _text(limit).strip(), _text(used).strip()
        if most.isdigit() and now.isdigit():  # "max" where there is no limit
            free = min(free, int(most) - int(now))
    return free


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""  # no such control group
