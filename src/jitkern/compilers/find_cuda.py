"""Where the CUDA toolkit is: its nvcc, headers and runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jitkern.compilers.find import Tool, on_path, probe, tool_version
from jitkern.compilers.find_nvrtc import LIB_DIRS, SYSTEM_CUDA, site_directories
from jitkern.env import settings
from jitkern.errors import ToolchainError

_HINT = "install the CUDA toolkit, or set CUDA_HOME to where it is"


@dataclass(frozen=True)
class CudaHome:
    """A CUDA toolkit at `path`.

    `nvcc` is the one to start: that on PATH, even if a wrapper script, before the toolkit's own.
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
    home = find_cuda_home()
    version = tool_version((str(home.nvcc),), r"release [\d.]+, V([\d.]+)", _HINT)
    return Tool((str(home.nvcc),), "nvcc", version)


@lru_cache(maxsize=8)
def _find_cuda_home(given: Path | None, path: str, site: tuple[str, ...]) -> CudaHome:
    if given is not None:
        home = _toolkit(given, given / "bin/nvcc")
        if home is None:
            raise ToolchainError(
                f"CUDA_HOME: {given} holds no CUDA toolkit (bin/nvcc, include/cuda_runtime.h, "
                f"libcudart); {_HINT}"
            )
        return home
    for home in _cuda_homes(path, site):
        if home is not None:
            return home
    raise ToolchainError(f"nvcc with a CUDA toolkit was not found; {_HINT}")


def _cuda_homes(path: str, site: tuple[str, ...]) -> Iterator[CudaHome | None]:
    found = on_path("nvcc", path)
    if found is not None:
        nvcc = Path(found)
        yield _toolkit(nvcc.resolve().parents[1], nvcc)
        # A wrapper script lies anywhere; nvcc itself knows where its toolkit is.
        top = _nvcc_top(nvcc)
        if top is not None:
            yield _toolkit(top, nvcc)
    for directory in site:
        for package in ("nvidia/cu13", "nvidia/cuda_nvcc"):
            yield _toolkit(Path(directory, package), Path(directory, package, "bin/nvcc"))
    yield _toolkit(SYSTEM_CUDA, SYSTEM_CUDA / "bin/nvcc")


def _toolkit(root: Path, nvcc: Path) -> CudaHome | None:
    """The toolkit at root if it is complete."""
    if not os.path.isfile(nvcc):
        return None
    # The pip packages of CUDA 12 spread a toolkit over sibling directories, one a package.
    runtime = root.parent / "cuda_runtime"
    roots = [root, runtime] if root.name == "cuda_nvcc" else [root]
    includes = [r / sub for r in roots for sub in ("include", "targets/x86_64-linux/include")]
    includes = [directory for directory in includes if os.path.isdir(directory)]
    if not any(os.path.isfile(directory / "cuda_runtime.h") for directory in includes):
        return None
    for r in roots:
        for lib in LIB_DIRS:
            # The plain name first, else the newest of libcudart.so.12, libcudart.so.13.
            for cudart in (r / lib / "libcudart.so", *_numbered_cudart(r / lib)):
                if os.path.exists(cudart):
                    return CudaHome(root, nvcc, tuple(includes), cudart.parent, cudart.name)
    return None


def _numbered_cudart(lib_dir: Path) -> list[Path]:
    found = (p for p in lib_dir.glob("libcudart.so.*") if re.fullmatch(r"\.\d+", p.suffix))
    return sorted((p for p in found if p.name.count(".") == 2), reverse=True)


def _nvcc_top(nvcc: Path) -> Path | None:
    """TOP of ``nvcc --dryrun``: the root of the toolkit that a wrapper script ends up in."""
    # The input is not opened in a dry run, only its extension counts.
    lines = probe((str(nvcc), "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"))
    match = re.search(r"^#\$ TOP=(.+)$", lines or "", re.MULTILINE)
    return Path(match[1].strip()).resolve() if match is not None else None
