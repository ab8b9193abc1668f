"""Where the compilers and CUDA's files are. Nothing here keeps a library loaded.

Each `find_*` raises ToolchainError, and the message ends with what to do.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jitkern.env import Settings, settings
from jitkern.errors import ToolchainError
from jitkern.fs import text_of

NVRTC_HINT = 'pip install "jitkern[cuda]"'
_CXX_HINT = "install g++ (apt install g++), or set CXX to a C++ compiler"
_CUDA_HINT = "install the CUDA toolkit, or set CUDA_HOME to where it is"

SYSTEM_CUDA = Path("/usr/local/cuda")
_SYSTEM_LIBS = tuple(
    Path("/usr", lib) for lib in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib")
)
_TARGETS = ("targets/x86_64-linux", "targets/sbsa-linux")
_LIB_DIRS = ("lib64", "lib", *(f"{target}/lib" for target in _TARGETS))
_INCLUDE_DIRS = ("include", *(f"{target}/include" for target in _TARGETS))
# NVIDIA's wheels in site-packages/nvidia: one directory for CUDA 13, one per package for CUDA 12.
_WHEELS = ("cu13", "cuda_nvrtc", "cuda_runtime", "cuda_cccl", "cuda_nvcc", "curand")

_PROBE_TIMEOUT_S = 30.0


class Tool(NamedTuple):
    """A program, or libnvrtc: the command that starts it, its name and its version."""

    command: tuple[str, ...]
    name: str
    version: str

    @property
    def path(self) -> Path:
        return Path(self.command[0])

    @property
    def id(self) -> str:
        """Name for a cache key, such as ``gcc-12.2.0``."""
        return f"{self.name}-{self.version}"


# -- programs --------------------------------------------------------------------------------------


def find_cxx() -> Tool:
    """Find the C++ compiler: ``CXX`` (with arguments if any), else c++, g++, clang++ on PATH."""
    now = settings()
    for name in ("c++", "g++", "clang++") if now.cxx is None else (now.cxx,):
        try:
            program, *arguments = shlex.split(name)
        except ValueError as error:
            raise ToolchainError(f"CXX: {name!r}: {error}; {_CXX_HINT}") from None
        path = _on_path(program, now.path)
        if path is not None:
            break
    else:
        missing = "a C++ compiler" if now.cxx is None else f"CXX: {now.cxx!r}"
        raise ToolchainError(f"{missing} was not found; {_CXX_HINT}")
    command = (path, *arguments)
    banner = _version(command, r"\A([^\n]+)", _CXX_HINT)
    numbers = re.findall(r"\d+\.\d+\.\d+", banner) or banner.split()
    return Tool(command, "clang" if "clang" in banner.lower() else "gcc", numbers[-1])


def find_ninja() -> Tool:
    """Find ninja: the pip package's, else on PATH."""
    try:
        # BIN_DIR has the program. Older packages have a script on PATH that starts it as a child,
        # which would outlive a signal to the script.
        from ninja import BIN_DIR

        path = _on_path("ninja", BIN_DIR)
    except ImportError:
        path = None
    path = path or _on_path("ninja", settings().path)
    if path is None:
        raise ToolchainError("ninja was not found; pip install ninja")
    version = _version((path,), r"\A(\d+(?:\.\d+)*)", "pip install ninja")
    return Tool((path,), "ninja", version)


def _on_path(name: str, path: str) -> str | None:
    """Return the absolute path of a program, or None. A build starts it in another directory."""
    program = shutil.which(name, path=path)
    # Links are not resolved: a compiler may behave by the name that starts it.
    return None if program is None else os.path.abspath(program)


def _version(command: tuple[str, ...], pattern: str, hint: str) -> str:
    """Return the first group of `pattern` in the output of ``--version``."""
    match = re.search(pattern, output_of((*command, "--version"), hint))
    if match is None:
        raise ToolchainError(f"{shlex.join(command)} --version prints no version; {hint}")
    return match[1]


@lru_cache(maxsize=32)
def output_of(command: tuple[str, ...], hint: str) -> str:
    """Return what a command prints, asked once; ToolchainError with the reason if it fails.

    A failure is not kept: the process may be out of descriptors for a moment.
    """
    import subprocess

    try:
        done = subprocess.run(command, input=b"", capture_output=True, timeout=_PROBE_TIMEOUT_S)
        reason = f"exit status {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        raise ToolchainError(f"{shlex.join(command)} does not work ({reason}); {hint}")
    return (done.stdout + done.stderr).decode("utf-8", "replace")


