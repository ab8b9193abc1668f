"""``jitkern doctor``: what is installed, whether it works, and what to do if it does not."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jitkern
from jitkern.arch import SUPPORTED_ARCHS, Arch, gpu_archs, requested_archs
from jitkern.cache.get import KERNELS, Searched, caches
from jitkern.cli import ui
from jitkern.cli.cache import describe, require_folder
from jitkern.env import settings, unknown_variables, variables
from jitkern.errors import JitkernError, UnsupportedError
from jitkern.fs import require_writable
from jitkern.version import __version__

SUMMARY = "check this machine: versions, GPUs, compilers, caches"
DESCRIPTION = """\
Check everything that jitkern needs or can use, and run an op on each device. A line is "ok"; a
"note", if the ops run here but other uses, such as compiling, do not; or "broken", if the ops do
not run here: the exit status is then 1. A "note" and a "broken" line end with what to do."""
EXAMPLE = "jitkern doctor"

_DRIVER = Path("/proc/driver/nvidia/version")


class Check(NamedTuple):
    """One line: the subject, its state, and a text that ends with the cure unless it is ok."""

    subject: str
    state: Literal["ok", "note", "broken"]
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    """Print each check when it is done; return 1 if the ops cannot run here."""
    broken = []
    for check in diagnose():
        ui.say(f"{check.subject:18} {check.state:6} {check.text}")
        if check.state == "broken":
            broken.append(check.subject)
    ui.say(f"broken: {', '.join(broken)}" if broken else "the ops run on this machine")
    return 1 if broken else 0


def diagnose() -> Iterator[Check]:
    """Run every check, the most basic first."""
    libc, cores = "-".join(platform.libc_ver()), len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Check("system", "ok", f"{system}, {libc}, {cores} cores")
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check("jitkern", "ok", f"{__version__} in {Path(jitkern.__file__).parent}")
    yield _look("variables", _variables)
    torch = _look("torch", _torch, needed=True)
    yield torch
    yield _look("tvm-ffi", lambda: metadata.version("apache-tvm-ffi"), needed=True)
    host = _look("host module", _host_module, needed=True)
    yield host
    gpus = driver = 0
    if host.state == "ok":
        from jitkern.host.library import module

        gpus, driver = (int(module()[name]()) for name in ("device_count", "driver_version"))
        if torch.state == "ok":
            yield gpu(gpus)
        if driver:
            version = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
            yield _look("driver", lambda: f"{version}, {_DRIVER.read_text().splitlines()[0]}")
    yield from _compilers(driver // 1000 if gpus else 0, host_works=host.state == "ok")
    for searched in caches():
        # Never broken: the process then keeps compiled code in memory.
        yield _look(searched.origin, partial(_cache, searched))
    archs = gpu_archs() if torch.state == "ok" else []
    yield _look(KERNELS, partial(kernels_wheel, archs))
    if host.state == torch.state == "ok":
        if gpus or settings().nccl:
            from jitkern.comm import nccl

            yield _look("NCCL", nccl.load)
        for device in ("cpu", *(f"cuda:{i}" for i in range(gpus))):
            yield _look(f"indexing on {device}", partial(_trial, device), needed=True)


def _look(subject: str, find: Callable[[], object], *, needed: bool = False) -> Check:
    """Return what `find` returns, or its error: a note, or broken if it is `needed`."""
    try:
        return Check(subject, "ok", str(find()))
    except (JitkernError, ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return Check(subject, "broken" if needed else "note", reason)


# -- packages and GPUs -----------------------------------------------------------------------------


def _variables() -> str:
    """Return the variables that are set; the command line has checked the others' values."""
    requested_archs()
    if unknown := unknown_variables():
        raise UnsupportedError("; ".join(unknown))
    return " ".join(f"{name}={value}" for name, value in variables().items()) or "none is set"


def _torch() -> str:
    ui.require_torch()
    import torch

    cuda = torch.version.cuda
    return f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'})"


