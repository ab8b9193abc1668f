"""Settings from the environment: the only module that reads it.

An unset or empty variable means its default. A relative path is below the directory of first use.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

from jitkern.names import did_you_mean

FaultMode = Literal["raise", "warn", "ignore"]
FreezeMode = Literal["raise", "warn"]

VARIABLES = (
    *("JITKERN_ANY_ENGINE", "JITKERN_ARCH", "JITKERN_CACHE_DIR", "JITKERN_CACHE_MAX_BYTES"),
    *("JITKERN_CACHE_PATH", "JITKERN_FAULTS", "JITKERN_FREEZE", "JITKERN_LOCK_TIMEOUT_S"),
    *("JITKERN_LOG", "JITKERN_NCCL", "JITKERN_NVRTC", "JITKERN_RECORD"),
)
"""The variables of jitkern; ``settings`` warns of any other ``JITKERN_*``, likely a typo."""

# Variables that add headers and flags to a compiler's command.
CXX_HEADERS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
NVCC_FLAGS = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

T = TypeVar("T")


class Settings(NamedTuple):
    """The environment, parsed and checked once; a field is named after its variable.

    - ``JITKERN_CACHE_DIR``: the cache that is written. Default ``$XDG_CACHE_HOME/jitkern``, else
      ``~/.cache/jitkern``.
    - ``JITKERN_CACHE_PATH``: read-only caches, separated as in ``PATH``.
    - ``JITKERN_CACHE_MAX_BYTES``: bytes, or with a suffix K, M, G, T (powers of 1024). Default 4G.
    - ``JITKERN_NCCL``: path of a libnccl to use instead of the one that is found.
    - ``JITKERN_ARCH``: archs to compile for without a GPU, such as ``9.0,10.0``: by ``jitkern
      warm`` without ``--arch``, and for ``cuda_files``. A GPU that is there comes first.
    - ``JITKERN_NVRTC``: path of a libnvrtc to use instead of the one that is found.
    - ``JITKERN_LOCK_TIMEOUT_S``: seconds to wait for another process that compiles the same kernel
      before compiling it privately. Default 120; 0 does not wait.
    - ``JITKERN_RECORD``: file that receives each specialisation used.
    - ``JITKERN_FREEZE``: 1 makes a missing kernel an error instead of a compile; warn compiles it,
      with a warning. ``freeze`` and ``unfreeze`` override it.
    - ``JITKERN_LOG``: 1 prints the log lines of look-ups if no logging is configured.
    - ``JITKERN_FAULTS``: raise (default), warn or ignore an index out of range that a kernel
      recorded.
    - ``JITKERN_ANY_ENGINE``: 1 lets ``jitkern.integrations`` into versions of an engine that they
      were not tried with.
    """

    cache_dir: Path
    cache_path: tuple[Path, ...]
    cache_max_bytes: int
    nccl: Path | None
    arch: tuple[str, ...]
    nvrtc: Path | None
    lock_timeout_s: float
    record: Path | None
    freeze: FreezeMode | None
    log: bool
    faults: FaultMode
    any_engine: bool
    cuda_home: Path | None  # CUDA_HOME, else CUDA_PATH
    cxx: str | None  # CXX: a name or a path, with arguments if there are any
    home: Path | None
    path: str
    library_path: tuple[Path, ...]  # LD_LIBRARY_PATH


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process, read from the environment once.

    `settings.cache_clear()` makes the next call read it again. An unknown variable that starts with
    ``JITKERN_`` is a RuntimeWarning, a bad value a ValueError that names the variable.
    """
    parsed = Settings(
        cache_dir=_cache_dir(),
        cache_path=_paths("JITKERN_CACHE_PATH"),
        cache_max_bytes=_max_bytes("JITKERN_CACHE_MAX_BYTES"),
        nccl=_path("JITKERN_NCCL"),
        arch=_words("JITKERN_ARCH"),
        nvrtc=_path("JITKERN_NVRTC"),
        lock_timeout_s=_seconds("JITKERN_LOCK_TIMEOUT_S"),
        record=_path("JITKERN_RECORD"),
        freeze=_choice("JITKERN_FREEZE", {"0": None, "1": "raise", "warn": "warn"}),
        log=_choice("JITKERN_LOG", {"0": False, "1": True}),
        faults=_choice("JITKERN_FAULTS", {mode: mode for mode in get_args(FaultMode)}),
        any_engine=_choice("JITKERN_ANY_ENGINE", {"0": False, "1": True}),
        cuda_home=_path("CUDA_HOME") or _path("CUDA_PATH"),
        cxx=_text("CXX") or None,
        home=_path("HOME"),
        path=os.environ.get("PATH", os.defpath),
        library_path=_paths("LD_LIBRARY_PATH"),
    )
    for text in unknown_variables():
        warnings.warn(f"jitkern: {text}", RuntimeWarning, stacklevel=2)
    return parsed


