"""Where the compilers and CUDA's files are. Nothing here loads a library.

Each `find_*` raises ToolchainError, and the message ends with what to do.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jitkern.env import Settings, settings
from jitkern.errors import ToolchainError
from jitkern.fs import digest

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
# CUDA 12 from pip is a toolkit spread over one directory per package.
_PACKAGES_12 = ("cuda_nvrtc", "cuda_runtime", "cuda_cccl", "cuda_nvcc", "curand")

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


def find_cxx() -> Tool:
    """Find the C++ compiler: ``CXX`` (with arguments if any), else c++, g++, clang++ on PATH."""
    now = settings()
    for name in ("c++", "g++", "clang++") if now.cxx is None else (now.cxx,):
        try:
            program, *arguments = shlex.split(name)
        except ValueError as error:
            raise ToolchainError(f"CXX: {name!r}: {error}; {_CXX_HINT}") from None
        found = _on_path(program, now.path)
        if found is not None:
            break
    else:
        missing = "a C++ compiler" if now.cxx is None else f"CXX: {now.cxx!r}"
        raise ToolchainError(f"{missing} was not found; {_CXX_HINT}")
    command = (found, *arguments)
    banner = _version(command, r"\A([^\n]+)", _CXX_HINT)
    numbers = re.findall(r"\d+\.\d+\.\d+", banner) or banner.split()
    return Tool(command, "clang" if "clang" in banner.lower() else "gcc", numbers[-1])


def find_ninja() -> Tool:
    """Find ninja: that of the pip package, else on PATH."""
    try:
        # BIN_DIR has the program. Older packages have a script on PATH that starts it as a child,
        # which would outlive a signal to the script.
        from ninja import BIN_DIR

        found = _on_path("ninja", BIN_DIR)
    except ImportError:
        found = None
    found = found or _on_path("ninja", settings().path)
    if found is None:
        raise ToolchainError("ninja was not found; pip install ninja")
    version = _version((found,), r"\A(\d+(?:\.\d+)*)", "pip install ninja")
    return Tool((found,), "ninja", version)


def _on_path(name: str, path: str) -> str | None:
    """Return the absolute path of a program, or None. A build starts it in another directory."""
    found = shutil.which(name, path=path)
    # Links are not resolved: a compiler may behave by the name that starts it.
    return None if found is None else os.path.abspath(found)


def _version(command: tuple[str, ...], pattern: str, hint: str) -> str:
    """Return the first group of `pattern` in the output of ``--version``."""
    match = re.search(pattern, _output((*command, "--version")))
    if match is None:
        raise ToolchainError(f"{shlex.join(command)} --version does not work; {hint}")
    return match[1]


@lru_cache(maxsize=32)
def _output(command: tuple[str, ...]) -> str:
    """Return what a command prints; empty if it fails."""
    import subprocess

    try:
        done = subprocess.run(command, input=b"", capture_output=True, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).decode("utf-8", "replace") if done.returncode == 0 else ""


def site_directories() -> tuple[str, ...]:
    """Return the directories that may hold pip packages: all of sys.path."""
    return tuple(directory for directory in sys.path if directory)


def _places(now: Settings, site: Sequence[str]) -> Iterator[list[Path]]:
    """Yield the directories of each possible toolkit, in the order of the search.

    These are pip packages, CUDA_HOME, the directory of the nvcc on PATH, /usr/local/cuda, conda.
    """
    for directory in site:
        nvidia = f"{directory}/nvidia"
        if os.path.isdir(nvidia):
            yield [Path(nvidia, "cu13")]
            yield [Path(nvidia, name) for name in _PACKAGES_12]
    nvcc = _on_path("nvcc", now.path)
    around = None if nvcc is None else Path(nvcc).resolve().parents[1]
    for home in (now.cuda_home, around, SYSTEM_CUDA, Path(sys.prefix)):
        if home is not None:
            yield [home]


def find_nvrtc() -> Tool:
    """Find libnvrtc: ``JITKERN_NVRTC``, pip packages, CUDA toolkits, the system's libraries."""
    return _find_nvrtc(settings(), site_directories())


@lru_cache(maxsize=4)
def _find_nvrtc(now: Settings, site: tuple[str, ...]) -> Tool:
    given = now.nvrtc
    if given is not None:
        if not os.path.isfile(given):
            raise ToolchainError(f"JITKERN_NVRTC: {given} is not a file; unset it, or {NVRTC_HINT}")
        return _nvrtc(given)
    for directory in _library_dirs(now, site):
        for major in (13, 12):
            library = directory / f"libnvrtc.so.{major}"
            if os.path.isfile(library):
                return _nvrtc(library)
    instead = ""
    with suppress(ToolchainError):
        nvcc = _find_cuda_home(now, site).nvcc
        instead = f", or set JITKERN_COMPILER=nvcc, for there is {nvcc}"
    raise ToolchainError(f"NVRTC (libnvrtc.so) was not found; {NVRTC_HINT}{instead}")