def _host_module() -> str:
    from jitkern.host import library as host

    lookup = host.find()
    time = f"{lookup.ms:.0f} ms" if lookup.ms < 1000 else f"{lookup.ms / 1000:.1f} s"
    return f"{lookup.source} in {time}"


def gpu(count: int) -> Check:
    """Return the GPUs, and whether torch and the kernels support them."""
    import torch

    if not count:
        if _DRIVER.exists():
            return Check("GPU", "note", "none visible; check CUDA_VISIBLE_DEVICES and nvidia-smi")
        return Check("GPU", "ok", "none: the ops run on the CPU")
    if not torch.cuda.is_available():
        cure = "install a build of torch for CUDA (https://pytorch.org/get-started)"
        return Check("GPU", "broken", f"{count}, unknown to torch; {cure}")
    names = dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))
    archs, oldest = gpu_archs(), SUPPORTED_ARCHS[0]
    gpus = f"{count} x {', '.join(names)}, arch {', '.join(map(str, dict.fromkeys(archs)))}"
    if min(archs) < oldest:
        return Check("GPU", "note", f"{gpus}; not all kernels compile before {oldest}")
    return Check("GPU", "ok", gpus)


def _compilers(driver: int, *, host_works: bool) -> Iterator[Check]:
    """Check the compilers; `driver` is the CUDA of the GPUs' driver, 0 without GPUs."""
    from jitkern.compilers import find

    def nvrtc() -> str:
        tool = find.find_nvrtc()
        if 0 < driver < int(tool.version.partition(".")[0]):
            package = "nvidia-cuda-nvrtc-cu12" if driver == 12 else "nvidia-cuda-nvrtc"
            raise UnsupportedError(
                f"makes code for CUDA {tool.version}, newer than the driver; "
                f'update the driver, or pip install "{package}=={driver}.*"'
            )
        return f"{tool.version} ({tool.path})"

    def program(look: Callable[[], Any]) -> str:
        tool = look()
        return f"{tool.id} ({tool.path})"

    yield _look("NVRTC", nvrtc, needed=driver > 0)
    yield _look("nvcc", partial(program, find.find_nvcc))
    yield _look("c++", partial(program, find.find_cxx), needed=not host_works)
    yield _look("ninja", partial(program, find.find_ninja), needed=not host_works)


# -- caches and ops --------------------------------------------------------------------------------


def _cache(searched: Searched) -> str:
    cache = searched.cache
    cache.check()
    if not cache.read_only:
        require_writable(cache.root, "set JITKERN_CACHE_DIR to a directory of yours")
    require_folder(searched)
    return describe(searched)


def kernels_wheel(gpus: Sequence[Arch] = ()) -> str:
    """Return the version of the wheel of prebuilt kernels, and the arch that serves each GPU.

    Another version's are not used.
    """
    wheel = next((searched.cache for searched in caches() if searched.origin == KERNELS), None)
    if wheel is None:
        return "not installed: kernels are compiled when they are first used"
    version = metadata.version(KERNELS)
    if version != __version__:
        raise UnsupportedError(
            f"{version}, for another version of jitkern; install {KERNELS} {__version__}"
        )
    archs = {entry.key.arch for entry in wheel.entries()}
    served = [version]
    for gpu in dict.fromkeys(gpus):
        usable = [str(arch) for arch in (gpu, *gpu._lower_minors) if str(arch) in archs]
        kernels = f"kernels for {usable[0]}" if usable else "no kernels"
        served.append(f"{kernels} for GPUs of {gpu}")
    return ", ".join(served)


def _trial(device: str) -> str:
    """Run an op, which proves that all of the above works together."""
    import torch

    table = torch.arange(64, dtype=torch.int32, device=device).reshape(8, 8)
    rows = torch.tensor([7, 0, 3], device=device)
    if not torch.equal(jitkern.indexing(table, rows), table[rows]):
        raise UnsupportedError("the result differs from PyTorch's; report it, with this table")
    return "correct"
