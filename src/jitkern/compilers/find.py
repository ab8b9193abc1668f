"""Where the compilers are, and their versions: NVRTC, nvcc and its CUDA home, c++, ninja.

Every `find_*` looks, caches its answer for the settings it depended on, and raises ToolchainError
whose message ends with the cure. Finding NVRTC starts no process and loads no library.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jitkern.env import settings
from jitkern.errors import ToolchainError

__all__ = [
    "CudaHome",
    "Nvrtc",
    "Tool",
    "find_cuda_home",
    "find_cxx",
    "find_ninja",
    "find_nvcc",
    "find_nvrtc",
]

_NVRTC_CURE = 'pip install "jitkern[cuda]"'
_CUDA_CURE = "install the CUDA toolkit, or set CUDA_HOME to where it is"
_LIB_DIRS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
_LD_CACHE = Path("/etc/ld.so.cache")
_SYSTEM_CUDA = Path("/usr/local/cuda")
_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Nvrtc:
    """A libnvrtc that is not loaded yet: its path, and its version such as ``13.5``."""

    path: Path
    version: str

    @property
    def id(self) -> str:
        """Name for a cache key, such as ``nvrtc-13.5``."""
        return f"nvrtc-{self.version}"


@dataclass(frozen=True)
class Tool:
    """A program: the command that starts it, what it is, its version."""

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


@dataclass(frozen=True)
class CudaHome:
    """A CUDA toolkit.

    Attributes
    ----------
    path : Path
        Its root.
    nvcc : Path
        The nvcc to start: the one on PATH, even if a wrapper script, before the one in `path`.
    include_dirs : tuple of Path
        Where cuda_runtime.h and its companions are.
    lib_dir : Path
        Where libcudart is.
    cudart : str
        Its file name, ``libcudart.so`` or, in pip packages, ``libcudart.so.13``.
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


# ------------------------------------------------------------------------------------------ NVRTC


def find_nvrtc() -> Nvrtc:
    """Find libnvrtc: ``JITKERN_NVRTC``, pip packages, the CUDA home, the system's libraries.

    Raises
    ------
    ToolchainError
        There is none; names the extra that brings it.
    """
    now = settings()
    return _find_nvrtc(now.nvrtc, now.cuda_home, now.path, now.library_path, _site_key())


@lru_cache(maxsize=8)
def _find_nvrtc(
    given: Path | None,
    cuda_home: Path | None,
    path: str,
    library_path: tuple[Path, ...],
    site: tuple[str, ...],
) -> Nvrtc:
    if given is not None:
        if not given.is_file():
            raise ToolchainError(
                f"JITKERN_NVRTC: {given} is not a file; unset it, or {_NVRTC_CURE}"
            )
        return Nvrtc(given, _nvrtc_version(given))
    homes = [cuda_home] if cuda_home is not None else []
    on_path = shutil.which("nvcc", path=path)
    if on_path is not None:
        homes.append(Path(on_path).resolve().parents[1])
    for library in _nvrtc_candidates(homes, library_path, site):
        if os.path.isfile(library):
            return Nvrtc(library, _nvrtc_version(library))
    raise ToolchainError(f"NVRTC (libnvrtc.so) was not found; {_NVRTC_CURE}")


