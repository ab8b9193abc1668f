"""Descriptors of memory, from each rank of a host to each other one."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import ItemsView
from typing import TYPE_CHECKING, Any

from jitkern import unix
from jitkern.errors import CommError, CommTimeoutError

if TYPE_CHECKING:
    from jitkern.comm.guard import Guard

_PROTOCOL = unix.Protocol("jitkern-peers", 1, "jitkern's peer memory")
_STRANGERS = 64  # that may knock as well
_PAUSE_S = 0.01


class Fds:
    """Open descriptors, one for each rank."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._fds

    def __getitem__(self, rank: int) -> int:
        return self._fds[rank]

    def add(self, rank: int, fd: int) -> None:
        """Take a descriptor over."""
        self._fds[rank] = fd

    def items(self) -> ItemsView[int, int]:
        """Return all of them, with their ranks."""
        return self._fds.items()

    def close(self) -> None:
        """Close all: a mapping keeps its memory itself."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


class Listener:
    """Where a rank takes what others send, under a name that nobody guesses.

    Attributes
    ----------
    name : str
    socket : socket.socket
    """

    def __init__(self) -> None:
        self.name: str = secrets.token_hex(16)
        self.socket: socket.socket = unix.new_socket()
        try:
            self.socket.bind(_PROTOCOL.address(self.name))
            self.socket.listen(_STRANGERS * 2)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def give(guard: Guard, names: dict[int, str], fd: int, timeout_s: float) -> None:
    """Send a descriptor to all other ranks: it waits at their listeners.

    Raises
    ------
    CommError
        One has ended, or is another user's, or nothing can be sent to it in time.
    """
    deadline = time.monotonic() + timeout_s
    for step in range(1, guard.size):
        _give(guard, (guard.rank + step) % guard.size, names, fd, deadline)


def take(
    guard: Guard, listener: Listener, names: dict[int, str], fds: Fds, timeout_s: float
) -> None:
    """Take what all others have sent.

    Raises
    ------
    CommTimeoutError
        Some have sent nothing.
    """
    deadline = time.monotonic() + timeout_s
    while len(missing := [rank for rank in range(guard.size) if rank not in fds]) > 0:
        listener.socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            with listener.socket.accept()[0] as connection:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                _take(connection, names, missing, fds)
        except TimeoutError:
            who = ", ".join(str(guard.cards[rank]) for rank in missing)
            what = f"{who} did not send its memory within {timeout_s:g} s"
            raise _late(guard, what, missing) from None


def _late(guard: Guard, what: str, missing: list[int]) -> CommTimeoutError:
    found: dict[str, Any] = {"op": "PeerMemory", "number": 0, "rank": guard.rank}
    return CommTimeoutError(f"PeerMemory: {what}", missing=missing, **found)


def _give(guard: Guard, other: int, names: dict[int, str], fd: int, deadline: float) -> None:
    while True:
        with unix.new_socket() as connection:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection.connect(_PROTOCOL.address(names[other]))
            except BlockingIOError:  # strangers crowd there
                if time.monotonic() > deadline:
                    what = f"{guard.cards[other]} did not take this rank's memory in time"
                    raise _late(guard, what, [other]) from None
                time.sleep(_PAUSE_S)
                continue
            except ConnectionRefusedError:
                text = f"PeerMemory: {guard.cards[other]} takes no memory: it has failed, or ended"
                raise CommError(text) from None
            _, uid = unix.peer(connection)
            if uid != os.geteuid():
                text = f"{guard.cards[other]} is of uid {uid}, expected uid {os.geteuid()}"
                raise CommError(f"PeerMemory: {text} as this process")
            # Its own name says to the other that this is no stranger.
            _PROTOCOL.send(connection, "memory", fd=fd, rank=guard.rank, name=names[guard.rank])
            return


def _take(connection: socket.socket, names: dict[int, str], missing: list[int], fds: Fds) -> None:
    """Take a descriptor; what strangers send is dropped."""
    if unix.peer(connection)[1] != os.geteuid():
        return
    try:
        message, fd = _PROTOCOL.receive_fd(connection)
    except ValueError:
        return
    if fd < 0:
        return
    rank = (message or {}).get("rank")
    if rank in missing and (message or {}).get("name") == names[rank]:
        fds.add(rank, fd)
    else:
        os.close(fd)
