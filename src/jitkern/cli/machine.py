"""What this machine has: cores and memory for compiling, GPUs to compile for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jitkern.arch import Arch

# NVRTC 13.5 took 146 MB for one compile at a time and 12 MB more for each further thread; nvcc
# takes about 200 MB a compile. Twice that leaves room for kernels larger than jitkern's own.
_JOB_BYTES = 400 << 20


def default_jobs() -> int:
    """Return how many compiles to run at a time: this process's cores, as far as memory allows."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _free_memory_bytes() // _JOB_BYTES))


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


def gpu_archs() -> list[Arch]:
    """Return the arch of each GPU of this process; building the host module if need be."""
    from jitkern.arch import Arch
    from jitkern.host import module as host

    module = host.module()
    numbers = [int(module.device_arch(i)) for i in range(int(module.device_count()))]
    return [Arch(number // 10, number % 10) for number in numbers]
