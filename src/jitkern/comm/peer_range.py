"""Addresses for the memory of all ranks, that memory, and the proof that it is what they wrote."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern import unix
from jitkern.errors import UnsupportedError
from jitkern.host import module as host

if TYPE_CHECKING:
    from jitkern.comm.board import Card

HOST_PIECE_BYTES = 2 << 20  # on the CPU, as on the GPUs that there are
_PROOF_BYTES = 512
_INSTEAD = "use init_pynccl's all_reduce between them"


class Range(NamedTuple):
    """The functions of one range in C++, in the order of csrc/comm/peer_memory.cc.

    The range lives as long as one of them, or a view.
    """

    base: Callable[[], int]
    create: Callable[[int, int, bool], int]
    map: Callable[[int, int], None]
    write: Callable[[int, bytes, int, float], None]
    read: Callable[[int, int, int, float], bytes]
    clear: Callable[[int, int, int, float], None]
    view: Callable[[int, int, int], Any]
    release: Callable[[], None]


class Place(NamedTuple):
    """Where a rank's memory lies."""

    rank: int
    ordinal: int  # of the GPU in its process, -1: the CPU
    gpu: str  # as nvidia-smi calls it

    @classmethod
    def of(cls, card: Card) -> Place:
        """Return what a rank has told of itself; see :func:`facts` of peer_setup."""
        return cls(card.rank, card.facts["_ordinal"], card.facts["_gpu"])

    def __str__(self) -> str:
        if self.ordinal < 0:
            return f"the CPU of rank {self.rank}"
        return f"cuda:{self.ordinal} of rank {self.rank} ({self.gpu})"


def piece_bytes(ordinal: int) -> int:
    """Return what memory comes in pieces of; 0: this GPU has none that others can map."""
    return int(host.module()["gpu_granularity"](ordinal)) if ordinal >= 0 else HOST_PIECE_BYTES


def gpu_id(ordinal: int) -> str:
    """Return what nvidia-smi calls a GPU, ``""`` for the CPU."""
    return f"GPU-{uuid.UUID(str(host.module()['gpu_uuid'](ordinal)))}" if ordinal >= 0 else ""


def share_bytes_of(num_bytes: int, pieces: Iterable[tuple[Place, int]]) -> int:
    """Return how much each rank takes, given what the memory of each comes in pieces of.

    Raises
    ------
    UnsupportedError
        One of them has no such memory.
    """
    piece = 1
    for place, of_it in pieces:
        if of_it == 0:
            raise UnsupportedError(
                f"PeerMemory: {place} has no memory that other processes can map, expected virtual "
                "memory management that exports file descriptors, which some virtual machines do "
                f"not have; {_INSTEAD}"
            )
        piece = max(piece, of_it)
    return -(-num_bytes // piece) * piece


def check_reach(mine: Place, places: Iterable[Place]) -> None:
    """Raise UnsupportedError where the driver says that a GPU cannot reach another's memory.

    It is asked of those that this process sees; for the others the mapping is the answer.
    """
    if mine.ordinal < 0:
        return
    module = host.module()
    here = {gpu_id(ordinal): ordinal for ordinal in range(module["device_count"]())}
    for place in places:
        other = here.get(place.gpu)
        if other is None or other == mine.ordinal:
            continue
        if not module["gpu_reaches"](mine.ordinal, other):
            raise unreachable(mine, place, "the driver has no peer access between them")


def unreachable(mine: Place, other: Place, why: str) -> UnsupportedError:
    """Return the error for memory of another rank that cannot be had."""
    return UnsupportedError(
        f"PeerMemory: {mine} cannot address the memory of {other}: {why}; {_INSTEAD}"
    )


# -- a range ---------------------------------------------------------------------------------------


def new_range(size: int, share_bytes: int, ordinals: Iterable[int]) -> Range:
    """Return addresses for `size` shares, for these GPUs of this process, or for the CPU (-1)."""
    gpus = sorted({ordinal for ordinal in ordinals if ordinal >= 0})
    return Range(*host.module()["make_peer_range"](size, share_bytes, gpus))


def new_share(made: Range, place: Place, share_bytes: int, is_exported: bool) -> int:
    """Make the memory of a rank and map it; return its descriptor, -1 where it has none."""
    if place.ordinal >= 0:
        return int(made.create(place.rank, place.ordinal, is_exported))
    fd = unix.make_memory("PeerMemory", "jitkern-peers", share_bytes)
    made.map(place.rank, fd)
    return fd


# -- the proof -------------------------------------------------------------------------------------


class Proof(NamedTuple):
    """What lies at both ends of each share while it is being proven that all see the same.

    Behind the first end there is what each rank has written into the share: that reads are right
    does not say that writes are.
    """

    made: Range
    num_ranks: int
    share_bytes: int
    nonce: str  # the same in all ranks, of this range alone
    timeout_s: float

    def write(self, place: Place) -> None:
        """Zero a rank's memory, of which the driver says nothing, and write this there."""
        if place.ordinal >= 0:
            at = place.rank * self.share_bytes
            self.made.clear(at, self.share_bytes, place.ordinal, self.timeout_s)
        for at in self._ends(place):
            self.made.write(at, self._text(at), place.ordinal, self.timeout_s)

    def check(self, mine: Place, other: Place) -> None:
        """Raise UnsupportedError where one does not find what the other has written."""
        if not all(self._is_right(at, mine) for at in self._ends(other)):
            raise self._wrong(f"{mine} reads in the memory of {other} what was not written there")

    def send(self, mine: Place, other: Place) -> None:
        """Write to the memory of another rank."""
        at = self._sent_at(mine, other)
        self.made.write(at, self._text(at), mine.ordinal, self.timeout_s)

    def receive(self, mine: Place, other: Place) -> None:
        """Raise UnsupportedError where one's own memory has not what the other has sent."""
        if not self._is_right(self._sent_at(other, mine), mine):
            raise self._wrong(f"what {other} writes to the memory of {mine} is not there")

    def clear(self, place: Place) -> None:
        """Leave zeros."""
        first, last = self._ends(place)
        for at, count in ((first, (1 + self.num_ranks) * _PROOF_BYTES), (last, _PROOF_BYTES)):
            self.made.clear(at, count, place.ordinal, self.timeout_s)

    def _is_right(self, at: int, mine: Place) -> bool:
        found = self.made.read(at, _PROOF_BYTES, mine.ordinal, self.timeout_s)
        return bytes(found) == self._text(at)

    def _wrong(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"PeerMemory: peer access gives wrong data: {what}; {_INSTEAD}, and see whether the "
            "IOMMU or PCIe ACS is in the way"
        )

    def _sent_at(self, writer: Place, owner: Place) -> int:
        return owner.rank * self.share_bytes + (1 + writer.rank) * _PROOF_BYTES

    def _ends(self, place: Place) -> tuple[int, int]:
        first = place.rank * self.share_bytes
        return first, first + self.share_bytes - _PROOF_BYTES

    def _text(self, at: int) -> bytes:
        return hashlib.shake_128(f"{self.nonce} {at}".encode()).digest(_PROOF_BYTES)