def _library_dirs(now: Settings, site: Sequence[str]) -> Iterator[Path]:
    for place in _places(now, site):
        yield from (root / lib for root in place for lib in _LIB_DIRS)
    yield from (*now.library_path, *_SYSTEM_LIBS)


def _nvrtc(path: Path) -> Tool:
    """Take the version from the name of libnvrtc-builtins: loading the library takes 0.1 s."""
    # No glob and no regular expression: they cost a new process 1 ms.
    prefix = "libnvrtc-builtins.so."
    names = [name for name in os.listdir(path.resolve().parent) if name.startswith(prefix)]
    versions = {".".join(name.removeprefix(prefix).split(".")[:2]) for name in names}
    versions = {version for version in versions if version.replace(".", "", 1).isdecimal()}
    if len(versions) == 1:
        return Tool((str(path),), "nvrtc", versions.pop())
    # None, or two releases in one directory: ask the library itself.
    from jitkern.compilers.nvrtc import load_nvrtc

    return Tool((str(path),), "nvrtc", load_nvrtc(path).version)


class CudaHome(NamedTuple):
    """A CUDA toolkit."""

    path: Path
    nvcc: Path  # that on PATH, even a wrapper script, before the toolkit's own
    include_dirs: tuple[Path, ...]
    cudart: Path  # libcudart.so or, in pip packages, libcudart.so.13


def find_cuda_home() -> CudaHome:
    """Find a toolkit with nvcc: CUDA_HOME or CUDA_PATH, PATH, pip packages, /usr/local/cuda."""
    return _find_cuda_home(settings(), site_directories())


def find_nvcc() -> Tool:
    """Find nvcc and ask for its version."""
    nvcc = str(find_cuda_home().nvcc)
    return Tool((nvcc,), "nvcc", _version((nvcc,), r"release [\d.]+, V([\d.]+)", _CUDA_HINT))


@lru_cache(maxsize=8)
def _find_cuda_home(now: Settings, site: tuple[str, ...]) -> CudaHome:
    given = now.cuda_home
    if given is None:
        homes = (*_toolkits_on_path(now.path), *map(_toolkit, _places(now, site)))
        missing = "nvcc with a CUDA toolkit was not found"
    else:
        homes = (_toolkit([given]),)
        needs = "bin/nvcc, include/cuda_runtime.h, libcudart"
        missing = f"CUDA_HOME: {given} holds no CUDA toolkit ({needs})"
    for home in homes:
        if home is not None:
            return home
    raise ToolchainError(f"{missing}; {_CUDA_HINT}")


