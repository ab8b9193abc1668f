"""``jitkern doctor``: what is installed, whether it works, and the fix where it does not."""

from __future__ import annotations

import argparse
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jitkern
from jitkern.arch import SUPPORTED_ARCHS, Arch, gpu_archs
from jitkern.cli import machine, ui
from jitkern.cli.kernels_wheel import kernels_wheel
from jitkern.cli.machine import Check
from jitkern.env import settings
from jitkern.errors import JitkernError, ToolchainError, UnsupportedError

if TYPE_CHECKING:
    from jitkern.cache.store import Cache
    from jitkern.compilers.find import Tool
    from jitkern.compilers.find_nvrtc import Nvrtc

SUMMARY = "check this machine: versions, GPU, compilers, cache"
DESCRIPTION = """\
Check all that jitkern needs or can use. "broken" is something without which the ops do not run
here, and makes the exit status 1; a "note" is something that only other uses need."""
EXAMPLE = "jitkern doctor"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the one option."""
    ui.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; return 1 if the ops cannot run here."""
    from jitkern.compilers.progress import quiet

    checks = []
    console = ui.console(stderr=True)
    with quiet(), console.status("looking") as status:
        for check in diagnose():
            checks.append(check)
            status.update(f"looked at {check.what}")
    broken = [check.what for check in checks if check.state == "broken"]
    if args.json:
        ui.say_json(checks=list(map(asdict, checks)), broken=broken)
        return 1 if broken else 0
    rows = [(check.what, check.state, check.found, check.fix) for check in checks]
    ui.console().print(ui.table(("", "", "found", "fix"), rows))
    ui.say(f"broken: {', '.join(broken)}" if broken else "the ops run on this machine")
    return 1 if broken else 0


def diagnose() -> Iterator[Check]:
    """Run every check, the most basic first."""
    yield machine.system()
    yield _python()
    yield Check("jitkern", f"{jitkern.__version__} in {Path(jitkern.__file__).parent}")
    torch = _torch()
    yield torch
    yield _distribution("apache-tvm-ffi", "tvm-ffi")
    host = _host_module()
    yield host
    if host.state == "ok":
        yield machine.bytecode()
    gpus = int(_host().device_count()) if host.state == "ok" else 0
    if host.state == torch.state == "ok":
        yield _gpu(gpus)
    if host.state == "ok":
        yield from _driver(gpus)
    yield from _compilers(bool(gpus), host_works=host.state == "ok")
    yield from machine.routes(has_gpu=bool(gpus))
    yield from _caches()
    yield Check("jitkern-kernels", *kernels_wheel())
    yield from machine.host_memory()
    if torch.state == "ok":
        yield from machine.links(gpus)
    if gpus:
        yield _calibration()
    if host.state == torch.state == "ok":
        yield _trial("cpu")
        for i in range(gpus):
            yield _trial(f"cuda:{i}")


def _python() -> Check:
    return Check("python", f"{platform.python_version()} ({sys.executable})")


