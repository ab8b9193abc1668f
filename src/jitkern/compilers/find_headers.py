"""Where CUDA's own headers are: ``cuda_fp16.h``, ``cooperative_groups.h``, ``cuda/std/...``, CUB.

They are no part of the include closure: there are 2400 of them, some with computed includes, and to
read them takes as long as a compile. The compiler reads them where they are, and its variant says
which they were: NVRTC's version stands for those that it brings itself, and for those in a
directory a digest over the name, size and time of each.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitkern.compilers.find_nvrtc import SYSTEM_CUDA, Nvrtc, site_directories
from jitkern.compilers.for_nvrtc import STANDINS
from jitkern.env import settings
from jitkern.fs import digest

FIRST_BUNDLED = (13, 3)
"""The NVRTC that brings headers, and knows ``--use-bundled-headers``."""

# What NVRTC 13.3 to 13.5 bring.
_BUNDLED = re.compile(
    r"(?:cuda|cub|thrust|nv|cooperative_groups|crt)/.+"
    r"|(?:cooperative_groups|cuComplex|math_constants|mma|vector_types|cudart_platform"
    r"|cuda_(?:fp16|bf16|fp8|fp6|fp4|tf32|pipeline|awbarrier)\w*)\.h(?:pp)?"
)
# By one of these a directory is known to hold CUDA's own headers.
_MARKS = ("cuda_runtime.h", "cuda/std/version", "cub/version.cuh", "thrust/version.h")
# Where they are below a toolkit, and the packages that CUDA 12 spreads over sibling directories.
_CCCL = ("", "cccl")
_INCLUDES = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
_PACKAGES_12 = ("cuda_runtime", "cuda_cccl", "cuda_nvcc", "curand")

# Of C++, without a suffix, and of C.
_STD = re.compile(r"[a-z_]+|c?(?:assert|float|limits|math|stdio|stdlib|string|time)\.h")


@dataclass(frozen=True)
class CudaHeaders:
    """CUDA's own headers for one compile.

    Attributes
    ----------
    directories : tuple of Path
        Searched in order.
    bundled : bool
        NVRTC's own are searched as well, behind those that the caller gave.
    complete : bool
        Whether all that was asked for is there.
    num_given : int
        How many of the directories, the first ones, the caller has named.
    """

    directories: tuple[Path, ...] = ()
    bundled: bool = False
    complete: bool = True
    num_given: int = 0

    @property
    def id(self) -> str:
        """Name for a variant, such as ``cuda-12.8-1a2b3c4d5e6f``; empty without directories.

        Ends with :func:`given_id` where the caller has named some of them.

        Looks at every file (2459 of CUDA 13.5: 20 ms), each time: whatever is changed, added or
        removed gives another one. Times are whole seconds, as layers of a container image keep.
        """
        if not self.directories:
            return ""
        version = _version(self.directories) or "unknown"
        files = _files(self.directories)
        given = _given_id(files[: self.num_given]) if self.num_given else ""
        return f"cuda-{version}-{digest(files)[:12]}{given}"


NO_HEADERS = CudaHeaders()


def is_cuda_headers(directory: Path) -> bool:
    """Tell whether a directory holds headers of CUDA's own: a toolkit's, a package's, CCCL's."""
    return any(os.path.isfile(directory / mark) for mark in _MARKS)


def find_headers(
    missing: Iterable[str], given: Sequence[Path] = (), library: Nvrtc | None = None
) -> CudaHeaders:
    """Find the headers that the include closure did not.

    Parameters
    ----------
    missing
        What directives name. Nothing is searched where there is none but the standard library's.
    given
        Directories with CUDA's own headers that come first.
    library
        The NVRTC they are for. None stands for nvcc, which finds the rest by itself.

    Notes
    -----
    After `given` come those that NVRTC itself brings, then the first place that has the most of the
    others: pip packages, CUDA_HOME or CUDA_PATH, the toolkit of the nvcc on PATH, /usr/local/cuda,
    conda; a CUDA of NVRTC's major version before others.
    """
    wanted = _wanted(missing)
    if not wanted:
        return NO_HEADERS
    given = _present(given)
    if library is None:
        return CudaHeaders(given, num_given=len(given))
    rest = [name for name in wanted if not _has(given, name)]
    cuda = [name for name in rest if _BUNDLED.fullmatch(name)]
    has_bundle = _release(library.version) >= FIRST_BUNDLED
    place = _place([name for name in rest if not (has_bundle and name in cuda)], library)
    given = given if len(rest) < len(wanted) else ()
    directories = tuple(dict.fromkeys((*given, *place)))
    return CudaHeaders(
        directories,
        bundled=has_bundle and bool(cuda or directories),
        complete=has_bundle or all(_has(place, name) for name in cuda),
        num_given=len(given),
    )


def given_id(missing: Iterable[str], given: Sequence[Path]) -> str:
    """Name the state of the `given` directories, as variants end that were built with them.

    Empty where they have none of the `missing` headers. It depends on no compiler: their files may
    be the user's own, and no version of NVRTC or of a toolkit stands for these.
    """
    given = _present(given)
    if not any(_has(given, name) for name in _wanted(missing)):
        return ""
    return _given_id(_files(given))


def header_hint(name: str, library: Nvrtc) -> str:
    """Say what to do about a header that NVRTC did not find; empty where nothing is known."""
    if _BUNDLED.fullmatch(name) and _release(library.version) < FIRST_BUNDLED:
        packages = "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12"
        install = packages if _major(library.version) == "12" else '"nvidia-cuda-nvrtc>=13.3"'
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
    return [name for name in missing if name not in STANDINS and not _STD.fullmatch(name)]


def _present(given: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(path for path in given if os.path.isdir(path)))


def _given_id(files: Sequence[Sequence[tuple[str, int, int]]]) -> str:
    return f"+given-{digest(files)[:12]}"


def _place(names: Sequence[str], library: Nvrtc) -> tuple[Path, ...]:
    """The directories that have the most of `names`; none where there are none of them."""
    if not names:
        return ()
    places = sorted(_places(), key=lambda place: _major(_version(place)) != _major(library.version))
    best = max(places, key=lambda place: sum(_has(place, name) for name in names), default=())
    return best if any(_has(best, name) for name in names) else ()


def _places() -> Iterator[tuple[Path, ...]]:
    now = settings()
    for directory in site_directories():
        yield _include_dirs(Path(directory, "nvidia/cu13"))
        yield _include_dirs(*(Path(directory, "nvidia", package) for package in _PACKAGES_12))
    on_path = shutil.which("nvcc", path=now.path)
    homes = [now.cuda_home, on_path and Path(on_path).resolve().parents[1], SYSTEM_CUDA]
    for home in (*homes, Path(sys.prefix)):  # the last is conda's
        if home:
            yield _include_dirs(home)


def _include_dirs(*roots: Path) -> tuple[Path, ...]:
    """Directories below the roots that hold headers, CCCL's included; none without CUDA's own."""
    spelled = [root / include / below for root in roots for include in _INCLUDES for below in _CCCL]
    # One may be a link to another.
    found = dict.fromkeys(Path(os.path.realpath(path)) for path in spelled if os.path.isdir(path))
    return tuple(found) if any(map(is_cuda_headers, found)) else ()


def _has(directories: Iterable[Path], name: str) -> bool:
    return any(os.path.isfile(directory / name) for directory in directories)


def _version(directories: Iterable[Path]) -> str:
    """``12.8``; empty where none of the directories has the runtime's header."""
    for directory in directories:
        header = directory / "cuda_runtime_api.h"
        if os.path.isfile(header):
            with header.open("rb") as file:  # it stands on line 139
                match = re.search(rb"#\s*define\s+CUDART_VERSION\s+(\d+)", file.read(1 << 16))
            if match is not None:
                return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    return ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _major(version: str) -> str:
    return version.partition(".")[0]


def _files(directories: Iterable[Path]) -> list[list[tuple[str, int, int]]]:
    """Name, size and time of all files below each directory; links followed, none entered twice."""
    seen: set[tuple[int, int]] = set()
    return [_files_below(str(directory), seen) for directory in directories]


def _files_below(top: str, seen: set[tuple[int, int]]) -> list[tuple[str, int, int]]:
    found, folders = [], [top]
    for folder in folders:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as items:
            for item in items:
                if item.is_dir():
                    folders.append(item.path)
                elif item.is_file():  # not a dangling link
                    status = item.stat()
                    found.append((item.path[len(top) :], status.st_size, int(status.st_mtime)))
    return sorted(found)
