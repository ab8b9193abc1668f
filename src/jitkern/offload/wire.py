"""What the processes of a shared pool say to each other, over which socket, and the memory itself.

The socket is a Unix one of the abstract namespace: there is no file, so nothing is left behind by a
process that is killed. Messages are one line of JSON each; a descriptor comes along with one.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from jitkern.errors import ShareError, UnsupportedError
from jitkern.files import canonical_json, parse_json

MAGIC, VERSION = "jitkern-pool", 1

_MESSAGE_BYTES = 1 << 16

# From linux/memfd.h and linux/fcntl.h: Python has names for them only if its libc had.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4


def make_memory(name: str, num_bytes: int) -> int:
    """Return the descriptor of `num_bytes` of zeros that nobody can make fewer or more."""
    shown, flags = f"{MAGIC}-{name}", _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(shown, flags)
    else:
        # A Python built for a glibc before 2.27, as many of uv's are; that of the system is newer.
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "memfd_create"):
            raise UnsupportedError("PinnedPool: share: no memfd_create here, expected glibc 2.27")
        fd = libc.memfd_create(shown.encode(), flags)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


# -- the socket ------------------------------------------------------------------------------------


def listen(prefix: str, name: str, num_waiting: int) -> socket.socket:
    """Return rank 0's socket; ShareError, beginning with `prefix`, where the name is taken."""
    listener = _new_socket()
    try:
        listener.bind(_address(name))
        listener.listen(num_waiting)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise ShareError(f"{prefix}rank 0 cannot listen: {error}") from error
    else:
        return listener
    holder = "another process"
    with _new_socket() as probe, suppress(OSError):
        probe.setblocking(False)
        probe.connect(_address(name))
        pid, uid = peer(probe)
        holder = f"{process_text(pid)} of uid {uid}"
    raise ShareError(
        f"{prefix}rank 0: address in use: {holder} has an open pool of this name, expected a name "
        "of its own for each pool; if that process is about to end, wait for it"
    )


def fetch(
    prefix: str, name: str, num_bytes: int, timeout_s: float, kind: str, **fields: Any
) -> tuple[socket.socket, int]:
    """Return a connection to rank 0, and the descriptor of the memory that came by it.

    Raises
    ------
    ShareError
        Nobody is there, or not the right one, or rank 0 says no. It begins with `prefix`.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        connection = _new_socket()
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            fd = _ask(connection, name, num_bytes, kind, fields)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                text = f"rank 0 does not answer within {timeout_s:g} s: its process hangs"
                raise ShareError(f"{prefix}{text}") from None
            if isinstance(error, (OSError, ValueError)):
                raise ShareError(f"{prefix}{error}") from error
            raise
        if fd is not None:
            return connection, fd
        connection.close()
        if time.monotonic() + pause_s > deadline:
            raise ShareError(
                f"{prefix}rank 0 did not come within {timeout_s:g} s: uid {os.geteuid()} has no "
                "pool of this name here; see its log for the reason, it has to share the network "
                "namespace of this process, and if it is only slow, give a larger timeout_s"
            )
        time.sleep(pause_s)  # nothing tells when an abstract socket appears
        pause_s = min(2 * pause_s, 0.1)


def _ask(
    connection: socket.socket, name: str, num_bytes: int, kind: str, fields: dict[str, Any]
) -> int | None:
    """Return the memory's descriptor, or None if nobody is there; ValueError: not the right one."""
    try:
        connection.connect(_address(name))
    except (ConnectionRefusedError, BlockingIOError):  # not there yet; too many come at a time
        return None
    pid, uid = peer(connection)
    if uid != os.geteuid():
        who = f"{process_text(pid)} in the place of rank 0"
        raise ValueError(f"{who} is of uid {uid}, expected uid {os.geteuid()} as this process")
    send(connection, kind, num_bytes=num_bytes, **fields)
    message, fd = _receive(connection, socket.CMSG_LEN(array.array("i").itemsize))
    try:
        size = os.fstat(fd).st_size if fd >= 0 else 0
        if message is None:
            return None  # a pool that is just being closed
        if message["kind"] == "failure":
            raise ValueError(message["text"])
        if size != num_bytes:
            came = f"{process_text(pid)} sent {size} bytes of memory"
            raise ValueError(f"{came}, expected {num_bytes}")
        kept, fd = fd, -1
        return kept
    finally:
        if fd >= 0:
            os.close(fd)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and effective uid of the process at the other end, as the kernel knows them."""
    layout = "iII"
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    pid, uid, _ = struct.unpack(layout, raw)
    return pid, uid


def process_text(pid: int) -> str:
    """Return what a message calls the process of :func:`peer`."""
    return f"process {pid}" if pid else "a process of another PID namespace"


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> str:
    return f"\0{MAGIC}-{os.geteuid()}-{name}"


# -- messages --------------------------------------------------------------------------------------


def send(connection: socket.socket, kind: str, *, fd: int | None = None, **fields: Any) -> None:
    """Send a message. If the other process is gone, the next :func:`receive` says so."""
    data = canonical_json({"magic": MAGIC, "version": VERSION, "kind": kind, **fields})
    with suppress(OSError):
        socket.send_fds(connection, [data], [] if fd is None else [fd])


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return a message, or None where the other end has closed.

    Raises
    ------
    ValueError
        It is none of this protocol.
    TimeoutError
        None came within the connection's timeout.
    """
    return _receive(connection, 0)[0]  # no room: the kernel closes a descriptor that comes along


def _receive(connection: socket.socket, room_bytes: int) -> tuple[dict[str, Any] | None, int]:
    """As :func:`receive`, and the descriptor that came along, -1 if none did."""
    while True:
        # The other end closed before it had read all; what it had sent is there to be read still.
        with suppress(ConnectionResetError):
            # Not socket.recv_fds, which drops its flags.
            flags = socket.MSG_CMSG_CLOEXEC
            data, rights, _, _ = connection.recvmsg(_MESSAGE_BYTES, room_bytes, flags)
            break
    fd = array.array("i", rights[0][2])[0] if rights else -1
    try:
        return (_decode(data) if data else None), fd
    except ValueError as error:
        if fd >= 0:
            os.close(fd)
        raise ValueError(f"{process_text(peer(connection)[0])} sent {error}") from None


def _decode(data: bytes) -> dict[str, Any]:
    message: Any = None
    with suppress(ValueError):
        message = parse_json(data)
    if not isinstance(message, dict) or message.get("magic") != MAGIC or "kind" not in message:
        raise ValueError(f"{data[:40]!r}, expected a message of jitkern's pools")
    if message.get("version") != VERSION:
        came = f"a message of protocol version {message.get('version')}"
        raise ValueError(f"{came}, expected {VERSION}: use one version of jitkern in all processes")
    return message
