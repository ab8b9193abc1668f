"""Which libnccl this process uses: the one PyTorch has loaded, else what is installed."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from jitkern.env import settings
from jitkern.errors import CommError, UnsupportedError
from jitkern.host import module as host

FILE = "libnccl.so.2"


@cache
def load() -> int:
    """Load the library, once a process, and return its version, such as 22809 for 2.28.9.

    Raises
    ------
    UnsupportedError
        There is none, or it is too old; the message says what to install.
    """
    given = settings().nccl
    path = str(given) if given is not None else _loaded_by_torch() or _of_a_package() or FILE
    try:
        return int(host.module()["nccl_load"](path))
    except RuntimeError as error:
        cure = "install a CUDA build of torch, or pip install nvidia-nccl-cu13 (cu12 for CUDA 12)"
        if given is not None:
            cure = "JITKERN_NCCL names it; unset that to use the one that torch brings"
        raise UnsupportedError(f"init_pynccl: no usable NCCL: {error}; {cure}") from error


def unique_id() -> bytes:
    """Return what the ranks of a new communicator find each other by.

    Raises
    ------
    CommError
        NCCL finds no network to listen on.
    """
    try:
        return bytes(host.module()["nccl_unique_id"]())
    except RuntimeError as error:
        raise CommError(f"init_pynccl: {error}") from error


def version_name(version: int) -> str:
    """Return ``2.28.9`` for 22809.

    Examples
    --------
    >>> version_name(22809)
    '2.28.9'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _loaded_by_torch() -> str | None:
    """Return the path of the libnccl in this process: a second one would double all it holds."""
    import torch  # noqa: F401 - a CUDA build loads it

    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if Path(path).name.startswith("libnccl.so"):
                return f"/{path}"
    return None


def _of_a_package() -> str | None:
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # not even its parent
        return None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder, "lib", FILE)
        if path.exists():
            return str(path)
    return None
