"""Where the compilers and CUDA's files are. Nothing here loads a library.

Each `find_*` caches its answer for the settings it depends on. It raises ToolchainError, and the
message ends with what to do.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jitkern.env import settings
from jitkern.errors import ToolchainError
from jitkern.fs import digest

NVRTC_HINT = 'pip install "jitkern[cuda]"'
_CXX_HINT = "install g++ (apt install g++), or set CXX to a C++ compiler"
_CUDA_HINT = "install the CUDA toolkit, or set CUDA_HOME to where it is"

SYSTEM_CUDA = Path("/usr/local/cuda")
_SYSTEM_LIBS = tuple(Path("/usr", lib) for lib in ("lib/x86_64-linux-gnu", "lib64", "lib"))
_TARGETS = ("targets/x86_64-linux", "targets/sbsa-linux")
_LIB_DIRS = ("lib64", "lib", *(f"{target}/lib" for target in _TARGETS))
_INCLUDE_DIRS = ("include", *(f"{target}/include" for target in _TARGETS))
# CUDA 12 from pip: a toolkit spread over one directory per package.
_PACKAGES_12 = ("cuda_runtime", "cuda_cccl", "cuda_nvcc", "curand")

_NVRTC_PACKAGES = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")

_PROBE_TIMEOUT_S = 30.0


class Tool(NamedTuple):
    """A program: the command that starts it, its name and its version."""

    command: tuple[str, ...]
    name: str
    version: str

    @property
    def path(self) -> Path:
        """Path of the program."""
        return Path(self.command[0])

    @property
    def id(self) -> str:
        """Name for a cache key, such as ``gcc-12.2.0``."""
        return f"{self.name}-{self.version}"


# -- C++ and ninja ---------------------------------------------------------------------------------


def find_cxx() -> Tool:
    """Find the C++ compiler: ``CXX`` (with arguments if any), else c++, g++, clang++ on PATH."""
    now = settings()
    if now.cxx is None:
        found = (_on_path(name, now.path) for name in ("c++", "g++", "clang++"))
        command = [next(filter(None, found), "")]
        if not command[0]:
            raise ToolchainError(f"no C++ compiler was found; {_CXX_HINT}")
    else:
        try:
            command = shlex.split(now.cxx)
        except ValueError as error:  # an open quote
            raise ToolchainError(f"CXX: {now.cxx!r}: {error}; {_CXX_HINT}") from None
        command[0] = _on_path(command[0], now.path) or ""
        if not command[0]:
            raise ToolchainError(f"CXX: {now.cxx!r} was not found; {_CXX_HINT}")
    banner = _version(tuple(command), r"\A([^\n]+)", _CXX_HINT)
    match = re.search(r"(\d+\.\d+\.\d+)(?!.*\d+\.\d+\.\d+)", banner)
    name = "clang" if "clang" in banner.lower() else "gcc"
    return Tool(tuple(command), name, match[1] if match is not None else banner.split()[-1])


def find_ninja() -> Tool:
    """Find ninja: that of the pip package, else on PATH."""
    try:
        # The program of the package. Older packages also install a script that starts it as a
        # child, and a signal to the script would leave the child running.
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
    # Links stay: what a compiler does may depend on the name that starts it.
    return None if found is None else os.path.abspath(found)


def _version(command: tuple[str, ...], pattern: str, hint: str) -> str:
    """Return what `pattern` finds in the output of ``--version``."""
    status = Path(command[0]).stat()
    output = _probe((*command, "--version"), (status.st_mtime_ns, status.st_size))
    match = re.search(pattern, output)
    if match is None:
        raise ToolchainError(f"{shlex.join(command)} --version does not work; {hint}")
    return match[1]


@lru_cache(maxsize=32)
def _probe(command: tuple[str, ...], _file: object = None) -> str:
    """Return what a command prints; empty if it fails."""
    import subprocess

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


# -- NVRTC -----------------------------------------------------------------------------------------


class Nvrtc(NamedTuple):
    """A libnvrtc that is not loaded yet: its path, and its version such as ``13.5``."""

    path: Path
    version: str

    @property
    def id(self) -> str:
        """Name for a cache key, such as ``nvrtc-13.5``."""
        return f"nvrtc-{self.version}"


def find_nvrtc() -> Nvrtc:
    """Find libnvrtc: ``JITKERN_NVRTC``, pip packages, CUDA toolkits, the system's libraries."""
    now = settings()
    given, search = now.nvrtc, (now.cuda_home, now.path, now.library_path, site_directories())
    return _find_nvrtc(*search) if given is None else _given_nvrtc(given)


