"""What every communicator shares: how its ranks meet, and who is missing when a call is late."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jitkern
from jitkern.comm.again import OldBoards
from jitkern.comm.args import seconds_arg
from jitkern.comm.board import Board, Card, SilentError, ask, weakly
from jitkern.comm.meeting import check_group, compare_facts, meet
from jitkern.comm.missing import ANSWER_S, Asking
from jitkern.comm.report import ask_each, reason, short, table
from jitkern.env import settings
from jitkern.errors import CommError, CommMismatchError

_WAIT_S = 1.0  # how long a board holds a request back, so that others' failures are noticed


class Position(NamedTuple):
    """Where a rank is, for the ranks that wait for it.

    Attributes
    ----------
    issued
        How many calls it has made, the one it is in included.
    completed
        How many of them are known to be done.
    op
        The last one's.
    links
        For calls between two ranks, which are not counted above: how many were made, by a name
        that both give the pair.
    """

    issued: int
    completed: int
    op: str
    links: Mapping[str, int] = {}  # nobody writes to it


class Guard(Asking):
    """The ranks of one communicator: who they are, where each is, and whether it can be used.

    Making one is collective: all ranks meet, or each that is alive raises within the deadline.

    Parameters
    ----------
    name
        What messages begin with, such as ``"init_pynccl"``.
    group
        A group of torch.distributed with a backend for the CPU, None for the default one, or a
        ``torch.distributed.Store``.
    rank
        This process's number, that in `group`.
    size
        How many ranks there are, as in `group`.
    timeout_s
        Seconds that each call, and this one, waits for other ranks.
    position
        Says where this rank is. It is called by other threads at any time, and must not wait; a
        bound method's object is not kept alive by it.
    facts
        What all ranks must have in common, as JSON values; a key that begins with ``_`` is this
        rank's own, and only shown to the others, in :attr:`cards`.

    Attributes
    ----------
    rank, size : int
        As given.
    timeout_s : float
        As given.
    cards : list of Card
        What each rank has told, by rank.
    is_debug : bool
        Whether ranks compare each call first, which is what :meth:`compare` is for.

    Raises
    ------
    CommTimeoutError
        Ranks did not come, or have ended.
    CommError
        Two processes are one rank; the ranks differ in a fact; torch.distributed is not there.
    TypeError, ValueError
        An argument makes no sense.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        position: Callable[[], Position],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        timeout_s = seconds_arg(name, timeout_s)
        check_group(name, group, rank, size)
        self.name: str = name
        self.rank: int = rank
        self.size: int = size
        self.timeout_s: float = timeout_s
        self.is_debug: bool = settings().comm_debug
        self._ended: str | None = None  # why it cannot be used any more
        self._lock = threading.Lock()  # guards the line above, and the next
        self._times: dict[str, int] = {}  # how often each key was exchanged
        # Weak: the board's threads live on, and would keep the communicator.
        self._position = weakly(position, Position(0, 0, ""))
        self._board = Board(weakly(self._state, {}))
        # What this rank told is lost when it ends.
        self.wait_read: Callable[..., None] = self._board.wait_read
        weakref.finalize(self, self._board.drop).atexit = False
        deadline = time.monotonic() + timeout_s
        try:
            common = {"jitkern": jitkern.__version__, "size": size}
            common["JITKERN_COMM_DEBUG"] = int(self.is_debug)
            mine = self._board.card(
                rank, {**common, **(facts or {})}, seen_from=getattr(group, "host", None)
            )
            self.cards: list[Card] = meet(name, group, mine, size, timeout_s)
            # A card may be that of a process that has ended, and in a store of an earlier run.
            left_s = max(deadline - time.monotonic(), _WAIT_S)
            self.exchange("meet", None, op=name, timeout_s=left_s)
            wrong = compare_facts(name, self.cards)
            if wrong is not None:
                self._board.wait_read()
                raise wrong
        except BaseException as error:
            self._end(f"failed: {short(error)}")
            raise
        _alive.add(self)

    # -- whether it can be used --------------------------------------------------------------------

    def check(self, op: str) -> None:
        """Raise CommError where an earlier call has failed, or this has been closed."""
        if self._ended is not None:
            text = f"this rank has {self._ended}"
            raise CommError(f"{op}: {self.name}: {text}; make a new one in all ranks")

    def fail(self, error: CommError) -> None:
        """Let no call be made any more. The first error is the one that is quoted."""
        self._end(f"failed: {short(error)}")

    def close(self, why: str) -> None:
        """Let no call be made any more, since this rank has ``"closed"`` or ``"aborted"`` it.

        Other ranks are told so for as long as the process lives.
        """
        self._end(f"{why} it")

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = why
        self._board.wake()

    def _state(self) -> dict[str, Any]:
        """Return what the board says at once to whoever asks. Takes no lock."""
        issued, completed, op, links = self._position()
        state = {"issued": issued, "completed": completed, "op": op, "links": dict(links)}
        if self._ended is not None:
            state["ended"] = self._ended
        return state

    # -- what ranks tell each other ----------------------------------------------------------------

    def exchange(
        self,
        key: str,
        value: Any,
        *,
        op: str = "",
        number: int = 0,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """Tell other ranks a value, and return theirs, each by its rank: collective.

        Parameters
        ----------
        key
            Equal in all these ranks; it may be used again.
        value
            Of JSON.
        op, number
            The call that this is a part of, for the error.
        ranks
            Those that take part, this one among them. Default all.
        timeout_s
            Instead of the guard's.

        Raises
        ------
        CommTimeoutError
            A value did not come in time, or will not: the rank has ended, failed, or closed.
        """
        op = op or key
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        ranks = sorted(range(self.size) if ranks is None else ranks)
        others = [rank for rank in ranks if rank != self.rank]
        values = {self.rank: value}
        if not others:
            return values
        if len(ranks) < self.size:
            key = f"{key} of {ranks}"
        with self._lock:
            self._times[key] = time_no = self._times.get(key, 0) + 1
        key = f"{key} #{time_no}"
        self._board.post(key, value, len(others))
        why: dict[int, str] = {}

        def take(rank: int) -> dict[str, Any]:
            request = {"key": key, "reader": self.rank}
            while True:
                left_s = 0.0 if why else max(deadline - time.monotonic(), 0.0)
                wait_s = min(left_s, _WAIT_S)
                try:
                    answer = ask(self.cards[rank], {**request, "wait_s": wait_s}, wait_s + ANSWER_S)
                except SilentError:  # it may only be slow, and has until the deadline
                    if why or time.monotonic() >= deadline:
                        raise
                else:
                    if left_s == 0 or "value" in answer or "ended" in answer:
                        return answer

        is_late = False
        for rank, answer in ask_each(others, take):
            if "value" in answer:
                values[rank] = answer["value"]
            else:
                is_late = time.monotonic() >= deadline if not why else is_late
                why[rank] = reason(self.cards[rank], answer, number)
        if why:
            error = self._late_error(op, number, timeout_s if is_late else None, why)
            self.fail(error)
            raise error
        return {rank: values[rank] for rank in ranks}

    def compare(
        self,
        op: str,
        number: int,
        signature: Mapping[str, str],
        *,
        ranks: Sequence[int] | None = None,
        link: str = "",
    ) -> dict[int, dict[str, str]]:
        """Raise in all ranks where one of them makes another call than the others: collective.

        Parameters
        ----------
        op, number
            The call.
        signature
            What there is to say of it; a key that begins with ``_`` may differ between ranks.
        ranks
            As in :meth:`exchange`.
        link
            For a call between two ranks, whose ops differ: as in :meth:`timed_out`.

        Returns
        -------
        dict
            What each rank has said, for what only the caller can compare; see :meth:`mismatch`.

        Raises
        ------
        CommMismatchError
            They differ; it is a table of who said what.
        CommTimeoutError
            A rank did not come.
        """
        mine = [op, number, [list(item) for item in signature.items()]]
        came = self.exchange(link or "call", mine, op=op, number=number, ranks=ranks)
        calls = {rank: str(one[0]) for rank, one in came.items()}
        said = {rank: {str(k): str(v) for k, v in one[2]} for rank, one in came.items()}
        common = set()
        for rank, one in came.items():
            parts = [part for part in said[rank].items() if not part[0].startswith("_")]
            common.add(("" if link else one[0], one[1], *parts))
        if len(common) > 1:
            raise self.mismatch(op, number, said, calls)
        return said

    def mismatch(
        self,
        op: str,
        number: int,
        said: Mapping[int, Mapping[str, str]],
        calls: Mapping[int, str] | None = None,
    ) -> CommMismatchError:
        """Return the error with its table, and let no call be made any more."""
        rows = [
            [f"rank {rank}", (calls or {}).get(rank, op)]
            + [f"{key.lstrip('_')}={value}" for key, value in signature.items()]
            for rank, signature in sorted(said.items())
        ]
        error = CommMismatchError(
            f"{op}: call {number} on rank {self.rank} of {self.size}: ranks make different calls, "
            f"expected the same; nothing was sent:\n{table(rows)}"
        )
        self.fail(error)
        # This process is likely to end of it: others are to see the table as well.
        self._board.wait_read()
        return error

    def among(self, name: str, ranks: Sequence[int], **kwargs: Any) -> Guard:
        """Return a guard of some ranks, this one among them: collective, also when this has ended.

        They meet over their boards, as the group may work no more. The rest is as in making one.
        """
        group = OldBoards(self.cards, self._board, self.rank, ranks)
        return Guard(name, group, group.ranks.index(self.rank), len(ranks), **kwargs)


# -- forks -----------------------------------------------------------------------------------------

_alive: weakref.WeakSet[Guard] = weakref.WeakSet()


def _end_in_child() -> None:
    for guard in list(_alive):
        guard._ended = "been forked: this process is a child of the one that made it"


os.register_at_fork(after_in_child=_end_in_child)
