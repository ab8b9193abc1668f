"""Which compilers a C++ or CUDA build would use: their versions, their files, their headers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jitkern.compilers.depends import HeaderDirectories
from jitkern.compilers.find import cxx_command, find_cxx, is_program, probe
from jitkern.compilers.find_cuda import find_cuda_home, find_nvcc
from jitkern.errors import ToolchainError
from jitkern.fs import slug

_COMPILER_WORDS = ("gcc", "g++", "c++", "clang", "nvcc")

# Directories of a compiler's own headers: /usr/include/c++/12, /usr/lib/gcc/x86_64-linux-gnu/12.
_OWN = re.compile(r"/include/([\w-]+/)?c\+\+/v?\d[\w.]*(/|$)|/lib\d*/(gcc|clang)/")

_SHARED_PREFIXES = (Path("/"), Path("/usr"), Path("/usr/local"))


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


def toolchain_directories(*, cuda: bool = False) -> HeaderDirectories:
    """Return where headers are that are no project's; a process is started, for a build only.

    The compiler is asked where it looks: one that is a script lies anywhere.
    """
    from tvm_ffi import libinfo

    searched = _searched(tuple(find_cxx().command))
    own = [path for path in searched if _OWN.search(str(path))]
    own += [Path(libinfo.find_include_path()), Path(libinfo.find_dlpack_include_path())]
    if cuda:
        own += _cuda_directories()
    return HeaderDirectories(own, [path for path in searched if path not in own])


def _searched(command: tuple[str, ...]) -> list[Path]:
    """Directories in which a C++ compiler looks for headers without being told to."""
    said = probe((*command, "-E", "-v", "-x", "c++", "/dev/null")) or ""
    # They are on lines of their own, after a heading in the user's language.
    lines = [Path(line[1:]).resolve() for line in said.splitlines() if line.startswith(" /")]
    return [path for path in dict.fromkeys(lines) if os.path.isdir(path)]


def _cuda_directories() -> list[Path]:
    home = find_cuda_home()
    if home.path not in _SHARED_PREFIXES and not os.path.exists(home.path / "conda-meta"):
        return [home.path, *home.include_dirs]
    # Other packages' headers lie in its "include", but none in "targets/x86_64-linux/include".
    return [path for path in home.include_dirs if path.parent != home.path]
