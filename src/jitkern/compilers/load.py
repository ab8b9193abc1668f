"""Shared libraries: loading one, and what a library built here needs of another machine."""

from __future__ import annotations

import fcntl
import os
import platform
import stat
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.errors import CompileError
from jitkern.fs import ForkLocal, open_itself

if TYPE_CHECKING:
    from tvm_ffi import Module

# What tvm-ffi raises where a library does not load.
_LOAD_ERRORS = (RuntimeError, OSError, ValueError)

_PROC = "/proc"

_paths: dict[tuple[int, int], str] = {}  # device and inode -> path of our descriptor
_given: set[str] = set()
_guard = ForkLocal(threading.Lock)


@lru_cache(maxsize=1)
def platform_abi() -> tuple[str, ...]:
    """Return processor and C library."""
    return (platform.machine(), _libc())


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return "".join(platform.libc_ver())


def load_library(name: str, data: bytes, file: Path | None, *, cuda: bool = False) -> Module:
    """Load a library through tvm-ffi.

    Parameters
    ----------
    name
        What it is, for messages.
    data
        The library. It has been verified: a truncated one would kill the process.
    file
        Where it is. If that holds other bytes by now, or is None, `data` is loaded from memory.
    cuda
        It needs libcudart, which is loaded from the toolkit if nobody has done so.

    Raises
    ------
    CompileError
        It does not load; the log says why.
    """
    shown = f"{name}.so" if file is None else file.name
    path = ""
    try:
        path = _fixed_path(shown, data, file)
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
    """What tvm_ffi.load_module does, which goes by the file's ending: a descriptor has none."""
    from tvm_ffi import get_global_func

    module: Module = get_global_func("ffi.Module.load_from_file.so")(path, "so")
    get_global_func("ffi.ModuleGlobalsAdd")(module)  # kept until the process ends
    return module


def _fixed_path(shown: str, data: bytes, file: Path | None) -> str:
    """Return a path under which this process, as long as it lives, opens a file that holds `data`.

    A file that has been read and is then opened by its name may be another one. So it is read and
    loaded through one descriptor, which stays open. Profilers see the file's own name in
    ``/proc/PID/maps`` all the same.
    """
    try:
        # Not "self": gdb opens the path too, and hung at a pipe that has the number in gdb.
        process = os.readlink(f"{_PROC}/self")
    except OSError:
        if file is None:
            raise
        return str(file)  # a chroot without /proc; nobody but its owner can change the file
    descriptor = _same_file(data, file)
    if descriptor is None:
        descriptor = _in_memory(shown, data)
    status = os.fstat(descriptor)
    identity = (status.st_dev, status.st_ino)
    with _guard.value:
        path = _paths.get(identity, "")
        if path and _leads_to(path, identity):
            os.close(descriptor)
            return path
        # Spelled as by nobody else, for dlopen takes a name that it knows for the library it knows.
        while (path := f"{_PROC}/{process}/fd/./{descriptor}") in _given:
            # Somebody has closed a descriptor of ours, and its number has come up again.
            another = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, descriptor + 1)
            os.close(descriptor)
            descriptor = another
        _given.add(path)
        _paths[identity] = path
    return path


def _same_file(data: bytes, file: Path | None) -> int | None:
    """Open `file`, if it is a regular one that holds `data`."""
    if file is None:
        return None
    try:
        descriptor = open_itself(file)
    except OSError:
        return None  # gone, or a link in its place
    try:
        status = os.fstat(descriptor)
        same = stat.S_ISREG(status.st_mode) and status.st_size == len(data)
        same = same and _holds(descriptor, data)
    except OSError:
        same = False
    if same:
        return descriptor
    os.close(descriptor)
    return None


def _holds(descriptor: int, data: bytes) -> bool:
    # In pieces: 0.3 to 0.5 ms for the host module of 1.8 MB. As a whole its memory is new to a
    # process that has just started, which took five times as long.
    piece = 1 << 16
    starts = range(0, len(data), piece)
    return all(os.read(descriptor, piece) == data[start : start + piece] for start in starts)


def _in_memory(shown: str, data: bytes) -> int:
    """Return the descriptor of a file that has no name; OSError where the system has none."""
    from jitkern.fs import memory_file  # seldom needed

    descriptor = memory_file(shown)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def _leads_to(path: str, identity: tuple[int, int]) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == identity


def _load_cudart() -> None:
    import ctypes

    from jitkern.compilers.find_cuda import find_cuda_home

    home = find_cuda_home()
    ctypes.CDLL(str(home.lib_dir / home.cudart), mode=ctypes.RTLD_GLOBAL)
