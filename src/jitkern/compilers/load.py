"""Shared libraries: loading one, and what a library built here needs of another machine."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.errors import CompileError

if TYPE_CHECKING:
    from tvm_ffi import Module

# What tvm-ffi raises where a library does not load.
_LOAD_ERRORS = (RuntimeError, OSError, ValueError)


@lru_cache(maxsize=1)
def platform_abi() -> tuple[str, ...]:
    """Return processor and C library."""
    return (platform.machine(), _libc())


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return "".join(platform.libc_ver())


def load_library(name: str, path: Path, *, cuda: bool = False) -> Module:
    """Load a library through tvm-ffi.

    Parameters
    ----------
    name
        What it is, for messages.
    path
        The library; its bytes have been verified, for a truncated one would kill the process.
    cuda
        It needs libcudart, which is loaded from the toolkit if nobody has done so.

    Raises
    ------
    CompileError
        It does not load; the log says why.
    """
    import tvm_ffi

    try:
        try:
            return tvm_ffi.load_module(str(path))
        except _LOAD_ERRORS as error:
            if not cuda or "libcudart" not in str(error):
                raise
        _load_cudart()
        return tvm_ffi.load_module(str(path))
    except _LOAD_ERRORS as error:
        raise CompileError(
            f"{name}: the library was built but does not load",
            command=f"dlopen {path.name}",
            log=str(error).replace(f"{path.parent}/", ""),
        ) from error


def _load_cudart() -> None:
    import ctypes

    from jitkern.compilers.find_cuda import find_cuda_home

    home = find_cuda_home()
    ctypes.CDLL(str(home.lib_dir / home.cudart), mode=ctypes.RTLD_GLOBAL)
