"""What ``jitkern doctor`` says of the machine: memory, limits, routes, links between GPUs."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jitkern.cli import ui
from jitkern.env import settings
from jitkern.errors import JitkernError, ToolchainError
from jitkern.fs import free_bytes

State = Literal["ok", "note", "broken"]

_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found, and the fix where it is not ok."""

    what: str
    found: str
    state: State = "ok"
    fix: str = ""


def system() -> Check:
    """Return the operating system and the cores that this process may use."""
    from jitkern import calibration

    cores = len(os.sched_getaffinity(0))
    libc = " ".join(platform.libc_ver())
    cpu = calibration.processor()
    found = f"{platform.system()} {platform.release()}, {libc}, {cpu}, {cores} cores"
    return Check("system", found)


def bytecode() -> Check:
    """Return whether Python keeps what it compiles of the modules that this process imported.

    Images that `uv`, or `pip --no-compile`, installed into have no such files.
    """
    packages = ("jitkern", "tvm_ffi")
    files = {
        spec.origin: spec.cached
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages
        and (spec := getattr(module, "__spec__", None))
        and spec.cached
    }
    lacking = sum(not Path(file).exists() for file in files.values())
    if not lacking:
        return Check("bytecode", f"of all {len(files)} modules of {' and '.join(packages)}")
    # A first call 152 to 227 ms, not 63 to 73, on three hosts (bench/results/first_call_*.json).
    found = f"{lacking} of {len(files)} modules have none: compiled in each process, 0.1 to 0.2 s"
    folders = " ".join(str(Path(sys.modules[name].__file__ or "").parent) for name in packages)
    return Check("bytecode", found, "note", f"python -m compileall -q {folders}")


def host_memory() -> Iterator[Check]:
    """Yield what pools of pinned memory depend on."""
    from jitkern.offload import hostmem

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = free_bytes()
    nodes = len(hostmem.numa_nodes()) or 1
    found = f"{ui.bytes_text(total)} on {nodes} NUMA node{'s' * (nodes > 1)}"
    yield Check("host memory", found if free is None else f"{ui.bytes_text(free)} free of {found}")
    yield _huge_pages()
    yield _locked_limit()


def _huge_pages() -> Check:
    try:
        chosen = {name: _chosen(_PAGES / name) for name in ("enabled", "shmem_enabled")}
    except OSError:
        return Check("huge pages", "this kernel has no transparent ones", "note")
    found = f"private {chosen['enabled']}, shared {chosen['shmem_enabled']}"
    if chosen["enabled"] != "never":
        return Check("huge pages", found)
    fix = f"as root: echo madvise > {_PAGES / 'enabled'}"
    return Check("huge pages", f"{found} (PinnedPool takes longer)", "note", fix)


def _chosen(file: Path) -> str:
    found = re.search(r"\[(\w+)\]", file.read_text())
    return found[1] if found else "unknown"


def _locked_limit() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if limit == resource.RLIM_INFINITY else ui.bytes_text(limit)
    return Check("locked memory", f"limit {found} (CUDA's pinned memory is not held to it)")


def routes(*, has_gpu: bool) -> Iterator[Check]:
    """Yield for each way of compiling whether it is open, and if not, why and what opens it."""
    from jitkern.compilers.find import find_cxx, find_ninja
    from jitkern.compilers.find_cuda import find_nvcc
    from jitkern.compilers.find_nvrtc import find_nvrtc

    by_nvcc = settings().compiler == "nvcc"
    own = "the ops, device_files"
    yield _route(own, find_nvcc if by_nvcc else find_nvrtc, needed=has_gpu)
    yield _route("cpp_files", find_cxx, find_ninja)
    yield _route("cuda_files", find_nvcc, find_cxx, find_ninja)


def _route(what: str, *finds: Callable[[], Any], needed: bool = False) -> Check:
    try:
        tools = [find() for find in finds]
    except ToolchainError as error:
        reason, fix = ui.split_hint(error)
        return Check(f"compiling {what}", reason, "broken" if needed else "note", fix)
    return Check(f"compiling {what}", "by " + " and ".join(tool.id for tool in tools))


def links(gpus: int) -> Iterator[Check]:
    """Yield which GPUs address each other's memory, and the NCCL that ranks would use."""
    import torch

    if gpus > 1 and torch.cuda.device_count() == gpus:
        reach = torch.cuda.can_device_access_peer
        none = [f"{i}-{j}" for i in range(gpus) for j in range(i) if not reach(i, j)]
        all_of = f"all {gpus * (gpus - 1) // 2} pairs of GPUs"
        if none:
            fix = "use init_pynccl for them; PeerMemory needs NVLink or PCIe peer access"
            yield Check("peer access", f"none of {', '.join(none)}, of {all_of}", "note", fix)
        else:
            yield Check("peer access", all_of)
    if gpus:
        yield _nccl()


def _nccl() -> Check:
    from jitkern.comm import nccl

    try:
        return Check("NCCL", nccl.version_name(nccl.load()))
    except JitkernError as error:
        reason, fix = ui.split_hint(error)
        return Check("NCCL", reason.removeprefix("init_pynccl: "), "note", fix)
