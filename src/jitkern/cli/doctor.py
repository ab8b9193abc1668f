"""``jitkern doctor``: what is installed, whether it works, and the fix if it does not."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jitkern
from jitkern.arch import SUPPORTED_ARCHS, Arch, gpu_archs
from jitkern.cache.get import KERNELS, caches
from jitkern.cache.store import Cache
from jitkern.cli import ui
from jitkern.errors import CacheError, JitkernError, UnsupportedError
from jitkern.fs import kernel_driver, processor, require_writable

SUMMARY = "check this machine: versions, GPU, compilers, cache"
DESCRIPTION = """\
Check all that jitkern needs or can use. "broken": the ops do not run here, and the exit status is
1. "note": something that only other uses need."""
EXAMPLE = "jitkern doctor"

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Check:
    """One line: what was checked, what was found, and the fix unless it is ok."""

    what: str
    found: str
    state: Literal["ok", "note", "broken"] = "ok"
    fix: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    ui.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print each check when it is done; return 1 if the ops cannot run here."""
    checks = []
    for check in diagnose():
        checks.append(check)
        if not args.json:
            ui.say(f"{check.what:16} {check.state:6} {check.found}")
            if check.fix:
                ui.say(f"{'fix: ':>29}{check.fix}")
    broken = [check.what for check in checks if check.state == "broken"]
    if args.json:
        ui.say_json(checks=list(map(asdict, checks)), broken=broken)
    else:
        ui.say(f"broken: {', '.join(broken)}" if broken else "the ops run on this machine")
    return 1 if broken else 0


def diagnose() -> Iterator[Check]:
    """Run every check, the most basic first."""
    libc, cores = " ".join(platform.libc_ver()), len(os.sched_getaffinity(0))
    kernel = f"{platform.system()} {platform.release()}"
    yield Check("system", f"{kernel}, {libc}, {processor()}, {cores} cores")
    yield Check("python", f"{platform.python_version()} ({sys.executable})")
    yield Check("jitkern", f"{jitkern.__version__} in {Path(jitkern.__file__).parent}")
    torch = _look("torch", _torch, needed=True)
    yield torch
    fix = "pip install apache-tvm-ffi"
    yield _look("tvm-ffi", lambda: metadata.version("apache-tvm-ffi"), needed=True, fix=fix)
    fix = "install a jitkern wheel, or g++ and ninja to build it here"
    host = _look("host module", _host_module, needed=True, fix=fix)
    yield host
    ops_run, gpus, version = host.state == torch.state == "ok", 0, 0
    if host.state == "ok":
        from jitkern.host.module import module

        gpus, version = int(module().device_count()), int(module().driver_version())
        yield _look("bytecode", bytecode)
        if torch.state == "ok":
            yield gpu(gpus)
        if version:
            supports = f"for CUDA {version // 1000}.{version % 1000 // 10}"
            yield Check("driver", f"{kernel_driver() or 'version unknown'}, {supports}")
    yield from _compilers(version // 1000 if gpus else 0, host_works=host.state == "ok")
    yield from _caches()
    archs = gpu_archs() if torch.state == "ok" else []
    yield _look("jitkern-kernels", partial(kernels_wheel, archs))
    yield _look("huge pages", huge_pages)
    if gpus and ops_run:
        from jitkern.comm import nccl

        yield _look("NCCL", lambda: nccl.load())
    if ops_run:
        for device in ("cpu", *(f"cuda:{i}" for i in range(gpus))):
            yield _look(f"indexing on {device}", partial(_trial, device), needed=True)


def _look(
    what: str, find: Callable[[], str], *, needed: bool = False, use: str = "", fix: str = ""
) -> Check:
    """Return what `find` does. Its error, "reason; fix", is a note, or broken if it is `needed`."""
    try:
        return Check(what, find())
    except (JitkernError, ImportError, OSError, RuntimeError, ValueError) as error:
        reason, separator, hint = str(error).rpartition("; ")
        reason, hint = (reason, hint) if separator else (hint, "")
        reason = re.sub(rf"^({re.escape(what)}|init_pynccl): ", "", reason).partition("\n")[0]
        if use and not needed:
            reason += f" ({use})"
        return Check(what, reason, "broken" if needed else "note", fix or hint)


# -- packages and GPU ------------------------------------------------------------------------------


def _torch() -> str:
    ui.require_torch()
    import torch

    cuda = torch.version.cuda
    return f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'})"


def _host_module() -> str:
    from jitkern.host import module as host

    found = host.find()
    did = "built" if found.source == "compiled" else "loaded"
    return f"{found.source}, {did} in {ui.ms_text(found.ms)} ms"


def bytecode() -> str:
    """Tell whether Python keeps what it compiles: `uv` and `pip --no-compile` write no bytecode."""
    packages = ("jitkern", "tvm_ffi")
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages]
    files = [Path(m.__spec__.cached) for m in modules if m.__spec__ and m.__spec__.cached]
    lacking = sum(not file.exists() for file in files)
    if not lacking:
        return f"of all {len(files)} modules"
    # A first call takes 152 to 227 ms then, and 63 to 73 otherwise, on three hosts.
    folders = " ".join(str(Path(sys.modules[name].__file__ or "").parent) for name in packages)
    raise UnsupportedError(
        f"{lacking} of {len(files)} modules have none: each process compiles them, 0.1 to 0.2 s"
        f"; python -m compileall -q {folders}"
    )


