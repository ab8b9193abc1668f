"""How ranks come by each other's cards: over a process group, or over a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from jitkern.comm.again import OldBoards
from jitkern.comm.board import Card, ask
from jitkern.comm.report import ask_each, late_error, reason, short, table
from jitkern.errors import CommError
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_CARD_BYTES = 8192
_TAG = 0x6A69746B  # "jitk": not taken for a message of the user's over the same group
_POLL_S = 0.01, 0.2
_GRACE_S = 1.0  # when one is known to be missing: for the cards that are on their way
_SOON_S = 0.001  # to look at what has come already; 0 would mean for ever


def check_group(name: str, group: Any, rank: int, size: int) -> None:
    """Raise where this process is not that rank of the group, or cards cannot go over it.

    Raises
    ------
    TypeError
        `group` is neither a group nor a store, or a number is none.
    ValueError
        `rank` or `size` is not possible, or not that of the group; it has no backend for the CPU.
    CommError
        torch.distributed is not initialised.
    """
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import Store

    for argument, value in (("rank", rank), ("size", size)):
        if type(value) is not int:
            raise TypeError(f"{name}: {argument}: {type_text(value)}, expected an int")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"{name}: rank {rank} of size {size}, expected 0 <= rank < size")
    if isinstance(group, (Store, OldBoards)):
        return
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: group: this process is not in it, expected one of its ranks")
        came = type(group).__name__
        raise TypeError(f"{name}: group: {came}, expected a ProcessGroup, a Store or None")
    if not dist.is_available() or not dist.is_initialized():
        what_to_do = "call torch.distributed.init_process_group() first"
        raise CommError(f"{name}: group: torch.distributed is not initialised; {what_to_do}")
    own = dist.get_rank(group), dist.get_world_size(group)
    if own[0] < 0:
        raise ValueError(f"{name}: group: this process is not in it, expected one of its ranks")
    if own != (rank, size):
        came = f"rank {rank} of size {size}"
        raise ValueError(f"{name}: {came}, expected rank {own[0]} of size {own[1]} as in the group")
    config = str(dist.get_backend_config(group))
    if "cpu:" not in config:
        what_to_do = "give a gloo group: torch.distributed.new_group(backend='gloo')"
        raise ValueError(
            f"{name}: group: of {config}, expected a backend for the CPU; {what_to_do}"
        )


def meet(name: str, group: Any, mine: Card, size: int, timeout_s: float) -> list[Card]:
    """Return the cards of all ranks, by rank: collective.

    Raises
    ------
    CommTimeoutError
        Ranks did not come, or have ended; it names them.
    CommError
        Two processes are one rank, or one is of another version of jitkern.
    ValueError
        A card is too large.
    """
    from torch.distributed.distributed_c10d import Store

    raw = mine.to_bytes()
    if len(raw) > _CARD_BYTES:
        raise ValueError(f"{name}: facts: {len(raw)} bytes, expected at most {_CARD_BYTES}")
    over: Callable[..., None] = _over_store if isinstance(group, Store) else _over_group
    if isinstance(group, OldBoards):
        over = group.meet
    came: dict[int, bytes] = {mine.rank: raw}
    why: dict[int, str] = {}
    failure: list[BaseException] = []

    def work() -> None:
        try:
            over(name, group, mine.rank, size, time.monotonic() + timeout_s, came, why)
        except BaseException as error:
            failure.append(error)

    start = time.monotonic()
    # Not in this thread: a store whose server is stopped would keep it beyond any deadline.
    thread = threading.Thread(target=work, name="jitkern-meet", daemon=True)
    thread.start()
    thread.join(timeout_s + _GRACE_S)
    if failure:
        raise failure[0]
    missing = [rank for rank in range(size) if rank not in came or rank in why]
    if missing:
        is_late = time.monotonic() - start >= timeout_s
        default = "did not come, or the store hangs" if thread.is_alive() else "did not come"
        reasons = {rank: f"rank {rank} {why.get(rank, default)}" for rank in missing}
        # Who has come may have ended since.
        others = [rank for rank in range(size) if rank not in (*missing, mine.rank)]
        cards = {rank: _read_card(name, rank, came[rank]) for rank in others}
        for rank, answer in ask_each(others, lambda rank: ask(cards[rank], {}, _GRACE_S)):
            if "silence" in answer:
                reasons[rank] = reason(cards[rank], answer, 0)
        where = f"{name}: the set-up on rank {mine.rank} of {size}"
        raise late_error(where, timeout_s if is_late else None, reasons, (), name, 0, mine.rank)
    return [_read_card(name, rank, came[rank]) for rank in range(size)]


def compare_facts(name: str, cards: list[Card]) -> CommError | None:
    """Return the error, with a table, where ranks differ in a fact that all are to share."""
    keys = sorted({key for card in cards for key in card.facts if not key.startswith("_")})
    for key in keys:
        if any(card.facts.get(key) != cards[0].facts.get(key) for card in cards):
            rows = table([(str(card), str(card.facts.get(key))) for card in cards])
            return CommError(f"{name}: {key}: differs, expected the same in all ranks:\n{rows}")
    return None


def _read_card(name: str, rank: int, raw: bytes) -> Card:
    try:
        card = Card.from_bytes(raw)
    except ValueError as error:
        what_to_do = "use one version of jitkern in all processes"
        raise CommError(f"{name}: rank {rank} sent {error}; {what_to_do}") from None
    if card.rank != rank:
        raise CommError(f"{name}: {card} came as rank {rank}, expected the same number")
    return card


# -- over a process group --------------------------------------------------------------------------


def _over_group(
    name: str,
    group: ProcessGroup | None,
    rank: int,
    size: int,
    deadline: float,
    came: dict[int, bytes],
    why: dict[int, str],
) -> None:
    """Send our card to every other rank and receive theirs: an all_gather would name nobody."""
    import torch
    from torch import distributed as dist

    others = [other for other in range(size) if other != rank]
    mine = _padded(came[rank])
    cards = {other: torch.zeros(_CARD_BYTES, dtype=torch.uint8) for other in others}
    waits: list[tuple[int, Callable[[timedelta], object]]] = []
    for call, tensors in ((dist.irecv, cards), (dist.isend, dict.fromkeys(others, mine))):
        for other in others:
            world_rank = other if group is None else dist.get_global_rank(group, other)
            try:
                work = call(tensors[other], world_rank, group=group, tag=_TAG)
            except RuntimeError as error:  # its end of the connection is closed
                why.setdefault(other, _broken(error))
            else:
                waits.append((other, work.wait))  # type: ignore[union-attr]  # we are in the group
    # All cards first: what is sent is done when the other rank has taken it.
    for other, wait in waits:
        left_s = deadline - time.monotonic()
        if why:
            left_s = min(left_s, _GRACE_S)
        try:
            wait(timedelta(seconds=max(left_s, _SOON_S)))
        except RuntimeError as error:
            timed_out = time.monotonic() >= deadline or "imed out" in str(error)
            why.setdefault(other, "had not come" if timed_out else _broken(error))
    came.update({other: bytes(card.tolist()) for other, card in cards.items() if other not in why})
    came.update({other: raw.rstrip(b"\0") for other, raw in came.items()})


def _padded(raw: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(raw.ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8)


def _broken(error: RuntimeError) -> str:
    return f"has ended, or gave up: the group's connection to it is closed ({short(error)})"


# -- over a store ----------------------------------------------------------------------------------


def _over_store(
    name: str,
    store: Store,
    rank: int,
    size: int,
    deadline: float,
    came: dict[int, bytes],
    why: dict[int, str],
) -> None:
    """Post our card and wait for the others'; polled, since Store.wait() prints when it is over."""
    try:
        first = store.compare_set(f"card/{rank}", "", came[rank].decode())
        if first != came[rank]:
            text = (
                f"{name}: two processes are rank {rank}: {_read_card(name, rank, first)} and "
                f"{_read_card(name, rank, came[rank])}, expected one; if this is the second "
                "communicator over this store, give it a PrefixStore of its own"
            )
            store.set("trouble", text)  # the others wait for a rank that this process was to be
            raise CommError(text)
        _collect(store, size, deadline, came)
    except RuntimeError as error:
        gone = f"did not come: the store has failed, its server may have ended ({short(error)})"
        why.update({other: gone for other in range(size) if other not in came})


def _collect(store: Store, size: int, deadline: float, came: dict[int, bytes]) -> None:
    pause_s, most_s = _POLL_S
    while len(came) < size:
        missing = [other for other in range(size) if other not in came]
        is_over = time.monotonic() >= deadline
        # The first that is missing; when time is over, those behind it are there perhaps.
        for other in missing if is_over else missing[:1]:
            if store.check([f"card/{other}"]):
                came[other] = store.get(f"card/{other}")
        if is_over:
            return
        if missing[0] not in came:
            if store.check(["trouble"]):
                raise CommError(store.get("trouble").decode())
            time.sleep(min(pause_s, max(deadline - time.monotonic(), 0)))
            pause_s = min(2 * pause_s, most_s)
