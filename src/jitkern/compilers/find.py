"""Where programs are, and their versions: the C++ compiler and ninja.

Every `find_*` of this package looks, caches its answer for the settings it depended on, and raises
ToolchainError whose message ends with what to do about it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path

from jitkern.compilers.find_nvrtc import site_directories
from jitkern.env import settings
from jitkern.errors import ToolchainError

_CXX_HINT = "install g++ (apt install g++), or set CXX to a C++ compiler"
_PROBE_TIMEOUT_S = 30.0


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


def find_cxx() -> Tool:
    """Find the C++ compiler: ``CXX`` (with arguments if any), else c++, g++, clang++ on PATH."""
    command = tuple(cxx_command())
    banner = tool_version(command, r"\A([^\n]+)", _CXX_HINT)
    match = re.search(r"(\d+\.\d+\.\d+)(?!.*\d+\.\d+\.\d+)", banner)
    name = "clang" if "clang" in banner.lower() else "gcc"
    return Tool(command, name, match[1] if match is not None else banner.split()[-1])


def cxx_command() -> list[str]:
    """Find the C++ compiler as `find_cxx` does, but do not ask for its version."""
    now = settings()
    if now.cxx is not None:
        command = _cxx_words(now.cxx)
        found = on_path(command[0], now.path)
        if found is None:
            raise ToolchainError(f"CXX: {now.cxx!r} was not found; {_CXX_HINT}")
        return [found, *command[1:]]
    for name in ("c++", "g++", "clang++"):
        found = on_path(name, now.path)
        if found is not None:
            return [found]
    raise ToolchainError(f"no C++ compiler was found; {_CXX_HINT}")


def cxx_flags() -> tuple[str, ...]:
    """Return the flags that ``CXX`` brings, such as ``-m32``: what is built depends on them.

    In ``ccache g++ -m32`` the first one is ``-m32``. Raises as `find_cxx`.
    """
    _, *arguments = _cxx_words(settings().cxx or "c++")
    return tuple(dropwhile(lambda word: not word.startswith("-"), arguments))


def _cxx_words(cxx: str) -> list[str]:
    try:
        return shlex.split(cxx)
    except ValueError as error:  # an open quote
        raise ToolchainError(f"CXX: {cxx!r}: {error}; {_CXX_HINT}") from None


def find_ninja() -> Tool:
    """Find ninja: beside the interpreter, in the pip package, on PATH.

    A real program is preferred to a script: older pip packages install a script that starts ninja
    as a child, which a signal to the script would leave behind.
    """
    hint = "pip install ninja"
    found = _find_ninja(settings().path, sys.executable, site_directories())
    if found is None:
        raise ToolchainError(f"ninja was not found; {hint}")
    return Tool((found,), "ninja", tool_version((found,), r"\A(\d+(?:\.\d+)*)", hint))


@lru_cache(maxsize=8)
def _find_ninja(path: str, executable: str, site: tuple[str, ...]) -> str | None:
    candidates = [
        Path(executable).parent / "ninja",
        Path(sysconfig.get_path("scripts")) / "ninja",
        *(Path(directory, "ninja/data/bin/ninja") for directory in site),
    ]
    found = on_path("ninja", path)
    if found is not None:
        candidates.append(Path(found))
    present = [candidate for candidate in candidates if os.path.isfile(candidate)]
    programs = [candidate for candidate in present if is_program(candidate)]
    return str((programs or present)[0]) if present else None


def on_path(name: str, path: str) -> str | None:
    """Return the absolute path of a program, which may be a name on PATH or a path; None if absent.

    Both may be relative, to this directory and not to that of a build, where the program starts.
    """
    found = shutil.which(name, path=path)
    # Links and dots stay: what a compiler does may depend on the name that it is started by.
    return None if found is None else str(Path(found).absolute())


def is_program(path: Path) -> bool:
    """Tell whether the file is no script but a program."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def tool_version(command: tuple[str, ...], pattern: str, hint: str) -> str:
    """Return what `pattern` finds in what ``--version`` prints; else ToolchainError with `hint`."""
    stat = Path(command[0]).stat()
    output = _cached_probe((*command, "--version"), (stat.st_mtime_ns, stat.st_size))
    match = re.search(pattern, output or "")
    if match is None:
        raise ToolchainError(f"{shlex.join(command)} --version does not work; {hint}")
    return match[1]


@lru_cache(maxsize=32)
def _cached_probe(command: tuple[str, ...], _file: tuple[int, int]) -> str | None:
    return probe(command)


def probe(command: tuple[str, ...]) -> str | None:
    """Return what a command says about itself; None where it fails."""
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
