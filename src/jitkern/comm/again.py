"""How some ranks of a communicator that has ended meet again: over its boards, without a group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jitkern.comm.board import Board, Card, SilentError, ask
from jitkern.comm.report import ask_each, late_error, table
from jitkern.errors import CommError

_KEY = "among"
_WAIT_S = 1.0  # that a board holds a request back; one that has ended answers at once
_ANSWER_S = 2.0
_PAUSE_S = 0.05
_GRACE_S = 1.0  # when one is known to be missing: for those that are on their way


class OldBoards:
    """Ranks of a guard, which take the place of a group for a new one.

    Parameters
    ----------
    cards
        All ranks of the old guard.
    board
        The old one of this rank.
    rank
        This rank's number there.
    ranks
        Those that meet, by their numbers there, in the order of their new numbers.
    """

    def __init__(self, cards: Sequence[Card], board: Board, rank: int, ranks: Sequence[int]):
        self._cards, self._board, self._rank = cards, board, rank
        self.ranks: list[int] = list(ranks)

    def meet(
        self,
        name: str,
        _group: object,
        rank: int,
        _size: int,
        deadline: float,
        came: dict[int, bytes],
        _why: dict[int, str],
    ) -> None:
        """Exchange cards; a rank that has ended its communicator may come until the deadline.

        Raises
        ------
        CommTimeoutError
            Ranks did not come; it names them by their old numbers.
        CommError
            They were called with other lists of ranks.
        """
        timeout_s = deadline - time.monotonic()
        others = [one for one in self.ranks if one != self._rank]
        mine = {"ranks": self.ranks, "card": came[rank].decode()}
        self._board.post(_KEY, mine, len(others))
        why: dict[int, str] = {}

        def take(one: int) -> dict[str, Any]:
            limit = deadline
            while True:
                if why:
                    limit = min(limit, time.monotonic() + _GRACE_S)
                wait_s = min(max(limit - time.monotonic(), 0.0), _WAIT_S)
                try:
                    request = {"key": _KEY, "reader": self._rank, "wait_s": wait_s}
                    answer = ask(self._cards[one], request, wait_s + _ANSWER_S)
                except SilentError:
                    if wait_s == 0:
                        raise
                else:
                    if answer.get("value") is not None or wait_s == 0:
                        return answer
                time.sleep(min(_PAUSE_S, wait_s))

        lists = {self._rank: self.ranks}
        for one, answer in ask_each(others, take):
            value = answer.get("value")
            if value is None:
                why[one] = f"{self._cards[one]} {answer.get('silence', 'has not come to it')}"
                continue
            lists[one] = value["ranks"]
            if one in self.ranks:
                came[self.ranks.index(one)] = value["card"].encode()
        if any(given != self.ranks for given in lists.values()):
            rows = [(str(self._cards[one]), str(given)) for one, given in sorted(lists.items())]
            self._board.wait_read()
            raise CommError(f"{name}: ranks stay together with others, expected the same ranks in "
                            f"all of them:\n{table(rows)}")  # fmt: skip
        if why:
            self._board.post(_KEY, None, len(others))  # not to be found by who comes too late
            where = f"{name}: rank {self._rank} of {len(self._cards)}"
            is_late = time.monotonic() >= deadline
            raise late_error(where, timeout_s if is_late else None, why, (), name, 0, self._rank)
