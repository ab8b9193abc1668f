"""Settings from the environment: the only module that reads it.

A variable that is unset or empty means its default; a bad value raises at first use, naming the
variable, what came and what is expected. A relative path is below the directory of that moment.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

Compiler = Literal["nvrtc", "nvcc"]
FaultMode = Literal["raise", "warn", "ignore"]
FreezeMode = Literal["raise", "warn"]

COMPILERS: tuple[Compiler, ...] = get_args(Compiler)
FAULT_MODES: tuple[FaultMode, ...] = get_args(FaultMode)
FREEZE_MODES: tuple[FreezeMode, ...] = get_args(FreezeMode)

PREFIX = "JITKERN_"
VARIABLES = (
    *("JITKERN_ARCH", "JITKERN_CACHE_DIR", "JITKERN_CACHE_MAX_BYTES", "JITKERN_CACHE_PATH"),
    *("JITKERN_CACHE_TRUST", "JITKERN_COMPILER", "JITKERN_FAULTS"),
    *("JITKERN_FREEZE", "JITKERN_HOST_OBJECTS", "JITKERN_LOCK_TIMEOUT_S", "JITKERN_LOG"),
    *("JITKERN_NCCL", "JITKERN_NVRTC", "JITKERN_PYNCCL_MAX_BUFFER_SIZE"),
    "JITKERN_RECORD",
)
"""What jitkern reads of its own; any other variable of this prefix is a slip of the pen."""

# What brings flags, headers and programs to a build besides its command. Not among them is what
# changes messages and files beside the result only (LANG, DEPENDENCIES_OUTPUT, GCC_COMPARE_DEBUG),
# nor SOURCE_DATE_EPOCH: without it __DATE__ is the day of whoever compiled, and in no key either.
_CXX_READS = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"),
    *("LD_RUN_PATH", "CCC_OVERRIDE_OPTIONS"),  # ld's; clang's
)
# Those behind the first three are what nvcc.profile adds to.
_NVCC_READS = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"),
    *("INCLUDES", "SYSTEM_INCLUDES", "CUDAFE_FLAGS", "NVVM_FLAGS", "PTXAS_FLAGS"),
)

T = TypeVar("T", bound=str)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Trust(NamedTuple):
    """Whom JITKERN_CACHE_TRUST names: by number, beside this user and root.

    Attributes
    ----------
    users
        They may own what is in a cache.
    groups
        Their members may own it, and write to it.
    everyone
        Anybody may.
    """

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    everyone: bool = False


NOBODY = Trust()


class Settings(NamedTuple):
    """What the environment says, parsed and checked once.

    Attributes
    ----------
    cache_dir : Path
        ``JITKERN_CACHE_DIR``: the cache that is written. Default ``$XDG_CACHE_HOME/jitkern``, else
        ``~/.cache/jitkern``; a ``~`` with no home directory is left for the cache to degrade.
    cache_path : tuple of Path
        ``JITKERN_CACHE_PATH``: read-only caches, separated as in ``PATH``.
    cache_trust : Trust
        ``JITKERN_CACHE_TRUST``: whose kernels and libraries are loaded beside those of this user
        and of root, such as ``alice,1001,group:kernels``; ``everyone`` looks at no owner and no
        mode. Default nobody's.
    cache_max_bytes : int
        ``JITKERN_CACHE_MAX_BYTES``: bytes, or with a suffix K, M, G, T (powers of 1024).
        Default 4G.
    nccl : Path or None
        ``JITKERN_NCCL``: path of a libnccl to use instead of the one that is found.
    pynccl_max_buffer_bytes : int
        ``JITKERN_PYNCCL_MAX_BUFFER_SIZE``: no communicator registers a larger buffer than this;
        bytes, or with a suffix as above. Default 1G.
    arch : tuple of str
        ``JITKERN_ARCH``: archs to compile for where no GPU is asked, such as ``9.0,10.0``:
        by ``jitkern warm`` without ``--arch``, and for ``cuda_files`` on a machine without a GPU,
        which are built for each. A GPU that is there is compiled for whatever this says.
    compiler : {"nvrtc", "nvcc"}
        ``JITKERN_COMPILER``: what turns device code into a cubin. Default nvrtc.
    nvrtc : Path or None
        ``JITKERN_NVRTC``: path of a libnvrtc to use instead of the one that is found.
    host_objects : Path or None
        ``JITKERN_HOST_OBJECTS``: directory that keeps what each C++ source of the host module was
        compiled to, for who builds it from many trees; nobody else may write to it, since what is
        there is linked unseen.
    lock_timeout_s : float
        ``JITKERN_LOCK_TIMEOUT_S``: seconds to wait for another process that compiles the same
        kernel before compiling it privately. Default 120; 0 does not wait.
    record : Path or None
        ``JITKERN_RECORD``: file that receives each specialisation used.
    freeze : {"raise", "warn"} or None
        ``JITKERN_FREEZE``: 1 makes a missing kernel an error instead of a compile; warn compiles
        it, with a warning. :func:`jitkern.freeze` and :func:`jitkern.unfreeze` go before it.
    log : bool
        ``JITKERN_LOG``: 1 logs one line per lookup.
    faults : {"raise", "warn", "ignore"}
        ``JITKERN_FAULTS``: what happens to an index out of range that a kernel recorded.
    cuda_home : Path or None
        ``CUDA_HOME``, else ``CUDA_PATH``.
    cxx : str or None
        ``CXX``: the C++ compiler, a name or a path, with arguments if there are any.
    home : Path or None
        ``HOME``: owner and mode of the directories above it do not matter to a cache in it.
    path : str
        ``PATH``: where programs are looked up.
    library_path : tuple of Path
        ``LD_LIBRARY_PATH``: where shared libraries are looked up.
    step_summary : Path or None
        ``GITHUB_STEP_SUMMARY``: file that ``jitkern bench --ci`` adds its summary to.
    """

    cache_dir: Path
    cache_path: tuple[Path, ...]
    cache_trust: Trust
    cache_max_bytes: int
    nccl: Path | None
    pynccl_max_buffer_bytes: int
    arch: tuple[str, ...]
    compiler: Compiler
    nvrtc: Path | None
    host_objects: Path | None
    lock_timeout_s: float
    record: Path | None
    freeze: FreezeMode | None
    log: bool
    faults: FaultMode
    cuda_home: Path | None
    cxx: str | None
    home: Path | None
    path: str
    library_path: tuple[Path, ...]
    step_summary: Path | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Parse a mapping of variables. Raises as :func:`settings`."""
        return cls(
            cache_dir=_cache_dir(environ),
            cache_path=_paths(environ, "JITKERN_CACHE_PATH"),
            cache_trust=_trust(environ, "JITKERN_CACHE_TRUST"),
            cache_max_bytes=_bytes(environ, "JITKERN_CACHE_MAX_BYTES", 4 << 30),
            nccl=_path(environ, "JITKERN_NCCL"),
            pynccl_max_buffer_bytes=_bytes(environ, "JITKERN_PYNCCL_MAX_BUFFER_SIZE", 1 << 30),
            arch=_archs(environ, "JITKERN_ARCH"),
            compiler=_choice(environ, "JITKERN_COMPILER", COMPILERS),
            nvrtc=_path(environ, "JITKERN_NVRTC"),
            host_objects=_path(environ, "JITKERN_HOST_OBJECTS"),
            lock_timeout_s=_seconds(environ, "JITKERN_LOCK_TIMEOUT_S", 120.0),
            record=_path(environ, "JITKERN_RECORD"),
            freeze=_freeze(environ, "JITKERN_FREEZE"),
            log=_flag(environ, "JITKERN_LOG"),
            faults=_choice(environ, "JITKERN_FAULTS", FAULT_MODES),
            cuda_home=_path(environ, "CUDA_HOME") or _path(environ, "CUDA_PATH"),
            cxx=environ.get("CXX", "").strip() or None,
            home=_path(environ, "HOME"),
            path=environ.get("PATH", os.defpath),
            library_path=_paths(environ, "LD_LIBRARY_PATH"),
            step_summary=_path(environ, "GITHUB_STEP_SUMMARY"),
        )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process, read from the environment once.

    `settings.cache_clear()` makes the next call read the environment again. A variable that starts
    with ``JITKERN_`` and is none of jitkern's is a RuntimeWarning with the name that is nearest.

    Raises
    ------
    ValueError
        A variable holds something else than it should: it names the variable, what came, and what
        is expected.

    Examples
    --------
    >>> settings().compiler
    'nvrtc'
    """
    found = Settings.from_environ(os.environ)
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            warnings.warn(f"jitkern: {name}: {_unknown(name)}", RuntimeWarning, stacklevel=2)
    return found


def _unknown(name: str) -> str:
    # Imported here: 2 ms, and nobody pays them who makes no mistake.
    from difflib import get_close_matches

    # Behind the prefix, which all have: with it, anything is near.
    known = [variable.removeprefix(PREFIX) for variable in VARIABLES]
    near = get_close_matches(name.removeprefix(PREFIX), known, n=1)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(VARIABLES)}"
    return f"no setting of this name, so it does nothing; {hint}"


def process_environment() -> dict[str, str]:
    """Return a copy of the environment, for a subprocess to inherit with changes."""
    return dict(os.environ)


def compiler_environment(*, cuda: bool = False, links: bool = False) -> dict[str, str]:
    """Return the variables that are set and by which the compilers make something else of a source.

    They are no settings: a process that is started gets them as they are by then.

    Parameters
    ----------
    cuda
        Whether nvcc takes part.
    links
        Whether libraries are named, which ``LIBRARY_PATH`` finds: what every library is linked with
        is found before. Images with a CUDA toolkit set it, and those without one do not.
    """
    names = (*_CXX_READS, *(_NVCC_READS if cuda else ()), *(("LIBRARY_PATH",) if links else ()))
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _bad(name: str, value: str, expected: str) -> ValueError:
    return ValueError(f"{name}: {value!r}, expected {expected}")


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    value = _text(environ, name)
    return _expand(environ, value) if value else None


def _paths(environ: Mapping[str, str], name: str) -> tuple[Path, ...]:
    parts = (part.strip() for part in _text(environ, name).split(os.pathsep))
    return tuple(_expand(environ, part) for part in parts if part)


def _expand(environ: Mapping[str, str], value: str) -> Path:
    """`~` by HOME of the same mapping; Path.expanduser would raise where there is no home.

    Absolute from then on: the process may go elsewhere.
    """
    home = environ.get("HOME", "")
    if home and (value == "~" or value.startswith("~/")):
        return Path(home + value[1:])
    path = Path(os.path.expanduser(value))
    return path if value.startswith("~") else path.absolute()


def _cache_dir(environ: Mapping[str, str]) -> Path:
    given = _path(environ, "JITKERN_CACHE_DIR")
    if given is not None:
        return given
    xdg = _text(environ, "XDG_CACHE_HOME")
    # The XDG specification: a relative path is invalid and to be ignored.
    if os.path.isabs(xdg):
        return Path(xdg) / "jitkern"
    return _expand(environ, "~/.cache/jitkern")


def _trust(environ: Mapping[str, str], name: str) -> Trust:
    value = _text(environ, name)
    users, groups, everyone = set(), set(), False
    for word in (part.strip() for part in value.split(",")):
        try:
            if word == "everyone":
                everyone = True
            elif word.startswith("group:"):
                groups.add(_group_number(word.removeprefix("group:")))
            elif word:
                users.add(_user_number(word))
        except KeyError:
            expected = "users and group:NAME of this machine, by name or number, or everyone"
            raise _bad(name, word, expected) from None
    return Trust(frozenset(users), frozenset(groups), everyone)


def _user_number(name: str) -> int:
    import pwd

    return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid


def _group_number(name: str) -> int:
    import grp

    return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid


def parse_bytes(text: str) -> int | None:
    """Parse ``4294967296``, ``512M`` or ``4GiB``; None where it is something else.

    Examples
    --------
    >>> parse_bytes("512M") == 512 << 20
    True
    """
    digits = text.lower().removesuffix("b").removesuffix("i")
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    digits = digits.removesuffix(unit)
    # 19 digits are more than any size has; Python itself refuses to read thousands of them.
    if unit not in _UNITS or not re.fullmatch("[0-9]{1,19}", digits):
        return None
    return int(digits) * _UNITS[unit]


def _bytes(environ: Mapping[str, str], name: str, default: int) -> int:
    value = _text(environ, name)
    if not value:
        return default
    count = parse_bytes(value)
    if count is None:
        raise _bad(name, value, "a number of bytes such as 4294967296, 512M or 4G")
    return count


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    value = _text(environ, name)
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise _bad(name, value, "a number of seconds, 0 or more")
    return seconds


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = _text(environ, name)
    if value not in ("", "0", "1"):
        raise _bad(name, value, "0 or 1")
    return value == "1"


def _freeze(environ: Mapping[str, str], name: str) -> FreezeMode | None:
    value = _text(environ, name)
    if value == "warn":
        return "warn"
    if value not in ("", "0", "1"):
        raise _bad(name, value, "0, 1 or warn")
    return "raise" if value == "1" else None


def _choice(environ: Mapping[str, str], name: str, choices: tuple[T, ...]) -> T:
    value = _text(environ, name)
    if not value:
        return choices[0]
    for choice in choices:
        if choice == value:
            return choice
    raise _bad(name, value, " or ".join(choices))


def _archs(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Split only: arch.requested_archs() parses them and names this variable in its error."""
    return tuple(part.strip() for part in _text(environ, name).split(",") if part.strip())
