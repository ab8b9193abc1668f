"""What processes of one machine share by: memory without a file, and sockets that carry it.

The sockets are Unix ones of the abstract namespace: there is no file, so nothing is left behind by
a process that is killed. Messages are one line of JSON each; a descriptor comes along with one.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jitkern.errors import UnsupportedError
from jitkern.files import canonical_json, parse_json

_MESSAGE_BYTES = 1 << 16

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


def new_socket() -> socket.socket:
    """Return a socket that keeps messages apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and effective uid of the process at the other end, as the kernel knows them."""
    layout = "iII"
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    pid, uid, _ = struct.unpack(layout, raw)
    return pid, uid


def process_text(pid: int) -> str:
    """Return what a message calls the process of :func:`peer`."""
    return f"process {pid}" if pid else "a process of another PID namespace"


@dataclass(frozen=True)
class Protocol:
    """What the messages of one use of these sockets begin with.

    Attributes
    ----------
    magic : str
        What tells them from others', and their sockets.
    version : int
        All processes have to speak the same.
    owner : str
        Whose messages they are, for an error.
    """

    magic: str
    version: int
    owner: str

    def address(self, name: str) -> str:
        """Return the address of a socket of this user."""
        return f"\0{self.magic}-{os.geteuid()}-{name}"

    def send(
        self, connection: socket.socket, kind: str, *, fd: int | None = None, **fields: Any
    ) -> None:
        """Send a message. If the other process is gone, the next :meth:`receive` says so."""
        own = {"magic": self.magic, "version": self.version, "kind": kind}
        with suppress(OSError):
            fds = [] if fd is None else [fd]
            socket.send_fds(connection, [canonical_json({**own, **fields})], fds)

    def receive(self, connection: socket.socket) -> dict[str, Any] | None:
        """Return a message, or None where the other end has closed.

        Raises
        ------
        ValueError
            It is none of this protocol.
        TimeoutError
            None came within the connection's timeout.
        """
        return self._receive(connection, 0)[0]  # no room: the kernel closes a descriptor

    def receive_fd(self, connection: socket.socket) -> tuple[dict[str, Any] | None, int]:
        """As :meth:`receive`, and the descriptor that came along, -1 if none did."""
        return self._receive(connection, socket.CMSG_LEN(array.array("i").itemsize))

    def _receive(
        self, connection: socket.socket, room_bytes: int
    ) -> tuple[dict[str, Any] | None, int]:
        while True:
            # The other end closed before it had read all; what it had sent is there to be read.
            with suppress(ConnectionResetError):
                # Not socket.recv_fds, which drops its flags.
                flags = socket.MSG_CMSG_CLOEXEC
                data, rights, _, _ = connection.recvmsg(_MESSAGE_BYTES, room_bytes, flags)
                break
        fd = array.array("i", rights[0][2])[0] if rights else -1
        try:
            return (self._decode(data) if data else None), fd
        except ValueError as error:
            if fd >= 0:
                os.close(fd)
            raise ValueError(f"{process_text(peer(connection)[0])} sent {error}") from None

    def _decode(self, data: bytes) -> dict[str, Any]:
        message: Any = None
        with suppress(ValueError):
            message = parse_json(data)
        is_ours = isinstance(message, dict) and message.get("magic") == self.magic
        if not is_ours or "kind" not in message:
            raise ValueError(f"{data[:40]!r}, expected a message of {self.owner}")
        if message.get("version") != self.version:
            came = f"a message of protocol version {message.get('version')}"
            expected = f"{self.version}: use one version of jitkern in all processes"
            raise ValueError(f"{came}, expected {expected}")
        found: dict[str, Any] = message
        return found