def gpu(count: int) -> Check:
    """Return the GPUs, and whether torch and the kernels support them."""
    import torch

    if not count:
        if Path("/proc/driver/nvidia/version").exists():
            return Check("GPU", "none visible", "note", "check CUDA_VISIBLE_DEVICES, nvidia-smi")
        return Check("GPU", "none: the ops run on the CPU")
    if not torch.cuda.is_available():
        fix = "install a build of torch for CUDA (https://pytorch.org/get-started)"
        return Check("GPU", f"{count}, unknown to torch", "broken", fix)
    names = {torch.cuda.get_device_name(i): None for i in range(count)}
    archs, oldest = gpu_archs(), SUPPORTED_ARCHS[0]
    found = f"{count} x {', '.join(names)}, arch {', '.join(map(str, dict.fromkeys(archs)))}"
    if min(archs) < oldest:
        fix = f"use a GPU of compute capability {oldest} or newer"
        return Check("GPU", f"{found}; not all kernels compile before {oldest}", "note", fix)
    return Check("GPU", found)


def _compilers(driver: int, *, host_works: bool) -> Iterator[Check]:
    """Check the compilers; `driver` is the CUDA that the GPUs' driver is for, 0 without GPUs."""
    from jitkern.compilers import find

    def shown(look: Callable[[], Any]) -> str:
        tool = look()
        if look is find.find_nvrtc and 0 < driver < int(tool.version.partition(".")[0]):
            package = "nvidia-cuda-nvrtc-cu12" if driver == 12 else "nvidia-cuda-nvrtc"
            raise UnsupportedError(
                f"makes code for CUDA {tool.version}, newer than the driver; "
                f'update the driver, or pip install "{package}=={driver}.*"'
            )
        # The version of a C++ compiler does not say which compiler it is.
        return f"{tool.id if look is find.find_cxx else tool.version} ({tool.path})"

    cxx_use = "only for C++ sources of your own"
    nvcc_use = "only for .cu files with host code"
    for what, look, needed, use in (
        ("NVRTC", find.find_nvrtc, driver > 0, "compiles kernels for GPUs"),
        ("nvcc", find.find_nvcc, False, nvcc_use),
        ("c++", find.find_cxx, not host_works, cxx_use),
        ("ninja", find.find_ninja, not host_works, cxx_use),
    ):
        yield _look(what, partial(shown, look), needed=needed, use=use)


# -- caches and memory -----------------------------------------------------------------------------

_CACHES = {
    "JITKERN_CACHE_DIR": "cache",
    "JITKERN_CACHE_PATH": "read-only cache",
    "shipped": "shipped cache",
    "jitkern-kernels": "shipped kernels",
}


def _caches() -> Iterator[Check]:
    # What is wrong is a note: the process keeps what it compiles in a directory of its own.
    for origin, _, cache in caches():
        yield _look(_CACHES[origin], partial(_cache, cache, is_optional=origin == "shipped"))


def _cache(cache: Cache, *, is_optional: bool) -> str:
    cache.check()
    if not cache.read_only:
        require_writable(cache.root, "set JITKERN_CACHE_DIR to a directory of yours")
    if not cache.root.is_dir():
        if is_optional:
            return f"{cache.root}: none, as in a source checkout"
        fix = "make it, or take it out of JITKERN_CACHE_PATH"
        raise CacheError(f"{cache.root}: no such directory; {fix}")
    entries = cache.entries()
    size = ui.bytes_text(sum(entry.size_bytes for entry in entries))
    most = "" if cache.max_bytes is None else f" of at most {ui.bytes_text(cache.max_bytes)}"
    rights = "trusted" if cache.read_only else "trusted, writable"
    return f"{cache.root}: {rights}; entries: {len(entries):,}, {size}{most}"


def kernels_wheel(gpus: Sequence[Arch] = ()) -> str:
    """Return the version of the wheel of prebuilt kernels, and the arch that serves each GPU.

    Another version's are not used.
    """
    wheel = next((cache for origin, _, cache in caches() if origin == KERNELS), None)
    if wheel is None:
        return "not installed: kernels are compiled when they are first used"
    version = metadata.version(KERNELS)  # unpacked by hand, it has none: a note says so
    if version != jitkern.__version__:
        fix = f"install {KERNELS} {jitkern.__version__}"
        raise UnsupportedError(f"{version}, for another version of jitkern; {fix}")
    archs = {entry.key.arch for entry in wheel.entries()}
    served = [version]
    for gpu in dict.fromkeys(gpus):
        usable = [str(arch) for arch in (gpu, *gpu.lower_minors) if str(arch) in archs]
        kernels = f"kernels for {usable[0]}" if usable else "no kernels"
        served.append(f"{kernels} for GPUs of {gpu}")
    return ", ".join(served)


def huge_pages() -> str:
    """Return the mode of transparent huge pages, on which pools of pinned memory depend."""
    mode = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None
    if mode and mode[1] == "never":
        raise UnsupportedError(
            f"never (PinnedPool takes longer); as root: echo madvise > {_HUGE_PAGES}"
        )
    return mode[1] if mode else "unknown"


def _trial(device: str) -> str:
    """Run an op, which proves that all of the above works together."""
    import torch

    table = torch.arange(64, dtype=torch.int32, device=device).reshape(8, 8)
    rows = torch.tensor([7, 0, 3], device=device)
    if not torch.equal(jitkern.indexing(table, rows), table[rows]):
        raise UnsupportedError("the result differs from PyTorch's; report it, with this table")
    return "right"
