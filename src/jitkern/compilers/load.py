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

# What tvm-ffi raises if a library does not load.
_LOAD_ERRORS = (RuntimeError, OSError, ValueError)


@lru_cache(maxsize=1)
def platform_abi() -> tuple[str, ...]:
    """Return processor and C library."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = "".join(platform.libc_ver())
    return (platform.machine(), libc)


def load_library(name: str, data: bytes, file: Path | None, *, cuda: bool = False) -> Module:
    """Load a library through tvm-ffi.

    `data` is the library, verified: a truncated one would kill the process. Without a `file` it is
    loaded from memory. `cuda`: it needs libcudart, which is loaded from the toolkit if nobody has
    done so. CompileError if it does not load.
    """
    shown = f"{name}.so" if file is None else file.name
    path = ""
    try:
        path = _in_memory(shown, data) if file is None else str(file)
        try:
            return _load(path)
        except _LOAD_ERRORS as error:
            if not cuda or "libcudart" not in str(error):
                raise
        _load_cudart()
        return _load(path)
    except _LOAD_ERRORS as error:
        raise CompileError(
            f"{name}: the library was built but does not load",
            command=f"dlopen {shown}",
            log=str(error).replace(path, shown) if path else str(error),
        ) from error


def _load(path: str) -> Module:
    """Do what tvm_ffi.load_module does, which goes by the file's ending: memory has none."""
    from tvm_ffi import get_global_func

    module: Module = get_global_func("ffi.Module.load_from_file.so")(path, "so")
    get_global_func("ffi.ModuleGlobalsAdd")(module)  # kept until the process ends
    return module


def _in_memory(shown: str, data: bytes) -> str:
    """Return the path of a file in memory that stays open: dlopen knows libraries by their path."""
    from jitkern.fs import memory_file  # seldom needed

    descriptor = memory_file(shown)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _load_cudart() -> None:
    import ctypes

    from jitkern.compilers.find import find_cuda_home

    home = find_cuda_home()
    ctypes.CDLL(str(home.lib_dir / home.cudart), mode=ctypes.RTLD_GLOBAL)
