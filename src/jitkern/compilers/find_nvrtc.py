"""Where libnvrtc is, and its version; finding it starts no process and loads no library."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jitkern.env import settings
from jitkern.errors import ToolchainError

NVRTC_HINT = 'pip install "jitkern[cuda]"'
LIB_DIRS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
"""Where a CUDA toolkit has its libraries."""

SYSTEM_CUDA = Path("/usr/local/cuda")
_LD_CACHE = Path("/etc/ld.so.cache")


class Nvrtc(NamedTuple):
    """A libnvrtc that is not loaded yet: its path, and its version such as ``13.5``."""

    path: Path
    version: str

    @property
    def id(self) -> str:
        """Name for a cache key, such as ``nvrtc-13.5``."""
        return f"nvrtc-{self.version}"


def find_nvrtc() -> Nvrtc:
    """Find libnvrtc: ``JITKERN_NVRTC``, pip packages, the CUDA home, the system's libraries."""
    now = settings()
    return _find_nvrtc(now.nvrtc, now.cuda_home, now.path, now.library_path, site_directories())


@lru_cache(maxsize=8)
def _find_nvrtc(
    given: Path | None,
    cuda_home: Path | None,
    path: str,
    library_path: tuple[Path, ...],
    site: tuple[str, ...],
) -> Nvrtc:
    if given is not None:
        if not os.path.isfile(given):
            raise ToolchainError(f"JITKERN_NVRTC: {given} is not a file; unset it, or {NVRTC_HINT}")
        return Nvrtc(given, _nvrtc_version(given))
    homes = [cuda_home] if cuda_home is not None else []
    on_path = shutil.which("nvcc", path=path)
    if on_path is not None:
        homes.append(Path(on_path).resolve().parents[1])
    for library in _nvrtc_candidates(homes, library_path, site):
        if os.path.isfile(library):
            return Nvrtc(library, _nvrtc_version(library))
    nvccs = [on_path, *(str(home / "bin/nvcc") for home in (*homes, SYSTEM_CUDA))]
    nvcc = next((nvcc for nvcc in nvccs if nvcc and os.path.isfile(nvcc)), "")
    instead = f", or set JITKERN_COMPILER=nvcc, for there is {nvcc}" if nvcc else ""
    raise ToolchainError(f"NVRTC (libnvrtc.so) was not found; {NVRTC_HINT}{instead}")


def _nvrtc_candidates(
    homes: list[Path], library_path: tuple[Path, ...], site: tuple[str, ...]
) -> Iterator[Path]:
    for directory in site:
        yield Path(directory, "nvidia/cu13/lib/libnvrtc.so.13")
        yield Path(directory, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    libs = [home / lib for home in (*homes, SYSTEM_CUDA) for lib in LIB_DIRS]
    for directory_path in (*libs, *library_path, Path(sys.prefix, "lib")):  # the last is conda's
        yield directory_path / "libnvrtc.so.13"
        yield directory_path / "libnvrtc.so.12"
    yield from _ld_cache_nvrtc()


def _nvrtc_version(path: Path) -> str:
    """From the name of libnvrtc-builtins beside it: loading the library would take 0.1 s."""
    major = re.search(r"\.so\.(\d+)", path.resolve().name)
    versions = set()
    for builtins in path.resolve().parent.glob("libnvrtc-builtins.so.*"):
        match = re.fullmatch(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)(?:\.\d+)*", builtins.name)
        if match is not None and (major is None or major[1] == match[1]):
            versions.add(f"{match[1]}.{match[2]}")
    # None, or two CUDA versions in one directory: ask the library itself.
    return versions.pop() if len(versions) == 1 else _loaded_nvrtc_version(path)


def _loaded_nvrtc_version(path: Path) -> str:
    import ctypes

    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        library = ctypes.CDLL(str(path))
        failed = library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except (OSError, AttributeError) as error:
        raise ToolchainError(f"{path} is no usable libnvrtc ({error}); {NVRTC_HINT}") from error
    if failed:
        raise ToolchainError(f"{path}: nvrtcVersion failed ({failed}); {NVRTC_HINT}")
    return f"{major.value}.{minor.value}"


def _ld_cache_nvrtc() -> list[Path]:
    """Where the dynamic loader has libnvrtc: paths stand in its cache as plain C strings.

    Read instead of asked for: dlopen by name takes 0.1 s, ldconfig -p a process.
    """
    try:
        cache = _LD_CACHE.read_bytes()
    except OSError:  # not a glibc system
        return []
    found = re.findall(rb"/[^\0]*/libnvrtc\.so\.1[23](?=\0)", cache)
    return [Path(os.fsdecode(path)) for path in sorted(set(found), key=_soname, reverse=True)]


def _soname(path: bytes) -> bytes:
    return path.rsplit(b"/", 1)[1]


def site_directories() -> tuple[str, ...]:
    """Directories that may hold pip packages: all of sys.path, as an import would search them."""
    return tuple(directory for directory in sys.path if directory)