@lru_cache(maxsize=4)
def _given_nvrtc(given: Path) -> Nvrtc:
    if not os.path.isfile(given):
        raise ToolchainError(f"JITKERN_NVRTC: {given} is not a file; unset it, or {NVRTC_HINT}")
    return Nvrtc(given, _nvrtc_version(given))


@lru_cache(maxsize=4)
def _find_nvrtc(
    cuda_home: Path | None, path: str, library_path: tuple[Path, ...], site: tuple[str, ...]
) -> Nvrtc:
    homes = _homes(cuda_home, path)
    folders = [home / lib for home in homes for lib in _LIB_DIRS]
    folders += [*library_path, Path(sys.prefix, "lib"), *_SYSTEM_LIBS]  # the second is conda's
    candidates = [Path(folder, "nvidia", name) for folder in site for name in _NVRTC_PACKAGES]
    candidates += [folder / f"libnvrtc.so.{major}" for folder in folders for major in (13, 12)]
    for library in candidates:
        if os.path.isfile(library):
            return Nvrtc(library, _nvrtc_version(library))
    nvccs = (_on_path("nvcc", path), *(home / "bin/nvcc" for home in homes))
    nvcc = next((nvcc for nvcc in nvccs if nvcc and os.path.isfile(nvcc)), None)
    instead = f", or set JITKERN_COMPILER=nvcc, for there is {nvcc}" if nvcc else ""
    raise ToolchainError(f"NVRTC (libnvrtc.so) was not found; {NVRTC_HINT}{instead}")


def _homes(cuda_home: Path | None, path: str) -> list[Path]:
    """Return where toolkits may be: CUDA_HOME, around the nvcc on PATH, /usr/local/cuda."""
    nvcc = _on_path("nvcc", path)
    around = None if nvcc is None else Path(nvcc).resolve().parents[1]
    return [home for home in (cuda_home, around, SYSTEM_CUDA) if home is not None]


def _nvrtc_version(path: Path) -> str:
    """Tell the version from the name of libnvrtc-builtins beside it: to load it takes 0.1 s."""
    major = re.search(r"\.so\.(\d+)", path.resolve().name)
    versions = set()
    for builtins in path.resolve().parent.glob("libnvrtc-builtins.so.*"):
        match = re.fullmatch(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)(?:\.\d+)*", builtins.name)
        if match is not None and (major is None or major[1] == match[1]):
            versions.add(f"{match[1]}.{match[2]}")
    if len(versions) == 1:
        return versions.pop()
    # None, or two releases in one directory: ask the library itself.
    import ctypes

    release = (ctypes.c_int(), ctypes.c_int())
    try:
        ctypes.CDLL(str(path)).nvrtcVersion(*map(ctypes.byref, release))
    except (OSError, AttributeError) as error:
        raise ToolchainError(f"{path} is no usable libnvrtc ({error}); {NVRTC_HINT}") from error
    return ".".join(str(number.value) for number in release)


def site_directories() -> tuple[str, ...]:
    """Return the directories that may hold pip packages: all of sys.path."""
    return tuple(directory for directory in sys.path if directory)


# -- nvcc ------------------------------------------------------------------------------------------


class CudaHome(NamedTuple):
    """A CUDA toolkit at `path`.

    `nvcc` is the one to start: that on PATH, even a wrapper script, before the toolkit's own.
    `cudart` in `lib_dir` is the runtime: libcudart.so or, in pip packages, libcudart.so.13.
    """

    path: Path
    nvcc: Path
    include_dirs: tuple[Path, ...]
    lib_dir: Path
    cudart: str

    @property
    def ldflags(self) -> tuple[str, ...]:
        """Linker flags for the CUDA runtime; no rpath."""
        plain = self.cudart == "libcudart.so"
        return (f"-L{self.lib_dir}", "-lcudart" if plain else f"-l:{self.cudart}")


def find_cuda_home() -> CudaHome:
    """Find a toolkit with nvcc: CUDA_HOME or CUDA_PATH, PATH, pip packages, /usr/local/cuda."""
    now = settings()
    return _find_cuda_home(now.cuda_home, now.path, site_directories())


def find_nvcc() -> Tool:
    """Find nvcc and ask for its version."""
    nvcc = str(find_cuda_home().nvcc)
    return Tool((nvcc,), "nvcc", _version((nvcc,), r"release [\d.]+, V([\d.]+)", _CUDA_HINT))


@lru_cache(maxsize=8)
def _find_cuda_home(given: Path | None, path: str, site: tuple[str, ...]) -> CudaHome:
    candidates = _cuda_homes(path, site) if given is None else [_toolkit(given)]
    for home in candidates:
        if home is not None:
            return home
    if given is not None:
        raise ToolchainError(
            f"CUDA_HOME: {given} holds no CUDA toolkit (bin/nvcc, include/cuda_runtime.h, "
            f"libcudart); {_CUDA_HINT}"
        )
    raise ToolchainError(f"nvcc with a CUDA toolkit was not found; {_CUDA_HINT}")