def _distribution(name: str, shown: str) -> Check:
    try:
        return Check(shown, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(shown, "not installed", "broken", f"pip install {name}")


def _torch() -> Check:
    try:
        ui.require_torch()
    except UnsupportedError as error:
        reason, fix = ui.split_hint(error)
        return Check("torch", reason.removeprefix("torch: "), "broken", fix)
    import torch

    cuda = torch.version.cuda
    return Check("torch", f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'})")


def _host_module() -> Check:
    from jitkern.host import module as host

    try:
        found = host.find()
    except (JitkernError, OSError, ImportError) as error:
        fix = "install a jitkern wheel, or g++ and ninja to build it here"
        return Check("host module", _first_line(error), "broken", fix)
    did = "built" if found.source == "compiled" else "loaded"
    return Check("host module", f"{found.source}, {did} in {ui.ms_text(found.ms)} ms")


def _host() -> Any:
    from jitkern.host.module import module

    return module()


def _gpu(count: int) -> Check:
    import torch

    if not count:
        if Path("/proc/driver/nvidia/version").exists():
            return Check("GPU", "none visible", "note", "check CUDA_VISIBLE_DEVICES, nvidia-smi")
        return Check("GPU", "none: the ops run on the CPU")
    if not torch.cuda.is_available():
        known = ", ".join(dict.fromkeys(map(_driver_arch, range(count))))
        fix = "install a build of torch for CUDA (https://pytorch.org/get-started)"
        return Check("GPU", f"{count} of arch {known}, unknown to torch", "broken", fix)
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    archs = gpu_archs()
    found = f"{kinds}, arch {', '.join(map(str, dict.fromkeys(archs)))}"
    oldest = SUPPORTED_ARCHS[0]
    if min(archs) < oldest:
        fix = f"use a GPU of compute capability {oldest} or newer"
        return Check("GPU", f"{found}; not all kernels compile before {oldest}", "note", fix)
    return Check("GPU", found)


def _driver_arch(device: int) -> str:
    return str(Arch(*divmod(int(_host().device_arch(device)), 10)))


def _driver(gpus: int) -> Iterator[Check]:
    version = int(_host().driver_version())
    if version:
        from jitkern import calibration

        supports = f"for CUDA {version // 1000}.{version % 1000 // 10}"
        yield Check("driver", f"{calibration.kernel_driver() or 'version unknown'}, {supports}")
        if gpus:
            yield from _nvrtc_against_driver(version // 1000)


def _nvrtc_against_driver(driver_major: int) -> Iterator[Check]:
    from jitkern.compilers.find_nvrtc import find_nvrtc

    try:
        nvrtc = find_nvrtc()
    except ToolchainError:
        return  # has its own line
    if int(nvrtc.version.partition(".")[0]) > driver_major:
        package = "nvidia-cuda-nvrtc-cu12" if driver_major == 12 else "nvidia-cuda-nvrtc"
        found = f"makes code for CUDA {nvrtc.version}, newer than the driver"
        fix = f'update the driver, or pip install "{package}=={driver_major}.*"'
        yield Check("NVRTC", found, "broken", fix)


def _compilers(has_gpu: bool, *, host_works: bool) -> Iterator[Check]:
    from jitkern.compilers.find import find_cxx, find_ninja
    from jitkern.compilers.find_cuda import find_nvcc
    from jitkern.compilers.find_nvrtc import find_nvrtc

    compiler = settings().compiler
    yield _tool("NVRTC", find_nvrtc, needed=has_gpu and compiler == "nvrtc")
    yield _tool("nvcc", find_nvcc, needed=has_gpu and compiler == "nvcc")
    yield _tool("c++", find_cxx, needed=not host_works)
    yield _tool("ninja", find_ninja, needed=not host_works)


def _tool(what: str, find: Callable[[], Nvrtc | Tool], *, needed: bool) -> Check:
    try:
        tool = find()
    except ToolchainError as error:
        reason, fix = ui.split_hint(error)
        if needed:
            return Check(what, reason, "broken", fix)
        return Check(what, f"{reason} ({_USED_FOR[what]})", "note", fix)
    # Of the C++ compilers the version alone does not say which it is.
    return Check(what, f"{tool.id if what == 'c++' else tool.version} ({tool.path})")


_USED_FOR = {
    "NVRTC": "compiles kernels for GPUs",
    "nvcc": "only for JITKERN_COMPILER=nvcc and .cu files with host code",
    "c++": "only for C++ sources of your own",
    "ninja": "only for C++ sources of your own",
}


def _caches() -> Iterator[Check]:
    from jitkern.cache.search import caches

    for origin, _, cache in caches():
        yield _cache(origin, cache)


_CACHES = {
    "JITKERN_CACHE_DIR": ("cache", "", ""),
    "JITKERN_CACHE_PATH": (
        "read-only cache",
        "no such directory",
        "make it, or take it out of JITKERN_CACHE_PATH",
    ),
    "shipped": ("shipped cache", "none, as in a source checkout", ""),
    "jitkern-kernels": ("shipped kernels", "", ""),
}


def _cache(origin: str, cache: Cache) -> Check:
    """Whether it is used, and whose it is."""
    what, absent, fix = _CACHES[origin]
    try:
        cache.place.check()
        if not cache.read_only:
            ui.require_writable(cache.root, "set JITKERN_CACHE_DIR to a directory of yours")
    except JitkernError as error:
        reason, fix = ui.split_hint(error)
        # Not broken: a process then keeps what it compiles in a directory of its own.
        return Check(what, reason, "note", fix)
    rights = cache.place.rights()
    if not rights:
        return Check(what, f"{cache.root}: {absent}", "note" if fix else "ok", fix)
    verdict = "trusted" if cache.read_only else "trusted, writable"
    return Check(what, f"{cache.root}: {rights}, {verdict}; {_filled(cache)}")


def _filled(cache: Cache) -> str:
    entries = cache.entries()
    size = ui.bytes_text(sum(entry.bytes for entry in entries))
    most = "" if cache.max_bytes is None else f" of at most {ui.bytes_text(cache.max_bytes)}"
    return f"{len(entries):,} {'entry' if len(entries) == 1 else 'entries'}, {size}{most}"


def _calibration() -> Check:
    """Whose figures "auto" decides by."""
    from jitkern import calibration

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calibration.find(str(_host().gpu_name(0)), int(_host().driver_version()))
    if found is not None:
        return Check("calibration", f"{found[0]}: of this machine")
    for warning in caught:
        reason, fix = ui.split_hint(RuntimeError(warning.message))
        return Check("calibration", reason, "note", fix)
    return Check(
        "calibration", "none: the figures of an H200 are used", "note", "jitkern calibrate"
    )


def _trial(device: str) -> Check:
    """Run an op: the only proof that all of the above works together."""
    import torch

    try:
        table = torch.arange(64, dtype=torch.int32, device=device).reshape(8, 8)
        rows = torch.tensor([7, 0, 3], device=device)
        right = torch.equal(jitkern.indexing(table, rows), table[rows])
    except (JitkernError, RuntimeError, OSError) as error:
        return Check(f"indexing on {device}", _first_line(error), "broken", "see the line itself")
    if not right:
        fix = "report it, with this table: the result differs from PyTorch's"
        return Check(f"indexing on {device}", "wrong result", "broken", fix)
    return Check(f"indexing on {device}", "right")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
