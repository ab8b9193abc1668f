"""Memory that processes share without a file: nothing is left behind by one that is killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

from jitkern.errors import UnsupportedError

# From linux/memfd.h and linux/fcntl.h: Python has names for them only if its libc had.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4


def make_memory(user: str, shown: str, num_bytes: int) -> int:
    """Return the descriptor of `num_bytes` of zeros that nobody can make fewer or more.

    Parameters
    ----------
    user
        What an error begins with.
    shown
        What ``/proc/*/maps`` calls it.
    num_bytes
        Its size.

    Raises
    ------
    UnsupportedError
        There is no ``memfd_create``.
    OSError
        Linux refuses it.
    """
    try:
        fd = memory_file(shown, _MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise UnsupportedError(f"{user}: {error.strerror}") from error
        raise
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def memory_file(shown: str, flags: int = 0) -> int:
    """Return the descriptor of an empty file that has no name.

    Parameters
    ----------
    shown
        What ``/proc/*/maps`` calls it.
    flags
        More flags of memfd_create(2).

    Raises
    ------
    OSError
        Linux refuses it, or there is no ``memfd_create``.
    """
    flags |= _MFD_CLOEXEC
    if hasattr(os, "memfd_create"):
        return os.memfd_create(shown, flags)
    # A Python built for a glibc before 2.27, as many of uv's are; that of the system is newer.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "no memfd_create here, expected glibc 2.27")
    fd: int = libc.memfd_create(shown.encode(), flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
    return fd
