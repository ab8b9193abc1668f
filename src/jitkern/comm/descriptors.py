"""Open files that ranks of a host hand to each other."""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from jitkern.comm.rendezvous import Rendezvous
from jitkern.errors import CommError, CommTimeoutError

OWN_PART = 0.8  # of a deadline: how long a rank itself waits, so that the others hear of it in time
_BACKLOG = 128


class Descriptors(dict[int, int]):
    """Open descriptors by rank, closed at the end of ``with``; mappings keep their memory."""

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.values():
            os.close(fd)
        self.clear()


def hand_over(met: Rendezvous, fds: Descriptors, givers: Sequence[int]) -> None:
    """Have each of `givers` send its descriptor to all ranks, which find it in their `fds`.

    They go over abstract Unix sockets, whose names every user sees. So both ends check the peer's
    uid, which the kernel knows. Raises CommError on all ranks if a rank belongs to another user,
    has failed or ended, or sent nothing in time.
    """
    deadline = time.monotonic() + met.timeout_s * OWN_PART
    name = f"\0jitkern-{secrets.token_hex(16)}"
    with _socket() as listener:
        listener.bind(name)
        listener.listen(_BACKLOG)
        names = met.exchange("listen", name)

        def give() -> None:
            for step in range(1, met.size if met.rank in givers else 1):
                other = (met.rank + step) % met.size
                _give(met, other, names[other], fds[met.rank], deadline)

        def take() -> None:
            while missing := [one for one in givers if one not in fds]:
                try:
                    listener.settimeout(_left(deadline))
                    with listener.accept()[0] as end:
                        end.settimeout(_left(deadline))
                        _take(end, missing, fds)
                except TimeoutError:
                    raise _late(met, missing, "did not send its memory in time") from None

        met.all_or_none("give", give)
        met.all_or_none("take", take)


def peer_uid(end: socket.socket) -> int:
    """Return the effective uid of the process at the other end, as the kernel knows it."""
    layout = "iII"
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    uid: int = struct.unpack(layout, raw)[1]
    return uid


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _give(met: Rendezvous, other: int, name: str, fd: int, deadline: float) -> None:
    with _socket() as end:
        end.settimeout(_left(deadline))
        try:
            end.connect(name)
        except (BlockingIOError, ConnectionRefusedError) as error:  # its backlog is full; it ended
            raise _late(met, [other], f"takes no memory: {error.strerror}") from None
        uid = peer_uid(end)
        if uid != os.geteuid():
            text = f"{met.peers[other]} is of uid {uid}, expected uid {os.geteuid()}"
            raise CommError(f"{met.name}: {text} as this process")
        socket.send_fds(end, [str(met.rank).encode()], [fd])


def _take(end: socket.socket, missing: Sequence[int], fds: Descriptors) -> None:
    """Take the descriptor of a rank that is missing; drop what strangers send."""
    if peer_uid(end) != os.geteuid():
        return
    try:  # not socket.recv_fds, which ignores its flags
        room = socket.CMSG_LEN(array.array("i").itemsize)
        data, rights, _, _ = end.recvmsg(64, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return
    if rights:
        fd = array.array("i", rights[0][2])[0]
        ranks = [one for one in missing if str(one).encode() == data]
        if ranks:
            fds[ranks[0]] = fd
        else:
            os.close(fd)


def _late(met: Rendezvous, missing: list[int], what: str) -> CommTimeoutError:
    who = ", ".join(str(met.peers[one]) for one in missing)
    text = f"{met.name}: {who} {what}"
    return CommTimeoutError(text, op=met.name, number=0, rank=met.rank, missing=missing)
