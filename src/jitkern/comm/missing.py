"""What a guard finds out about ranks that do not come: it asks their boards."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from jitkern.comm.board import Card
from jitkern.comm.report import Found, find_missing, late_error
from jitkern.errors import CommError, CommTimeoutError

# A call ends within its deadline + 5 s, whoever hangs: this is what the error may take of it.
ANSWER_S = 2.0
_NEWS_S = 1.0  # that a broken connection is ahead of what boards tell: a process ends bit by bit
_PAUSE_S = 0.05


class Asking(ABC):
    """The part of a guard that asks; the rest of it has these, and says when it is over."""

    name: str
    rank: int
    size: int
    timeout_s: float
    cards: list[Card]

    @abstractmethod
    def fail(self, error: CommError) -> None:
        """Let no call be made any more."""

    def timed_out(
        self,
        op: str,
        number: int,
        *,
        because: BaseException | None = None,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
        link: str = "",
        links: Mapping[int, Sequence[tuple[str, int]]] | None = None,
        ops: Sequence[str] = (),
    ) -> CommTimeoutError:
        """Ask all ranks where they are, let no call be made any more, and return what to raise.

        It takes 3 s at most, and may be called by any thread.

        Parameters
        ----------
        op, number
            The call.
        because
            What ended it; where that is no TimeoutError, it is said that the call cannot be done.
        timeout_s
            The deadline that has passed, where it is not the guard's.
        ranks
            Those that take part in the call. Default all.
        link
            For a call between two ranks: its name in ``Position.links``, such as
            ``"rank 0 to rank 1"``.
        links
            For a group of such calls: of each rank of them the names, and how many it has to make.
        ops
            Of that call and the next ones, where it may be one of these: the first that a rank has
            not come to.
        """
        if link and ranks:
            links = {rank: [(link, number)] for rank in ranks}
        others = [r for r in links or ranks or range(self.size) if r != self.rank]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        is_late = because is None or isinstance(because, TimeoutError)
        op, number, found = self._find(others, op, number, links or {}, ops, is_late=is_late)
        limit_s = timeout_s if is_late else None
        error = self._late_error(op, number, limit_s, found.why, found.notes, link)
        error.__cause__ = because
        self.fail(error)
        return error

    def broken(
        self,
        op: str,
        number: int,
        trouble: str,
        *,
        ranks: Sequence[int] = (),
        link: str = "",
        links: Mapping[int, Sequence[tuple[str, int]]] | None = None,
        ops: Sequence[str] = (),
    ) -> CommError:
        """Ask all ranks who is gone, as what carries the calls says that it cannot go on.

        Lets no call be made any more, and returns what to raise: a CommTimeoutError that names the
        ranks which have ended, or have left the communicator; where there are none, a CommError
        that says so. It takes 3 s at most, and may be called by any thread.

        Parameters
        ----------
        op, number, ranks, link, links, ops
            As in :meth:`timed_out`; of a call of some ranks all are asked, too.
        trouble
            What it says, without the op.
        """
        if link:
            links = {rank: [(link, number)] for rank in ranks}
        others = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + _NEWS_S
        while True:
            op, number, found = self._find(others, op, number, links or {}, ops, is_late=False)
            if found.is_over or time.monotonic() >= until:
                break
            time.sleep(_PAUSE_S)
        error = CommError(f"{op}: {trouble}")
        if found.is_over and found.why:
            because, notes = error, [*found.notes, trouble]
            error = self._late_error(op, number, None, found.why, notes, link)
            error.__cause__ = because
        else:
            notes = [*found.why.values(), *found.notes] or ["no rank has ended"]
            error = CommError(f"{error}; {'; '.join(notes)}")
        self.fail(error)
        return error

    def _find(
        self,
        others: Sequence[int],
        op: str,
        number: int,
        links: Mapping[int, Sequence[tuple[str, int]]],
        ops: Sequence[str],
        *,
        is_late: bool,
    ) -> tuple[str, int, Found]:
        last = number + max(len(ops) - 1, 0)
        found = find_missing(self.cards, others, op, last, links, ANSWER_S, is_late=is_late)
        if number < found.first <= last:
            op, number = ops[found.first - number], found.first
        return op, number, found

    def _late_error(
        self,
        op: str,
        number: int,
        timeout_s: float | None,
        why: Mapping[int, str],
        notes: Sequence[str] = (),
        link: str = "",
    ) -> CommTimeoutError:
        path = f"from {link} " if link else ""
        where = f"call {number} {path}on rank {self.rank} of {self.size}"
        if number == 0:
            is_set_up = op == self.name
            where = f"{'the set-up on ' if is_set_up else ''}rank {self.rank} of {self.size}"
        return late_error(f"{op}: {where}", timeout_s, why, notes, op, number, self.rank)
