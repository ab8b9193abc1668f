"""What the processes of a shared pool say to each other, and how they come by its memory."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jitkern import unix
from jitkern.errors import ShareError
from jitkern.unix import peer as peer
from jitkern.unix import process_text as process_text

_PROTOCOL = unix.Protocol("jitkern-pool", 1, "jitkern's pools")
MAGIC = _PROTOCOL.magic

send: Callable[..., None] = _PROTOCOL.send
receive: Callable[[socket.socket], dict[str, Any] | None] = _PROTOCOL.receive
_address = _PROTOCOL.address
_new_socket = unix.new_socket


def make_memory(name: str, num_bytes: int) -> int:
    """Return the descriptor of `num_bytes` of zeros that nobody can make fewer or more."""
    return unix.make_memory("PinnedPool: share", f"{MAGIC}-{name}", num_bytes)


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
    message, fd = _PROTOCOL.receive_fd(connection)
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