def _toolkits_on_path(path: str) -> Iterator[CudaHome | None]:
    nvcc = _on_path("nvcc", path)
    if nvcc is not None:
        yield _toolkit([Path(nvcc).resolve().parents[1]], nvcc)
        # A wrapper script may be anywhere; a dry run of nvcc prints where the toolkit is.
        output = _output((nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"))
        top = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
        if top is not None:
            yield _toolkit([Path(top[1].strip()).resolve()], nvcc)


def _toolkit(roots: Sequence[Path], nvcc: str | None = None) -> CudaHome | None:
    """Return the toolkit in these directories if it is complete."""
    programs = [Path(nvcc)] if nvcc else [root / "bin/nvcc" for root in roots]
    includes = [root / include for root in roots for include in _INCLUDE_DIRS]
    names = ("libcudart.so", "libcudart.so.13", "libcudart.so.12")
    cudarts = [root / lib / name for root in roots for lib in _LIB_DIRS for name in names]
    program = next(filter(os.path.isfile, programs), None)
    includes = list(filter(os.path.isdir, includes))
    cudart = next(filter(os.path.exists, cudarts), None)
    if program is None or cudart is None or not _has(includes, "cuda_runtime.h"):
        return None
    return CudaHome(roots[0], program, tuple(includes), cudart)


# -- CUDA's own headers ----------------------------------------------------------------------------
#
# cuda_fp16.h, cooperative_groups.h, cuda/std/..., CUB: 2400 files, some with computed includes.
# Reading them takes as long as a compile, so the include closure leaves them out. The variant of an
# entry names them: by NVRTC's version if NVRTC brings them, else by a digest over the names, sizes
# and times of the files.

FIRST_BUNDLED = (13, 3)  # the NVRTC that brings headers, and knows --use-bundled-headers

# The headers of NVRTC 13.3 to 13.5.
_BUNDLED = re.compile(
    r"(?:cuda|cub|thrust|nv|cooperative_groups|crt)/.+"
    r"|(?:cooperative_groups|cuComplex|math_constants|mma|vector_types|cudart_platform"
    r"|cuda_(?:fp16|bf16|fp8|fp6|fp4|tf32|pipeline|awbarrier)\w*)\.h(?:pp)?"
)
# A directory with one of these files holds CUDA's own headers.
_MARKS = ("cuda_runtime.h", "cuda/std/version", "cub/version.cuh", "thrust/version.h")

_HEADERS_12 = "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12"

# The headers of the C++ and C standard libraries, and of nvrtc.STANDINS.
_STD = re.compile(r"[a-z_]+|c?(?:assert|float|limits|math|stdio|stdlib|string|time)\.h")
_STANDINS = ("stdint.h", "stddef.h", "cuda_runtime.h", "device_launch_parameters.h")


class CudaHeaders(NamedTuple):
    """CUDA's own headers for one compile: the search order is given, bundled, found."""

    given: tuple[Path, ...] = ()  # directories that the caller named
    found: tuple[Path, ...] = ()  # directories of pip packages or a toolkit
    bundled: bool = False  # whether NVRTC's own are used
    complete: bool = True  # whether all wanted headers are there

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((*self.given, *self.found)))

    @property
    def id(self) -> str:
        """Name of those that were found, for a variant, such as ``cuda-1a2b3c4d5e6f``.

        It takes a stat of every file (20 ms for the 2459 of CUDA 13.5).
        """
        return f"cuda-{_state(self.found)}" if self.found else ""


def is_cuda_headers(directory: Path) -> bool:
    """Tell whether a directory holds CUDA's own headers: a toolkit's, a package's, CCCL's."""
    return any(os.path.isfile(directory / mark) for mark in _MARKS)


def find_headers(
    missing: Iterable[str], given: Sequence[Path] = (), library: Tool | None = None
) -> CudaHeaders:
    """Find CUDA's own headers among `missing`: names that the include closure did not resolve.

    `given` are directories of the caller with CUDA's own headers. `library` is the NVRTC; None
    stands for nvcc, which finds the rest by itself.
    """
    wanted = _wanted(missing)
    if not wanted:
        return CudaHeaders()
    given = tuple(given)
    if library is None:
        return CudaHeaders(given)
    has_bundle = _release(library) >= FIRST_BUNDLED
    rest = [name for name in wanted if not _has(given, name)]
    cuda = [name for name in rest if _BUNDLED.fullmatch(name)]
    found = _best_place([name for name in rest if not (has_bundle and name in cuda)])
    bundled = has_bundle and bool(given or cuda or found)
    complete = has_bundle or all(_has(found, name) for name in cuda)
    return CudaHeaders(given, found, bundled, complete)


def given_id(missing: Iterable[str], given: Sequence[Path]) -> str:
    """Return a digest of the directories that the caller named, for a key."""
    return _state(given) if _wanted(missing) else ""


def header_hint(name: str, library: Tool) -> str:
    """Return what to do about a header that NVRTC did not find; empty if nothing is known."""
    if _BUNDLED.fullmatch(name) or name.startswith(("cuda", "curand", "device_")):
        pip = _HEADERS_12 if _release(library) < (13,) else '"nvidia-cuda-nvrtc>=13.3"'
        return (
            f"{name} is CUDA's own and was found neither in pip packages nor in a toolkit; pip "
            f"install {pip}, set CUDA_HOME, or name its directory in extra_include_paths"
        )
    if _STD.fullmatch(name):
        return "NVRTC has no C++ standard library; what CUDA has of it is in <cuda/std/...>"
    return ""


def _wanted(missing: Iterable[str]) -> list[str]:
    return [name for name in missing if name not in _STANDINS and not _STD.fullmatch(name)]


def _has(directories: Iterable[Path], name: str) -> bool:
    return any(os.path.isfile(directory / name) for directory in directories)


def _release(library: Tool) -> tuple[int, ...]:
    return tuple(map(int, library.version.split(".")))


def _best_place(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the directories of the place that has most of `names`; empty if none has any."""
    places = map(_header_dirs, _places(settings(), site_directories())) if names else ()
    best = max(places, key=lambda place: sum(_has(place, name) for name in names), default=())
    return best if any(_has(best, name) for name in names) else ()


def _header_dirs(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return the header directories of a toolkit, CCCL's included; empty if it has none."""
    includes = [root / include for root in roots for include in _INCLUDE_DIRS]
    spelled = [include / cccl for include in includes for cccl in ("", "cccl")]
    # One may be a link to another.
    found = dict.fromkeys(Path(os.path.realpath(path)) for path in filter(os.path.isdir, spelled))
    return tuple(found) if any(map(is_cuda_headers, found)) else ()


def _state(directories: Sequence[Path]) -> str:
    """Return a digest over names, sizes and times (whole seconds) of all files below."""
    files = []
    for top in map(str, directories):
        for folder, _, names in os.walk(top, followlinks=True):
            for file in filter(os.path.isfile, (f"{folder}/{name}" for name in names)):
                status = os.stat(file)
                files.append((file[len(top) :], status.st_size, int(status.st_mtime)))
    return digest(sorted(files))[:12]
