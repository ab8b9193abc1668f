"""Shared libraries: loading one, and the ABI of this machine."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.compilers.find import find_cuda_home
from jitkern.errors import CompileError, ToolchainError
from jitkern.fs import scratch_folder, slug
from jitkern.gate import gate

if TYPE_CHECKING:
    from tvm_ffi import Module

# What tvm-ffi raises if a library does not load.
_LOAD_ERRORS = (RuntimeError, OSError, ValueError)


@lru_cache(maxsize=1)
def platform_abi() -> tuple[str, ...]:
    """Return processor and C library, which a library built here needs."""
    return (platform.machine(), " ".join(platform.libc_ver()))


def _is_utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def load_library(name: str, library: Path | bytes, *, cuda: bool = False) -> Module:
    """Load a library of a verified entry through tvm-ffi; CompileError if it does not load.

    A library that is in memory only is given as its bytes. One with `cuda` needs libcudart: if it
    does not load, the toolkit's is loaded first.
    """
    if isinstance(library, Path) and not _is_utf8(library):  # tvm-ffi takes no other path
        library = library.read_bytes()
    if isinstance(library, bytes):
        with scratch_folder("library") as folder:
            file = folder / f"{slug(name)}.so"
            file.write_bytes(library)
            return load_library(name, file, cuda=cuda)
    from tvm_ffi import load_module

    module: Module
    try:
        try:
            with gate:
                module = load_module(str(library))
        except _LOAD_ERRORS:
            if not cuda:
                raise
            # The toolkit's libcudart need not be where the dynamic loader searches.
            with suppress(ToolchainError, OSError):
                ctypes.CDLL(str(find_cuda_home().cudart), mode=ctypes.RTLD_GLOBAL)
            module = load_module(str(library))
    except _LOAD_ERRORS as error:
        message = f"{name}: the library was built but does not load"
        raise CompileError(message, command=f"dlopen {library}", log=str(error)) from error
    return module
