"""Which compilers the C++ and CUDA routes have here, in the terms of a cache entry."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from jitkern.arch import Arch, requested_archs
from jitkern.compilers.find import find_cuda_home, find_cxx, find_nvcc
from jitkern.env import settings
from jitkern.errors import ToolchainError
from jitkern.names import slug

_COMPILER_WORDS = ("gcc", "g++", "c++", "clang", "nvcc")


def toolchain_id(route: str) -> str:
    """Return the id of the compilers that `route` uses, empty where one is missing.

    Starts a process for each that has not been asked for its version yet.
    """
    try:
        tools = [find_cxx()]
        if route == "cuda":
            tools.insert(0, find_nvcc())
    except ToolchainError:
        return ""
    return "+".join(slug(tool.id) for tool in tools)


def stamps(route: str) -> list[list[int]] | None:
    """Return time and size of the compilers' files, or None where they do not tell the version.

    Equal stamps mean equal compilers without starting a process. A script may start anything, so
    only programs count, and only compilers: ccache is a program too.
    """
    given = settings().cxx
    choices = [[shlex.split(given)[0]] if given else ["c++", "g++", "clang++"]]
    if route == "cuda":
        choices.append(["nvcc"])
    found = []
    for names in choices:
        paths = (shutil.which(name, path=settings().path) for name in names)
        stamp = _stamp(next((path for path in paths if path), None))
        if stamp is None:
            return None
        found.append(stamp)
    return found


def _stamp(program: str | None) -> list[int] | None:
    if program is None:
        return None
    path = Path(program).resolve()
    if not any(word in path.name for word in _COMPILER_WORDS):
        return None
    try:
        with path.open("rb") as file:
            is_program = file.read(4) == b"\x7fELF"
        status = path.stat()
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size] if is_program else None


def covered_directories(route: str) -> list[Path]:
    """Return the directories whose headers the versions in a key stand for."""
    from tvm_ffi import libinfo

    covered = [
        Path("/usr/include"),
        Path("/usr/lib"),
        Path(libinfo.find_include_path()),
        Path(libinfo.find_dlpack_include_path()),
    ]
    prefix = find_cxx().path.resolve().parent.parent
    if prefix not in (Path("/"), Path("/usr"), Path("/usr/local")):
        covered.append(prefix)  # a compiler in a directory of its own, such as conda's
    if route == "cuda":
        home = find_cuda_home()
        covered += [home.path, *home.include_dirs]
    return covered


def target_arch() -> Arch:
    """Return what nvcc compiles for: JITKERN_ARCH, else the arch of the current device.

    Raises
    ------
    ToolchainError
        There is neither.
    """
    wanted = requested_archs()
    if wanted:
        return wanted[0]
    import torch

    if torch.cuda.is_available():
        return Arch(*torch.cuda.get_device_capability())
    raise ToolchainError(
        "there is no GPU to compile CUDA code for; set JITKERN_ARCH, such as JITKERN_ARCH=9.0"
    )
