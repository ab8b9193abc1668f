"""File descriptors that the ranks of a host send to each other."""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from jitkern.comm.rendezvous import Rendezvous
from jitkern.errors import CommError, CommTimeoutError

OWN_PART = 0.8  # the part of a deadline that a rank itself waits: then others hear of it in time


class Descriptors(dict[int, int]):
    """Open descriptors by rank, closed at the end of ``with``; mappings keep their memory."""

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.values():
            os.close(fd)
        self.clear()


def hand_over(met: Rendezvous, fds: Descriptors, givers: Sequence[int]) -> None:
    """Have each of `givers` send its descriptor to all ranks, which add it to their `fds`.

    They go over abstract Unix sockets, whose names every user sees. So both ends check the peer's
    uid, which the kernel tells. Raises CommError on all ranks if a rank belongs to another user,
    has failed or ended, or sent nothing in time.
    """
    ends: dict[int, socket.socket] = {}
    with ExitStack() as sockets:

        def new_socket() -> socket.socket:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            end.settimeout(met.timeout_s * OWN_PART)
            return sockets.enter_context(end)

        listener, name = new_socket(), f"\0jitkern-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen()
        names = met.exchange("listen", name, str)

        def connect() -> None:
            for giver in givers:
                if giver == met.rank:
                    continue
                end = ends[giver] = new_socket()
                with suppress(ConnectionRefusedError):  # the peer has left: all_or_none says why
                    end.connect(names[giver])
                    if (uid := peer_uid(end)) != os.geteuid():
                        text = f"{met.peers[giver]} is of uid {uid}, expected uid {os.geteuid()}"
                        raise CommError(f"{met.name}: {text} as this process")

        def take() -> None:
            num_left = met.world_size - 1 if met.rank in givers else 0
            while num_left:  # all have connected: this does not block
                with listener.accept()[0] as end:
                    if peer_uid(end) == os.geteuid():
                        num_left -= 1
                        with suppress(OSError):  # the peer has ended: all_or_none says so
                            socket.send_fds(end, [b"fd"], [fds[met.rank]])
            for giver, end in ends.items():
                fds[giver] = _receive(met, giver, end)

        met.all_or_none("connect", connect)
        met.all_or_none("take", take)


def peer_uid(end: socket.socket) -> int:
    """Return the effective uid of the process at the other end; the kernel tells it."""
    layout = "iII"
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    uid: int = struct.unpack(layout, raw)[1]
    return uid


def _receive(met: Rendezvous, giver: int, end: socket.socket) -> int:
    """Return the descriptor that a rank has sent."""
    room = socket.CMSG_LEN(array.array("i").itemsize)
    try:  # not socket.recv_fds, which ignores its flags
        _, rights, _, _ = end.recvmsg(2, room, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        rights = []
    if not rights:  # another process of this user may have taken it
        text = f"{met.name}: {met.peers[giver]} did not send its memory"
        raise CommTimeoutError(text, op=met.name, number=0, rank=met.rank, missing=[giver])
    return array.array("i", rights[0][2])[0]
