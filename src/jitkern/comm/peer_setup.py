"""How the ranks of a PeerMemory come by each other's memory: step by step, all or none of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.comm import peer_range, peer_wire
from jitkern.comm.guard import Guard
from jitkern.comm.peer_range import Place, Proof, Range
from jitkern.errors import CommError, UnsupportedError

if TYPE_CHECKING:
    from jitkern.comm.board import Card

_OWN_PART = 0.8  # of a deadline, that a rank waits itself: so the others hear of it in time
_TOLD_S = 3.0  # for the others to hear of a rank that has waited long enough


def facts(num_bytes: int, ordinal: int) -> dict[str, Any]:
    """Return what all ranks have to have in common, and behind ``_`` what they need not."""
    return {
        "num_bytes": num_bytes,
        "device": "cpu" if ordinal < 0 else "cuda",
        "_piece_bytes": peer_range.piece_bytes(ordinal),
        "_ordinal": ordinal,
        "_gpu": peer_range.gpu_id(ordinal),
        "_machine": _machine(),
        "_network": _network(),
    }


def _machine() -> str:
    """Return what the containers of a machine have in common, though not their names."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _network() -> int:
    """Return what processes have in common that can connect to each other's sockets."""
    return os.stat("/proc/self/ns/net").st_ino


def share_bytes_of(num_bytes: int, cards: list[Card]) -> int:
    """Return how much each rank takes.

    Raises
    ------
    UnsupportedError
        The memory of one of these ranks cannot be mapped by another; the same in all of them.
    """
    machines, networks = _by(cards, "_machine"), _by(cards, "_network")
    if len(machines) > 1:
        came = " and ".join(f"{_ranks(here)} on {here[0].host}" for here in machines)
        raise UnsupportedError(
            f"PeerMemory: {came}, expected all on one host; between hosts use init_pynccl or "
            "TorchCommunicator"
        )
    if len(networks) > 1:
        came = " and ".join(f"{_ranks(here)} in one" for here in networks)
        raise UnsupportedError(
            f"PeerMemory: {len(networks)} network namespaces, expected one: {came} (in Kubernetes "
            "all of one pod, in Docker of one --network)"
        )
    pieces = [(Place.of(card), int(card.facts["_piece_bytes"])) for card in cards]
    return peer_range.share_bytes_of(num_bytes, pieces)


def _by(cards: list[Card], fact: str) -> list[list[Card]]:
    found: dict[Any, list[Card]] = {}
    for card in cards:
        found.setdefault(card.facts[fact], []).append(card)
    return list(found.values())


def _ranks(cards: list[Card]) -> str:
    numbers = ", ".join(str(card.rank) for card in cards)
    return f"rank {numbers} is" if len(cards) == 1 else f"ranks {numbers} are"


def make_range(guard: Guard, share_bytes: int) -> Range:
    """Return the mapped and proven memory of all ranks: collective.

    Raises
    ------
    UnsupportedError, MemoryError, CommError, RuntimeError
        Why not, in all ranks; nothing is left in any.
    """
    places = [Place.of(card) for card in guard.cards]
    mine = places[guard.rank]
    own_s = guard.timeout_s * _OWN_PART
    with ExitStack() as undo:
        fds = peer_wire.Fds()
        undo.callback(fds.close)
        with _together(guard, "make"):
            peer_range.check_reach(mine, places)
            made = peer_range.new_range(guard.size, share_bytes, [mine.ordinal])
            # Not by the last reference to it: who keeps the error would keep that as well.
            undo.push(lambda kind, *_: made.release() if kind is not None else None)
            fds.add(mine.rank, peer_range.new_share(made, mine, share_bytes, True))
            listener = undo.enter_context(peer_wire.Listener())
        names = guard.exchange("listen", listener.name, op=guard.name)
        with _together(guard, "give"):
            peer_wire.give(guard, names, fds[mine.rank], own_s)
        with _together(guard, "take"):
            peer_wire.take(guard, listener, names, fds, own_s)
        with _together(guard, "map"):
            for other, fd in fds.items():
                if other != mine.rank:
                    _map(made, mine, places[other], fd)
        proof = Proof(made, guard.size, share_bytes, names[0], own_s)
        with _together(guard, "write"):
            proof.write(mine)
        with _together(guard, "compare"):
            for place in places:
                proof.check(mine, place)
                proof.send(mine, place)
        with _together(guard, "receive"):
            for place in places:
                proof.receive(mine, place)
        with _together(guard, "clear"):
            proof.clear(mine)
    return made


def _map(made: Range, mine: Place, other: Place, fd: int) -> None:
    try:
        made.map(other.rank, fd)
    except RuntimeError as error:
        why = str(error).removeprefix("jitkern: ")
        if mine.ordinal >= 0:
            why += " (where CUDA_VISIBLE_DEVICES hides that GPU from this process, show it)"
        raise peer_range.unreachable(mine, other, why) from error


@contextmanager
def _together(guard: Guard, step: str) -> Iterator[None]:
    """All ranks do the body, or all raise an error of the same kind: a fallback is for all."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    except BaseException as error:
        guard.fail(CommError(f"PeerMemory: interrupted by {type(error).__name__}"))
        raise
    told = None if failure is None else [type(failure).__name__, str(failure)]
    is_late = isinstance(failure, TimeoutError)  # it has waited for the others already
    try:
        limit_s = _TOLD_S if is_late else guard.timeout_s
        came = guard.exchange(step, told, op=guard.name, timeout_s=limit_s)
    except CommError as error:
        if failure is None:
            raise
        raise failure from error
    if failure is not None:
        raise failure
    for rank, why in came.items():
        if why is not None:
            kind = _KINDS.get(why[0], CommError)
            raise kind(f"PeerMemory: on rank {rank}: {why[1].removeprefix('PeerMemory: ')}")


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UnsupportedError, MemoryError, RuntimeError)
}