def _nvrtc_candidates(
    homes: list[Path], library_path: tuple[Path, ...], site: tuple[str, ...]
) -> Iterator[Path]:
    for directory in site:
        yield Path(directory, "nvidia/cu13/lib/libnvrtc.so.13")
        yield Path(directory, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    for home in (*homes, _SYSTEM_CUDA):
        for lib in _LIB_DIRS:
            yield home / lib / "libnvrtc.so.13"
            yield home / lib / "libnvrtc.so.12"
    for directory_path in (*library_path, Path(sys.prefix, "lib")):  # the latter is conda's
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
        raise ToolchainError(f"{path} is no usable libnvrtc ({error}); {_NVRTC_CURE}") from error
    if failed:
        raise ToolchainError(f"{path}: nvrtcVersion failed ({failed}); {_NVRTC_CURE}")
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


# ------------------------------------------------------------------------------------------- CUDA


def find_cuda_home() -> CudaHome:
    """Find a CUDA toolkit with nvcc: CUDA_HOME or CUDA_PATH, PATH, pip packages, /usr/local/cuda.

    Raises
    ------
    ToolchainError
        There is none, or CUDA_HOME names a directory that holds none.
    """
    now = settings()
    return _find_cuda_home(now.cuda_home, now.path, _site_key())


def find_nvcc() -> Tool:
    """Find nvcc and ask for its version.

    Raises
    ------
    ToolchainError
        There is none, or it does not start.
    """
    home = find_cuda_home()
    version = _version((str(home.nvcc),), r"release [\d.]+, V([\d.]+)", _CUDA_CURE)
    return Tool((str(home.nvcc),), "nvcc", version)


@lru_cache(maxsize=8)
def _find_cuda_home(given: Path | None, path: str, site: tuple[str, ...]) -> CudaHome:
    if given is not None:
        home = _toolkit(given, given / "bin/nvcc")
        if home is None:
            raise ToolchainError(
                f"CUDA_HOME: {given} holds no CUDA toolkit (bin/nvcc, include/cuda_runtime.h, "
                f"libcudart); {_CUDA_CURE}"
            )
        return home
    for home in _cuda_homes(path, site):
        if home is not None:
            return home
    raise ToolchainError(f"nvcc with a CUDA toolkit was not found; {_CUDA_CURE}")


def _cuda_homes(path: str, site: tuple[str, ...]) -> Iterator[CudaHome | None]:
    on_path = shutil.which("nvcc", path=path)
    if on_path is not None:
        nvcc = Path(on_path)
        yield _toolkit(nvcc.resolve().parents[1], nvcc)
        # A wrapper script lies anywhere; nvcc itself knows where its toolkit is.
        top = _nvcc_top(nvcc)
        if top is not None:
            yield _toolkit(top, nvcc)
    for directory in site:
        for package in ("nvidia/cu13", "nvidia/cuda_nvcc"):
            yield _toolkit(Path(directory, package), Path(directory, package, "bin/nvcc"))
    yield _toolkit(_SYSTEM_CUDA, _SYSTEM_CUDA / "bin/nvcc")


def _toolkit(root: Path, nvcc: Path) -> CudaHome | None:
    """The toolkit at root if it is complete."""
    if not os.path.isfile(nvcc):
        return None
    # The pip packages of CUDA 12 spread a toolkit over sibling directories, one a package.
    runtime = root.parent / "cuda_runtime"
    roots = [root, runtime] if root.name == "cuda_nvcc" else [root]
    includes = [r / sub for r in roots for sub in ("include", "targets/x86_64-linux/include")]
    includes = [directory for directory in includes if directory.is_dir()]
    if not any(os.path.isfile(directory / "cuda_runtime.h") for directory in includes):
        return None
    for r in roots:
        for lib in _LIB_DIRS:
            # The plain name first, else the newest of libcudart.so.12, libcudart.so.13.
            for cudart in (r / lib / "libcudart.so", *_numbered_cudart(r / lib)):
                if cudart.exists():
                    return CudaHome(root, nvcc, tuple(includes), cudart.parent, cudart.name)
    return None


def _numbered_cudart(lib_dir: Path) -> list[Path]:
    found = (p for p in lib_dir.glob("libcudart.so.*") if re.fullmatch(r"\.\d+", p.suffix))
    return sorted((p for p in found if p.name.count(".") == 2), reverse=True)


def _nvcc_top(nvcc: Path) -> Path | None:
    """TOP of ``nvcc --dryrun``: the root of the toolkit that a wrapper script ends up in."""
    # The input is not opened in a dry run, only its extension counts.
    lines = _probe((str(nvcc), "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"))
    match = re.search(r"^#\$ TOP=(.+)$", lines or "", re.MULTILINE)
    return Path(match[1].strip()).resolve() if match is not None else None


# --------------------------------------------------------------------------------- c++ and ninja


def find_cxx() -> Tool:
    """Find the C++ compiler: ``CXX`` (with arguments if any), else c++, g++, clang++ on PATH.

    Raises
    ------
    ToolchainError
        There is none, or it does not start.
    """
    now = settings()
    cure = "install g++ (apt install g++), or set CXX to a C++ compiler"
    if now.cxx is not None:
        command = shlex.split(now.cxx)
        found = shutil.which(command[0], path=now.path)
        if found is None:
            raise ToolchainError(f"CXX: {now.cxx!r} was not found; {cure}")
        command[0] = found
    else:
        names = ("c++", "g++", "clang++")
        paths = (shutil.which(name, path=now.path) for name in names)
        command = [next((path for path in paths if path is not None), "")]
        if not command[0]:
            raise ToolchainError(f"no C++ compiler was found; {cure}")
    banner = _version(tuple(command), r"\A([^\n]+)", cure)
    match = re.search(r"(\d+\.\d+\.\d+)(?!.*\d+\.\d+\.\d+)", banner)
    name = "clang" if "clang" in banner.lower() else "gcc"
    return Tool(tuple(command), name, match[1] if match is not None else banner.split()[-1])


def find_ninja() -> Tool:
    """Find ninja: beside the interpreter, in the pip package, on PATH.

    A real program is preferred to a script: older pip packages install a script that starts ninja
    as a child, which a signal to the script would leave behind.

    Raises
    ------
    ToolchainError
        There is none, or it does not start.
    """
    cure = "pip install ninja"
    found = _find_ninja(settings().path, sys.executable, _site_key())
    if found is None:
        raise ToolchainError(f"ninja was not found; {cure}")
    return Tool((found,), "ninja", _version((found,), r"\A(\d+(?:\.\d+)*)", cure))


@lru_cache(maxsize=8)
def _find_ninja(path: str, executable: str, site: tuple[str, ...]) -> str | None:
    candidates = [
        Path(executable).parent / "ninja",
        Path(sysconfig.get_path("scripts")) / "ninja",
        *(Path(directory, "ninja/data/bin/ninja") for directory in site),
    ]
    on_path = shutil.which("ninja", path=path)
    if on_path is not None:
        candidates.append(Path(on_path))
    present = [candidate for candidate in candidates if os.path.isfile(candidate)]
    programs = [candidate for candidate in present if _is_elf(candidate)]
    return str((programs or present)[0]) if present else None


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


# ---------------------------------------------------------------------------------------- probing


def _site_key() -> tuple[str, ...]:
    """Directories that may hold pip packages: all of sys.path, as an import would search them."""
    return tuple(directory for directory in sys.path if directory)


def _version(command: tuple[str, ...], pattern: str, cure: str) -> str:
    stat = Path(command[0]).stat()
    output = _cached_probe((*command, "--version"), (stat.st_mtime_ns, stat.st_size))
    match = re.search(pattern, output or "")
    if match is None:
        raise ToolchainError(f"{shlex.join(command)} --version does not work; {cure}")
    return match[1]


@lru_cache(maxsize=32)
def _cached_probe(command: tuple[str, ...], _stamp: tuple[int, int]) -> str | None:
    return _probe(command)


def _probe(command: tuple[str, ...]) -> str | None:
    """Output of a command that tells something about itself; None where it fails."""
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
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