def variables() -> dict[str, str]:
    """Return the variables of jitkern that are set."""
    return {name: _text(name) for name in VARIABLES if _text(name)}


def unknown_variables() -> list[str]:
    """Return a line for each ``JITKERN_*`` that is no variable of jitkern."""
    names = sorted(name for name in os.environ if name.startswith("JITKERN_"))
    known = f"; there are {', '.join(VARIABLES)}"
    by_stem = {variable.removeprefix("JITKERN_"): variable for variable in VARIABLES}
    return [
        f"{name}: no setting of this name, so it does nothing"
        f"{did_you_mean(name.removeprefix('JITKERN_'), by_stem) or known}"
        for name in names
        if name not in VARIABLES
    ]


def process_environment() -> dict[str, str]:
    """Return a copy of the environment, for a subprocess to inherit with changes."""
    return dict(os.environ)


def compiler_environment(*, cuda: bool = False, links: bool = False) -> dict[str, str]:
    """Return the variables that are set and that change what compilers make of a source.

    With `cuda`, nvcc takes part. With `links`, libraries are named, which ``LIBRARY_PATH`` finds.
    """
    names = (*CXX_HEADERS, *(NVCC_FLAGS if cuda else ()), *(("LIBRARY_PATH",) if links else ()))
    return {name: os.environ[name] for name in names if os.environ.get(name)}


# -- parsing ---------------------------------------------------------------------------------------


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()


def _words(name: str, separator: str = ",") -> tuple[str, ...]:
    parts = (part.strip() for part in _text(name).split(separator))
    return tuple(part for part in parts if part)


def _bad(name: str, value: str, expected: str) -> ValueError:
    return ValueError(f"{name}: {value!r}, expected {expected}")


def _path(name: str) -> Path | None:
    value = _text(name)
    return _expand(name, value) if value else None


def _paths(name: str) -> tuple[Path, ...]:
    return tuple(_expand(name, part) for part in _words(name, os.pathsep))


def _expand(name: str, value: str) -> Path:
    """Return an absolute path; without a home ``~`` stays, and the cache is kept in memory."""
    path = Path(os.path.expanduser(value))
    try:
        return path if value.startswith("~") else path.absolute()
    except FileNotFoundError:
        expected = "an absolute path: the working directory was deleted"
        raise _bad(name, value, expected) from None


def _cache_dir() -> Path:
    xdg = _text("XDG_CACHE_HOME")
    # The XDG specification: a relative path is invalid and to be ignored.
    default = Path(xdg, "jitkern") if os.path.isabs(xdg) else _expand("HOME", "~/.cache/jitkern")
    return _path("JITKERN_CACHE_DIR") or default


def parse_bytes(text: str) -> int | None:
    """Parse ``4294967296``, ``512M``, ``1.5G`` or ``64 MiB``; None for anything else."""
    # 19 digits hold any size. A fraction has a unit: there are no parts of a byte.
    number = r"[0-9]{1,19}(?:\.[0-9]{1,9}(?= ?[kmgt]))?"
    match = re.fullmatch(rf"({number}) ?([kmgt]?)i?b?", text.lower())
    if match is None:
        return None
    whole, _, fraction = match[1].partition(".")
    units = int(whole + fraction) << " kmgt".index(match[2] or " ") * 10
    return int(units // 10 ** len(fraction))


def _max_bytes(name: str) -> int:
    number = parse_bytes(_text(name) or "4G")
    if number is None:
        raise _bad(name, _text(name), "a number of bytes such as 4294967296, 512M or 4G")
    return number


def _seconds(name: str) -> float:
    value = _text(name) or "120"
    with suppress(ValueError):
        if 0.0 <= float(value) < float("inf"):
            return float(value)
    raise _bad(name, value, "a number of seconds, 0 or more")


def _choice(name: str, choices: Mapping[str, T]) -> T:
    """Return the meaning of a value; the first choice is the default."""
    value = _text(name) or next(iter(choices))
    if value not in choices:
        *others, last = choices
        raise _bad(name, value, f"{', '.join(others)} or {last}")
    return choices[value]
