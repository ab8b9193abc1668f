"""A PeerMemory of several devices of one process: made at once, met in by its threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from jitkern.comm import peer_range
from jitkern.comm.peer_range import Place, Proof, Range
from jitkern.errors import CommError, CommTimeoutError


def make_range(num_bytes: int, ordinals: Sequence[int], timeout_s: float) -> tuple[Range, int]:
    """Return mapped and proven memory of each of these GPUs (-1: the CPU), and its share bytes.

    Raises
    ------
    UnsupportedError, MemoryError, RuntimeError
        Why not; nothing is left.
    """
    places = [Place(rank, one, peer_range.gpu_id(one)) for rank, one in enumerate(ordinals)]
    pieces = [(place, peer_range.piece_bytes(place.ordinal)) for place in places]
    share_bytes = peer_range.share_bytes_of(num_bytes, pieces)
    for place in places:
        peer_range.check_reach(place, places)
    made = peer_range.new_range(len(places), share_bytes, ordinals)
    try:
        for place in places:
            fd = peer_range.new_share(made, place, share_bytes, False)
            if fd >= 0:
                os.close(fd)
        proof = Proof(made, len(places), share_bytes, os.urandom(16).hex(), timeout_s)
        for place in places:
            proof.write(place)
        for mine in places:
            for other in places:
                proof.check(mine, other)
                proof.send(mine, other)
        for mine in places:
            for other in places:
                proof.receive(mine, other)
        for place in places:
            proof.clear(place)
    except BaseException:
        made.release()
        raise
    return made, share_bytes


class Threads:
    """Where the ranks of one process wait for each other, each in a thread of its own."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all of the following
        self._here: set[int] = set()
        self._number = 1  # of the barrier that they come to
        self._ended: str | None = None

    def barrier(self, rank: int, timeout_s: float | None) -> None:
        """Return when all have come.

        Raises
        ------
        CommTimeoutError
            Not all came in time; it names them. No later one succeeds.
        CommError
            One failed before, or a rank has closed its memory.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with self._changed:
            self._check()
            number = self._number
            if rank in self._here:
                raise CommError(f"barrier: rank {rank} waits already, expected one thread of it")
            self._here.add(rank)
            if len(self._here) == self._size:
                self._here.clear()
                self._number += 1
                self._changed.notify_all()
            while self._number == number:
                self._check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._late(rank, number, limit_s)
                self._changed.wait(left_s)

    def close(self, rank: int) -> None:
        """Let no barrier be met any more."""
        self._end(f"rank {rank} has closed its memory")

    def _end(self, why: str) -> None:
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()

    def _check(self) -> None:
        if self._ended is not None:
            raise CommError(f"barrier: PeerMemory: {self._ended}; make a new one")

    def _late(self, rank: int, number: int, limit_s: float) -> CommTimeoutError:
        missing = [one for one in range(self._size) if one not in self._here]
        who = ", ".join(f"rank {one}" for one in missing)
        self._end(f"{who} did not come to barrier {number}")
        return CommTimeoutError(
            f"barrier: call {number} on rank {rank} of {self._size}: {who} did not come within "
            f"{limit_s:g} s, expected a thread for each",
            op="barrier",
            number=number,
            rank=rank,
            missing=missing,
        )