# -- NVRTC -----------------------------------------------------------------------------------------


def site_directories() -> tuple[str, ...]:
    """Return the directories that may hold pip packages: all of sys.path."""
    return tuple(directory for directory in sys.path if directory)


def _wheels(site: Sequence[str]) -> list[Path]:
    """Return the directories of NVIDIA's wheels."""
    nvidia = (Path(directory, "nvidia") for directory in site)
    return [wheels / name for wheels in nvidia if os.path.isdir(wheels) for name in _WHEELS]


def find_nvrtc() -> Tool:
    """Find libnvrtc: ``JITKERN_NVRTC``, NVIDIA's wheels, CUDA_HOME, the system's libraries."""
    return _find_nvrtc(settings(), site_directories())


@lru_cache(maxsize=4)
def _find_nvrtc(now: Settings, site: tuple[str, ...]) -> Tool:
    if now.nvrtc is not None:
        if not os.path.isfile(now.nvrtc):
            reason = f"{now.nvrtc} is not a file; unset it, or {NVRTC_HINT}"
            raise ToolchainError(f"JITKERN_NVRTC: {reason}")
        return _nvrtc(now.nvrtc)
    roots = [*_wheels(site), *filter(None, [now.cuda_home]), SYSTEM_CUDA]
    directories = [root / lib for root in roots for lib in _LIB_DIRS]
    for directory in (*directories, *now.library_path, *_SYSTEM_LIBS):
        for major in (13, 12):
            library = directory / f"libnvrtc.so.{major}"
            if os.path.isfile(library):
                return _nvrtc(library)
    raise ToolchainError(f"NVRTC (libnvrtc.so) was not found; {NVRTC_HINT}")


def _nvrtc(path: Path) -> Tool:
    """Take the version from the name of libnvrtc-builtins: loading the library takes 0.1 s."""
    # No glob and no regular expression: they cost a new process 1 ms.
    prefix = "libnvrtc-builtins.so."
    names = [name for name in os.listdir(path.resolve().parent) if name.startswith(prefix)]
    versions = {".".join(name.removeprefix(prefix).split(".")[:2]) for name in names}
    versions = {version for version in versions if version.replace(".", "", 1).isdecimal()}
    if len(versions) != 1:  # none, or two releases in one directory
        versions = {version_of_library(path)}
    return Tool((str(path),), "nvrtc", versions.pop())


def version_of_library(path: Path) -> str:
    """Load a libnvrtc and ask for its version; ToolchainError if it does not load."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        ctypes.CDLL(str(path)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except (OSError, AttributeError) as error:
        raise ToolchainError(f"{path} is no usable libnvrtc ({error}); {NVRTC_HINT}") from error
    return f"{major.value}.{minor.value}"


# -- a toolkit with nvcc, for single-source .cu files ----------------------------------------------


class CudaHome(NamedTuple):
    """A CUDA toolkit."""

    path: Path
    nvcc: Path
    include_dirs: tuple[Path, ...]
    cudart: Path  # libcudart.so or, in NVIDIA's wheels, libcudart.so.13


def find_cuda_home() -> CudaHome:
    """Find a toolkit with nvcc: CUDA_HOME or CUDA_PATH, PATH, /usr/local/cuda, NVIDIA's wheel."""
    return _find_cuda_home(settings(), site_directories())


def find_nvcc() -> Tool:
    """Find nvcc and ask for its version."""
    nvcc = str(find_cuda_home().nvcc)
    return Tool((nvcc,), "nvcc", _version((nvcc,), r"release [\d.]+, V([\d.]+)", _CUDA_HINT))


@lru_cache(maxsize=8)
def _find_cuda_home(now: Settings, site: tuple[str, ...]) -> CudaHome:
    if now.cuda_home is not None:
        roots = [now.cuda_home]
        needs = "bin/nvcc, include/cuda_runtime.h, libcudart"
        missing = f"CUDA_HOME: {now.cuda_home} holds no CUDA toolkit ({needs})"
    else:
        nvcc = _on_path("nvcc", now.path)
        roots = [] if nvcc is None else [Path(nvcc).resolve().parents[1]]
        roots += [SYSTEM_CUDA, *_wheels(site)]
        missing = "nvcc with a CUDA toolkit was not found"
    for root in roots:
        home = _toolkit(root)
        if home is not None:
            return home
    raise ToolchainError(f"{missing}; {_CUDA_HINT}")


