"""Which compilers a C++ or CUDA build would use: their versions, their files, their headers."""

from __future__ import annotations

from pathlib import Path

from jitkern.compilers.find import cxx_command, find_cxx, is_program
from jitkern.compilers.find_cuda import find_cuda_home, find_nvcc
from jitkern.errors import ToolchainError
from jitkern.files import slug

_COMPILER_WORDS = ("gcc", "g++", "c++", "clang", "nvcc")


def toolchain_id(*, cuda: bool = False) -> str:
    """Return the id of the C++ compiler, and of nvcc with `cuda`; empty where one is missing.

    Starts a process for each that has not been asked for its version yet.
    """
    try:
        tools = [find_nvcc(), find_cxx()] if cuda else [find_cxx()]
    except ToolchainError:
        return ""
    return "+".join(slug(tool.id) for tool in tools)


def program_stats(*, cuda: bool = False) -> list[list[int]] | None:
    """Return time and size of the compilers' files, or None where they do not tell the version.

    Equal ones mean equal compilers without starting a process. A script may start anything, so only
    programs count, and only compilers: ccache is a program too.
    """
    try:
        programs = [Path(cxx_command()[0])]
        if cuda:
            programs.append(find_cuda_home().nvcc)
    except ToolchainError:
        return None
    found = []
    for program in programs:
        path = program.resolve()
        try:
            if not any(word in path.name for word in _COMPILER_WORDS) or not is_program(path):
                return None
            status = path.stat()
        except OSError:
            return None
        found.append([status.st_mtime_ns, status.st_size])
    return found


def toolchain_directories(*, cuda: bool = False) -> list[Path]:
    """Return the directories whose headers the toolchain's versions in a key stand for."""
    from tvm_ffi import libinfo

    directories = [
        Path("/usr/include"),
        Path("/usr/lib"),
        Path(libinfo.find_include_path()),
        Path(libinfo.find_dlpack_include_path()),
    ]
    prefix = find_cxx().path.resolve().parent.parent
    if prefix not in (Path("/"), Path("/usr"), Path("/usr/local")):
        directories.append(prefix)  # a compiler in a directory of its own, such as conda's
    if cuda:
        home = find_cuda_home()
        directories += [home.path, *home.include_dirs]
    return directories