def _cuda_homes(path: str, site: tuple[str, ...]) -> Iterator[CudaHome | None]:
    found = _on_path("nvcc", path)
    if found is not None:
        nvcc = Path(found)
        yield _toolkit(nvcc.resolve().parents[1], nvcc)
        # A wrapper script lies anywhere; in a dry run nvcc says where its toolkit is.
        said = _probe((found, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"))
        top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
        if top is not None:
            yield _toolkit(Path(top[1].strip()).resolve(), nvcc)
    for directory in site:
        for package in ("cu13", "cuda_nvcc"):
            yield _toolkit(Path(directory, "nvidia", package))
    yield _toolkit(SYSTEM_CUDA)


def _toolkit(root: Path, nvcc: Path | None = None) -> CudaHome | None:
    """Return the toolkit at root if it is complete."""
    nvcc = nvcc or root / "bin/nvcc"
    if not os.path.isfile(nvcc):
        return None
    roots = [root, root.parent / "cuda_runtime"] if root.name == "cuda_nvcc" else [root]
    includes = [r / below for r in roots for below in _INCLUDE_DIRS]
    includes = [directory for directory in includes if os.path.isdir(directory)]
    if not any(os.path.isfile(directory / "cuda_runtime.h") for directory in includes):
        return None
    for lib_dir in (r / lib for r in roots for lib in _LIB_DIRS):
        # The plain name first, else the newest of libcudart.so.12, libcudart.so.13.
        numbered = (p for p in lib_dir.glob("libcudart.so.*") if p.suffix[1:].isdigit())
        majors = sorted((p for p in numbered if p.name.count(".") == 2), reverse=True)
        for cudart in (lib_dir / "libcudart.so", *majors):
            if os.path.exists(cudart):
                return CudaHome(root, nvcc, tuple(includes), lib_dir, cudart.name)
    return None


# -- CUDA's own headers ----------------------------------------------------------------------------
#
# cuda_fp16.h, cooperative_groups.h, cuda/std/..., CUB: 2400 files, some with computed includes. To
# read them takes as long as a compile, so they are no part of the include closure. The compiler
# reads them where they are, and a variant names them: NVRTC's version stands for those that it
# brings, a digest over names, sizes and times for those in a directory.

FIRST_BUNDLED = (13, 3)
"""The NVRTC that brings headers, and knows ``--use-bundled-headers``."""

# What NVRTC 13.3 to 13.5 bring.
_BUNDLED = re.compile(
    r"(?:cuda|cub|thrust|nv|cooperative_groups|crt)/.+"
    r"|(?:cooperative_groups|cuComplex|math_constants|mma|vector_types|cudart_platform"
    r"|cuda_(?:fp16|bf16|fp8|fp6|fp4|tf32|pipeline|awbarrier)\w*)\.h(?:pp)?"
)
# A directory that has one of these holds CUDA's own headers.
_MARKS = ("cuda_runtime.h", "cuda/std/version", "cub/version.cuh", "thrust/version.h")

# The C++ standard library's headers, C's, and what nvrtc.STANDINS has.
_STD = re.compile(r"[a-z_]+|c?(?:assert|float|limits|math|stdio|stdlib|string|time)\.h")
_STANDINS = ("stdint.h", "stddef.h", "cuda_runtime.h", "device_launch_parameters.h")


class CudaHeaders(NamedTuple):
    """CUDA's own headers for one compile.

    `directories` are searched in order; the caller has named the first `num_given` of them. If
    `bundled`, NVRTC's own are searched after these. `complete` if all that was asked for is there.
    """

    directories: tuple[Path, ...] = ()
    bundled: bool = False
    complete: bool = True
    num_given: int = 0

    @property
    def id(self) -> str:
        """Name for a variant, such as ``cuda-1a2b3c4d5e6f``; empty without directories.

        Ends with :func:`given_id` if the caller has named some. Looks at every file each time
        (2459 of CUDA 13.5: 20 ms). Times are whole seconds, as image layers keep.
        """
        if not self.directories:
            return ""
        files = [_files_below(directory) for directory in self.directories]
        given = _given_id(files[: self.num_given]) if self.num_given else ""
        return f"cuda-{digest(files)[:12]}{given}"


def is_cuda_headers(directory: Path) -> bool:
    """Tell whether a directory holds headers of CUDA's own: a toolkit's, a package's, CCCL's."""
    return any(os.path.isfile(directory / mark) for mark in _MARKS)


def find_headers(
    missing: Iterable[str], given: Sequence[Path] = (), library: Nvrtc | None = None
) -> CudaHeaders:
    """Find the headers that the include closure did not.

    `missing` are names from include directives, `given` directories with CUDA's own headers, and
    `library` the NVRTC they are for: None stands for nvcc, which finds the rest by itself. After
    `given` come those that NVRTC brings, then the place that has most of the others: pip
    packages, CUDA_HOME or CUDA_PATH, the toolkit of the nvcc on PATH, /usr/local/cuda, conda.
    """
    wanted = _wanted(missing)
    if not wanted:
        return CudaHeaders()
    given = _present(given)
    if library is None:
        return CudaHeaders(given, num_given=len(given))
    rest = [name for name in wanted if not _has(given, name)]
    cuda = [name for name in rest if _BUNDLED.fullmatch(name)]
    has_bundle = _release(library.version) >= FIRST_BUNDLED
    place = _best_place([name for name in rest if not (has_bundle and name in cuda)], library)
    given = given if len(rest) < len(wanted) else ()
    directories = tuple(dict.fromkeys((*given, *place)))
    return CudaHeaders(
        directories,
        bundled=has_bundle and bool(cuda or directories),
        complete=has_bundle or all(_has(place, name) for name in cuda),
        num_given=len(given),
    )


def given_id(missing: Iterable[str], given: Sequence[Path]) -> str:
    """Name the state of the directories that the caller has named; empty if none is needed."""
    given = _present(given)
    is_needed = any(_has(given, name) for name in _wanted(missing))
    return _given_id([_files_below(directory) for directory in given]) if is_needed else ""


def header_hint(name: str, library: Nvrtc) -> str:
    """Say what to do about a header that NVRTC did not find; empty if nothing is known."""
    if _BUNDLED.fullmatch(name) and _release(library.version) < FIRST_BUNDLED:
        install = '"nvidia-cuda-nvrtc>=13.3"'
        if library.version.startswith("12."):
            install = "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12"
        return (
            f"{name} is CUDA's own, which NVRTC brings from 13.3 on and this one does not; "
            f"pip install {install}, or set CUDA_HOME to a CUDA toolkit"
        )
    if name.startswith(("cuda", "curand", "crt/", "device_")):
        return (
            f"{name} was found neither in pip packages nor in a CUDA toolkit; "
            "set CUDA_HOME to one, or name its directory in extra_include_paths"
        )
    if _STD.fullmatch(name):
        return "NVRTC has no C++ standard library; what CUDA has of it is in <cuda/std/...>"
    return ""


def _wanted(missing: Iterable[str]) -> list[str]:
    return [name for name in missing if name not in _STANDINS and not _STD.fullmatch(name)]


def _present(given: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path for path in given if os.path.isdir(path)))


def _given_id(files: list[list[tuple[str, int, int]]]) -> str:
    return f"+given-{digest(files)[:12]}"


def _best_place(names: list[str], library: Nvrtc) -> tuple[Path, ...]:
    """Return the directories of the place that has most of `names`; none if none has any."""
    best: tuple[Path, ...] = ()
    most = 0
    for place in _places(library) if names else ():
        count = sum(_has(place, name) for name in names)
        if count > most:
            best, most = place, count
    return best


def _places(library: Nvrtc) -> Iterator[tuple[Path, ...]]:
    """Yield the include directories of each place; pip's of NVRTC's own major version first."""
    now = settings()
    packages = [("cu13",), _PACKAGES_12]
    for names in packages if library.version.startswith("13.") else reversed(packages):
        for site in site_directories():
            yield _include_dirs([Path(site, "nvidia", name) for name in names])
    for home in (*_homes(now.cuda_home, now.path), Path(sys.prefix)):  # the last is conda's
        yield _include_dirs([home])


def _include_dirs(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Return the directories of headers, CCCL's included; none without CUDA's own."""
    folders = [root / include for root in roots for include in _INCLUDE_DIRS]
    spelled = [folder / cccl for folder in folders for cccl in ("", "cccl")]
    # One may be a link to another.
    found = dict.fromkeys(Path(os.path.realpath(path)) for path in spelled if os.path.isdir(path))
    return tuple(found) if any(map(is_cuda_headers, found)) else ()


def _has(directories: Iterable[Path], name: str) -> bool:
    return any(os.path.isfile(directory / name) for directory in directories)


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _files_below(top: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of all files below a directory; links are followed."""
    found, seen = [], set()
    for folder, folders, names in os.walk(top, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link to a directory above
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        for name in names:
            file = os.path.join(folder, name)
            if os.path.isfile(file):  # not a dangling link
                status = os.stat(file)
                found.append((file[len(str(top)) :], status.st_size, int(status.st_mtime)))
    return sorted(found)