def _toolkit(root: Path) -> CudaHome | None:
    """Return the toolkit in a directory if it is complete."""
    nvcc = root / "bin/nvcc"
    includes = tuple(filter(os.path.isdir, (root / name for name in _INCLUDE_DIRS)))
    names = ("libcudart.so", "libcudart.so.13", "libcudart.so.12")
    cudarts = (root / lib / name for lib in _LIB_DIRS for name in names)
    cudart = next(filter(os.path.exists, cudarts), None)
    is_complete = os.path.isfile(nvcc) and _has(includes, "cuda_runtime.h")
    return CudaHome(root, nvcc, includes, cudart) if is_complete and cudart is not None else None


# -- CUDA's own headers, for NVRTC -----------------------------------------------------------------
#
# cuda_fp16.h, cooperative_groups.h, cuda/std/..., CUB: 2400 files, some with computed includes.
# Reading them takes as long as a compile, so the include closure leaves them out. The variant of an
# entry names their version: NVRTC's own if NVRTC brings them, else the toolkit's.

FIRST_BUNDLED = (13, 3)  # the NVRTC that brings headers, and knows --use-bundled-headers

# A directory with one of these files holds CUDA's own headers.
_MARKS = ("cuda_runtime.h", "cuda/std/version", "cub/version.cuh", "thrust/version.h")
# How the names of CUDA's own headers begin.
_OWN = ("cuda", "cub/", "thrust/", "nv/", "cooperative_groups", "mma.h", "curand", "device_")

# The headers of the C++ and C standard libraries, and of nvrtc.STANDINS.
_STD = re.compile(r"[a-z_]+|c?(?:assert|float|limits|math|stdio|stdlib|string|time)\.h")
_STANDINS = ("stdint.h", "stddef.h", "cuda_runtime.h", "device_launch_parameters.h")


class CudaHeaders(NamedTuple):
    """CUDA's own headers for one compile."""

    installed: tuple[Path, ...] = ()  # directories of CUDA_HOME or of NVIDIA's wheels
    bundled: bool = False  # NVRTC's own are used
    are_missing: bool = False  # headers are wanted and there are none

    @property
    def id(self) -> str:
        """Name of the installed headers for a variant, such as ``cuda-12080``; else empty."""
        texts = (text_of(directory / "cuda_runtime_api.h") for directory in self.installed)
        versions = re.findall(r"^#define CUDART_VERSION +(\d+)", "".join(texts), re.MULTILINE)
        return "-".join(["cuda", *versions[:1]]) if self.installed else ""


def is_cuda_headers(directory: Path) -> bool:
    """Tell whether a directory holds CUDA's own headers: a toolkit's, a package's, CCCL's."""
    return any(os.path.isfile(directory / mark) for mark in _MARKS)


def find_headers(missing: Iterable[str], library: Tool) -> CudaHeaders:
    """Find CUDA's own headers for names that the include closure did not resolve.

    NVRTC 13.3 and newer bring theirs. Older ones get those of CUDA_HOME, else of NVIDIA's wheels.
    """
    if all(name in _STANDINS or _STD.fullmatch(name) for name in missing):
        return CudaHeaders()
    if tuple(map(int, library.version.split("."))) >= FIRST_BUNDLED:
        return CudaHeaders(bundled=True)
    installed = _installed_headers(settings(), site_directories())
    return CudaHeaders(installed, are_missing=not installed)


def header_hint(name: str) -> str:
    """Return what to do about a header that NVRTC did not find; empty if nothing is known."""
    if name.startswith(_OWN):
        return (
            f"{name} is CUDA's own; NVRTC 13.3 and newer bring most: pip install "
            '"nvidia-cuda-nvrtc>=13.3", or set CUDA_HOME for an older one'
        )
    if _STD.fullmatch(name):
        return "NVRTC has no C++ standard library; what CUDA has of it is in <cuda/std/...>"
    return ""


def _installed_headers(now: Settings, site: Sequence[str]) -> tuple[Path, ...]:
    """Return the header directories of CUDA_HOME, else of NVIDIA's wheels, CCCL's included."""
    roots = [now.cuda_home] if now.cuda_home is not None else _wheels(site)
    names = [f"{include}{cccl}" for include in _INCLUDE_DIRS for cccl in ("", "/cccl")]
    # Directories may be links to one another.
    paths = dict.fromkeys(Path(os.path.realpath(root / name)) for root in roots for name in names)
    includes = tuple(filter(os.path.isdir, paths))
    return includes if any(map(is_cuda_headers, includes)) else ()


def _has(directories: Iterable[Path], name: str) -> bool:
    return any(os.path.isfile(directory / name) for directory in directories)
