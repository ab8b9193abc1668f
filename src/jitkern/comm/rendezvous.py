"""How ranks meet: values exchanged, steps made by all or none, and who is missing, over a store.

The store is one of ``torch.distributed``: that of the ranks' group, or one that is given. It has a
few keys for each rank and is asked by polling, in threads of their own: a store whose server hangs
would keep the caller beyond any deadline. What ranks of this machine do is read in ``/proc``, too.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jitkern
from jitkern.comm.args import seconds_arg
from jitkern.errors import CommError, CommTimeoutError, UnsupportedError
from jitkern.fs import ForkLocal, canonical_json, parse_json
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_POLL_S = 0.0005, 0.05  # at first, and at most
_LOOK_S = 0.25  # between two looks whether a rank asks where this one is
_ANSWER_S = 2.0  # for them to say so: a call ends within its deadline + 5 s, whoever hangs
_NEWS_S = 1.0  # that a broken connection is ahead of other news: a process ends bit by bit
_LEAVE_S = 1.0  # that a store gets to hear of an end
_REASON_CHARS = 240  # errors quote each other
_PLACE = re.compile(r"^\[\S+:\d+\] ")  # file and line of gloo's source
_STEP_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UnsupportedError, MemoryError, RuntimeError)
}


def call_with_timeout(function: Callable[[], T], timeout_s: float) -> T:
    """Call it in a thread of its own; TimeoutError where it is not over in time, and goes on."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="jitkern-comm-call", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends
        run()
    else:
        thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if not outcome:
        raise TimeoutError(f"not over within {timeout_s:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def short(error: BaseException) -> str:
    """Return what the first line of an error says, cut: others will quote it."""
    line = (str(error).splitlines() or [repr(error)])[0].rstrip(":")
    line = _PLACE.sub("", line).partition(". This is typically caused by")[0]
    return line if len(line) <= _REASON_CHARS else f"{line[:_REASON_CHARS]} ..."


class PeerInfo(NamedTuple):
    """What a rank tells all others when they meet."""

    rank: int
    pid: int
    host: str
    pids: str  # equal where a pid is the same process
    started: str  # when the process has, for another one may get its pid
    serves: bool  # the store is in this process
    nonce: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def trouble(self, is_late: bool = True) -> str | None:
        """Return what Linux says of a process of this machine that has ended, or is stopped."""
        if self.pids != _pids():
            return None
        state, started = _state_of(self.pid)
        if state in "ZX" or started != self.started:
            return "has ended"
        return "does not answer: it is stopped" if is_late and state in "Tt" else None


class Rendezvous:
    """The ranks of one communicator, memory or pool: who they are and where each is.

    Making one is collective: all ranks meet, or each that is alive raises within the deadline.

    Parameters
    ----------
    name
        What messages begin with, such as ``"init_pynccl"``; the same in all ranks.
    group
        A group of torch.distributed, None for the default one, or a ``Store``.
    rank, size
        This process's number and how many there are; None: as in the group.
    timeout_s
        Seconds that each call, and this one, waits for other ranks.
    position
        Returns how many calls this rank has made and the last one's op, for ranks that wait. Other
        threads call it at any time; a bound method's object is not kept alive by it.
    facts
        What all ranks must have in common, as JSON values; a key that begins with ``_`` is this
        rank's own, and only shown to the others in :attr:`peers`.

    Attributes
    ----------
    name, rank, size, timeout_s
        As given, or as in the group.
    peers : list of PeerInfo
        By rank.

    Raises CommTimeoutError where ranks did not come, or have ended; CommError where two processes
    are one rank, or ranks differ in a fact; and as :func:`store_of`.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        rank: int | None,
        size: int | None,
        *,
        timeout_s: float,
        position: Callable[[], tuple[int, str]] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout_s: float = seconds_arg(name, timeout_s)
        base, rank, size = store_of(name, group, rank, size)
        self.name, self.rank, self.size = name, rank, size
        self.peers: list[PeerInfo] = []
        self._end: str | None = None  # why it cannot be used any more
        self._desk: _Desk | None = None
        self._counts: dict[str, int] = {}  # how often each name was exchanged
        common = {"called": name, "jitkern": jitkern.__version__, "size": size}
        self._mine = PeerInfo(
            *(rank, os.getpid(), socket.gethostname(), _pids(), _state_of(os.getpid())[1]),
            *(_serves(base), uuid.uuid4().hex, {**common, **(facts or {})}),
        )
        came: dict[int, PeerInfo] = {rank: self._mine}
        if size > 1:
            self._in_time(lambda until: self._meet(base, came, until), timeout_s, came)
            token = _token(came)
            self._desk = _Desk(_prefixed(f"jitkern/{token}", base), self._mine, size, position)
            weakref.finalize(self, self._desk.drop).atexit = False
            _answers.value.add(self._desk)
        self.peers = [came[one] for one in range(size)]
        for key in sorted({key for one in self.peers for key in one.facts if key[0] != "_"}):
            told = [one.facts.get(key) for one in self.peers]
            if any(one != told[0] for one in told):
                rows = [f"\n  {one}  {fact}" for one, fact in zip(self.peers, told, strict=True)]
                text = f"{name}: {key}: differs, expected the same in all ranks:"
                error = CommError(text + "".join(rows))
                self.fail(error)
                raise error

    # -- whether it can be used --------------------------------------------------------------------

    def check(self, op: str) -> None:
        """Raise CommError where an earlier call has failed, or this has been closed."""
        end = self._end
        if os.getpid() != self._mine.pid:
            end = "has been forked: this process is a child of the one that made it"
        if end is not None:
            raise CommError(f"{op}: {self.name}: this rank {end}; make a new one in all ranks")

    def fail(self, error: BaseException) -> None:
        """Let no call be made any more, and tell the others. The first error is quoted."""
        self.close(f"has failed: {short(error)}")

    def close(self, how: str = "has closed it") -> None:
        """Let no call be made any more. The others hear of it; once is enough."""
        if self._end is None:
            self._end = how
            if self._desk is not None and os.getpid() == self._mine.pid:
                self._desk.leave(how)

    # -- together ----------------------------------------------------------------------------------

    def exchange(
        self,
        name: str,
        value: Any = None,
        *,
        op: str = "",
        number: int = 0,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Tell the other ranks a value of JSON, and return that of each, by rank: collective.

        A name may be used again. ``op`` and ``number`` are the call that this is a part of. Raises
        CommTimeoutError where a value did not come in time, or cannot: its rank has ended or left.
        """
        op = op or self.name
        self.check(op)
        desk = self._desk
        if desk is None:
            return [value]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        key, store = f"{name}/{count}", desk.store
        came: dict[int, Any] = {self.rank: value}

        def work(until: float) -> dict[int, str]:
            why: dict[int, str] = {}
            store.set(f"{key}/{self.rank}", canonical_json(value).decode())
            for turn, is_last in enumerate(_polls(until, lambda: self._end is not None)):
                missing = [one for one in range(self.size) if one not in came]
                if is_last or turn % 4 == 3 or store.check([f"{key}/{one}" for one in missing]):
                    for one in missing:
                        # An end is looked for first: what was told before it counts.
                        text = self.peers[one].trouble(is_last) or desk.at(one).get("end")
                        if store.check([f"{key}/{one}"]):
                            came[one] = parse_json(store.get(f"{key}/{one}"))
                        elif text is not None:
                            why[one] = str(text)
                if why or len(came) == self.size:
                    break
            if len(came) == self.size and store.add(f"{key}/read", 1) == self.size:
                for last in [*range(self.size), "read"]:  # all others have read them
                    store.delete_key(f"{key}/{last}")
            return why

        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._in_time(work, limit_s, came, op, number)
        return [came[one] for one in range(self.size)]

    def all_or_none(self, name: str, step: Callable[[], T]) -> T:
        """Every rank does the step, or every rank raises an error: collective.

        The errors are of one kind, so that a fallback is for all. Undoing is up to the caller.
        """
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:
            failure = error
        except BaseException as error:
            self.fail(CommError(f"interrupted by {type(error).__name__}"))
            raise
        told = None if failure is None else [type(failure).__name__, str(failure)[:4000]]
        # With a TimeoutError it has waited for the others already.
        limit_s = _ANSWER_S + 1 if isinstance(failure, TimeoutError) else None
        try:
            came = self.exchange(name, told, timeout_s=limit_s)
        except CommError as error:
            if failure is None:
                raise
            raise failure from error
        if failure is not None:
            raise failure
        for rank, why in enumerate(came):
            if why is not None:
                text = why[1].removeprefix(f"{self.name}: ")
                kind = _STEP_ERRORS.get(why[0], CommError)
                raise kind(f"{self.name}: on rank {rank}: {text}")
        return result

    # -- who is missing ----------------------------------------------------------------------------

    def diagnose(
        self, op: str, number: int, ops: Sequence[str] = (), *, peer: int = -1, late: bool = True
    ) -> Missing:
        """Ask all ranks where they are, and return which are missing in a call that is not done.

        It takes 3 s at most, and may be called by any thread. ``ops`` are those of that call and
        the next ones, if it may be one of these: the first that a rank has not come to. ``peer`` is
        the other rank of a call between two; such calls are not counted. Unless ``late``, ranks
        that are alive have time left.
        """
        asked = [one for one in range(self.size) if one != self.rank]
        asked = [peer] if late and peer >= 0 else asked
        at: dict[int, dict[str, Any]] = {}
        gone: dict[int, str] = {}
        silent, why = asked, "does not answer: it has ended, is stopped, or hangs"
        desk = self._desk

        def work() -> None:
            if desk is None:
                return
            desk.tell()
            desk.store.set("trouble", "1")
            begun = time.monotonic()
            for _ in _polls(begun + _ANSWER_S):
                for one in asked:
                    at[one] = desk.at(one) or at.get(one, {})
                    gone.update({one: text} if (text := self.peers[one].trouble(late)) else {})
                is_news = late or gone or time.monotonic() > begun + _NEWS_S
                if is_news and all(one in gone or at[one] for one in asked):
                    return

        try:
            call_with_timeout(work, _ANSWER_S + 0.5)
        except Exception as error:
            assert desk is not None
            desk.give_up()
            why = f"serves the store, which has failed: {short(error)}"
            silent = [one for one in asked if self.peers[one].serves]
            gone.update({one: text for one in asked if (text := self.peers[one].trouble())})
        gone.update({one: why for one in silent if not at.get(one) and one not in gone})
        alive = {one: at[one] for one in asked if at.get(one) and one not in gone}
        if ops and len(alive) == len(asked):
            first = max(number, min(found["issued"] for found in alive.values()) + 1)
            op, number = ops[min(first - number, len(ops) - 1)], min(first, number + len(ops) - 1)
        behind: dict[int, str] = {}
        notes: list[str] = []
        for one, found in alive.items():
            end = found.get("end")
            is_behind = found["issued"] < number if peer < 0 else one == peer
            text = _where(found, is_behind, peer < 0)
            if is_behind and end and not end.startswith("has failed"):
                gone[one] = text
            elif is_behind:
                behind[one] = f"{self.peers[one]} {text}"
            elif end and not late and not end.startswith("has failed"):
                gone[one] = end  # came, and has left
            elif end:
                notes.append(f"{self.peers[one]} {end}")
            elif peer < 0 < number == found["issued"] and found["op"] != op:
                notes.append(f"{self.peers[one]} made call {number} as {found['op']}")
        texts = {one: f"{self.peers[one]} {gone[one]}" for one in sorted(gone)}
        if texts:
            notes = [*behind.values()]  # the other ends are likely to be a consequence
        return Missing(op, number, texts or behind, notes, bool(texts))

    def timed_out(
        self,
        op: str,
        number: int,
        ops: Sequence[str] = (),
        *,
        peer: int = -1,
        because: BaseException | None = None,
        timeout_s: float | None = None,
    ) -> CommTimeoutError:
        """Let no call be made any more, and return what to raise for one that is late.

        ``because`` has ended it; where that is no TimeoutError, the call cannot be done. See
        :meth:`diagnose` for the rest.
        """
        late = because is None or isinstance(because, TimeoutError)
        found = self.diagnose(op, number, ops, peer=peer, late=late)
        limit_s = (self.timeout_s if timeout_s is None else timeout_s) if late else None
        error = self._late_error(found, limit_s, peer)
        error.__cause__ = because
        self.fail(error)
        return error

    def broken(
        self, op: str, number: int, trouble: str, ops: Sequence[str] = (), *, peer: int = -1
    ) -> CommError:
        """As :meth:`timed_out`, where what carries the calls says that it cannot go on.

        A CommTimeoutError that names the ranks which have ended or left; where none is gone, a
        CommError that says so.
        """
        found = self.diagnose(op, number, ops, peer=peer, late=False)
        error = CommError(f"{op}: {trouble}")
        if found.is_gone:
            notes = [*found.notes, trouble]
            because, error = error, self._late_error(found._replace(notes=notes), None, peer)
            error.__cause__ = because
        else:
            notes = [*found.why.values(), *found.notes] or ["no rank has ended"]
            error = CommError(f"{error}; {'; '.join(notes)}")
        self.fail(error)
        return error

    def _late_error(
        self, found: Missing, timeout_s: float | None, peer: int = -1
    ) -> CommTimeoutError:
        op, number = found.op, found.number
        where = f"rank {self.rank} of {self.size}"
        if peer >= 0:
            where = f"{where} {'to' if op == 'send' else 'from'} rank {peer}"
        elif number:
            where = f"call {number} on {where}"
        elif op == self.name:
            where = f"the set-up on {where}"
        when = "cannot be done" if timeout_s is None else f"was not done within {timeout_s:g} s"
        texts = [*found.why.values()] or ["all ranks have come to it"]
        what_to_do = "see their logs for the reason, and if" if found.why else "if"
        return CommTimeoutError(
            f"{op}: {where} {when}: {'; '.join([*texts, *found.notes])}; {what_to_do} they are "
            "only slow, give a larger timeout_s",
            op=op,
            number=number,
            rank=self.rank,
            missing=sorted(found.why),
        )

    # -- inside ------------------------------------------------------------------------------------

    def _in_time(
        self,
        work: Callable[[float], dict[int, str]],
        timeout_s: float,
        came: Mapping[int, Any],
        op: str = "",
        number: int = 0,
    ) -> None:
        """Have a thread wait for the others; raise for the ranks that are not in `came` then."""
        begun = time.monotonic()
        why: dict[int, str] = {}
        default = "has not come to it"
        try:
            why = call_with_timeout(lambda: work(begun + timeout_s), timeout_s + 1)
        except TimeoutError:
            default = "has not come to it, or the store hangs"
        except CommError as error:
            self.fail(error)
            raise
        except RuntimeError as error:
            default = f"has not come to it; the store has failed: {short(error)}"
        except BaseException as error:
            self.fail(CommError(f"interrupted by {type(error).__name__}"))
            raise
        missing = sorted(why) or [one for one in range(self.size) if one not in came]
        if not missing:
            return
        if self._end is not None:  # by another thread
            self.check(op or self.name)
        texts = {}
        for one in missing:
            info = self.peers[one] if self.peers else came.get(one)
            text = (info.trouble() if isinstance(info, PeerInfo) else None) or why.get(one, default)
            texts[one] = f"{info or f'rank {one}'} {text}"
        limit_s = timeout_s if time.monotonic() - begun >= timeout_s else None
        late = self._late_error(Missing(op or self.name, number, texts, [], False), limit_s)
        self.fail(late)
        raise late

    def _meet(self, base: Store, came: dict[int, PeerInfo], until: float) -> dict[int, str]:
        """Post what this rank tells of itself, until all ranks know that all have seen the same.

        The keys are the same for all meetings over a store: what an earlier one has left is
        overwritten. A rank may come to the next meeting only when all are through with this one.
        """
        store = _prefixed("jitkern/meet", base)
        mine, token, is_seen = canonical_json(self._mine).decode(), "", False
        others = [one for one in range(self.size) if one != self.rank]
        store.set(f"rank/{self.rank}", mine)

        def read(key: str) -> str:
            return store.get(key).decode() if store.check([key]) else ""

        def lacking(key: str) -> list[int]:
            return [one for one in others if read(f"{key}/{one}") != token]

        for is_last in _polls(until, lambda: self._end is not None):
            if not is_seen:
                texts = {one: read(f"rank/{one}") for one in others}
                found = {one: PeerInfo(*parse_json(t.encode())) for one, t in texts.items() if t}
                came.update(found)
                own = read(f"rank/{self.rank}")
                if own != mine:
                    store.set(f"rank/{self.rank}", mine)  # the other one is to see it, too
                    both = f"{self._mine} and {PeerInfo(*parse_json(own.encode()))}"
                    raise CommError(
                        f"{self.name}: two processes are rank {self.rank}: {both}, expected one; "
                        "give ranks of their own a PrefixStore of their own"
                    )
                if len(came) == self.size and token != _token(came):
                    token = _token(came)
                    store.set(f"seen/{self.rank}", token)
                is_seen = token != "" and not lacking("seen")
                if is_seen:
                    store.set(f"done/{self.rank}", token)
            missing = lacking("done") if is_seen else others
            if not missing:
                return {}
            if is_last:
                late = [one for one in others if one not in came or came[one].trouble()]
                late = missing if is_seen else late or lacking("seen")
                return dict.fromkeys(late, "has not come to it")
        return {}


class Missing(NamedTuple):
    """What is known of a call that is not done."""

    op: str
    number: int
    why: dict[int, str]  # of each rank that is missing, what there is to say
    notes: list[str]  # of others
    is_gone: bool  # the missing ones have ended, hang or have left: time would not help


# -- where this rank is, for others ----------------------------------------------------------------


class _Desk:
    """Answers for one Rendezvous, as long as that lives, over the part of the store of its own."""

    def __init__(
        self,
        store: Store,
        mine: PeerInfo,
        size: int,
        position: Callable[[], tuple[int, str]] | None,
    ) -> None:
        self.store, self.serves, self._rank, self._size = store, mine.serves, mine.rank, size
        is_method = hasattr(position, "__self__")
        self._find: Any = weakref.WeakMethod(position) if is_method else lambda: position
        self._place: tuple[int, str] = (-1, "")
        self._told = b""
        self._has_left = self._is_dropped = False

    def at(self, rank: int) -> dict[str, Any]:
        """Return what another rank has told, nothing if it has not."""
        key = f"at/{rank}"
        return parse_json(self.store.get(key)) if self.store.check([key]) else {}

    def tell(self, end: str | None = None) -> None:
        """Say where this rank is."""
        position = self._find()
        if position is not None:
            with suppress(Exception):  # of an object that is half made, or half gone
                self._place = position()
        told = canonical_json({"issued": self._place[0], "op": self._place[1], "end": end})
        if told != self._told:
            self.store.set(f"at/{self._rank}", told.decode())
            self._told = told

    def look(self) -> None:
        """Answer, if some rank asks."""
        if self._is_dropped:
            self.leave("has dropped it")
        elif not self._has_left and self.store.check(["trouble"]):
            self.tell()

    def drop(self) -> None:
        """Have the thread leave: this may be called where nothing can be waited for."""
        self._is_dropped = True

    def leave(self, end: str) -> None:
        """Say so. The last rank to leave clears the store."""

        def work() -> None:
            self.tell(end)
            num_left = self.store.add("left", 1)
            if self.serves and end.startswith("has failed"):
                # This process is likely to end of it: the others are to read what it has told.
                for _ in _polls(time.monotonic() + _LEAVE_S):
                    num_left = self.store.add("left", 0)
                    if num_left == self._size:
                        break
            if num_left == self._size:
                for key in [*(f"at/{one}" for one in range(self._size)), "trouble", "left"]:
                    self.store.delete_key(key)

        _answers.value.desks.discard(self)
        if not self._has_left:
            self._has_left = True
            with suppress(Exception):  # of a store that is gone
                call_with_timeout(work, 2 * _LEAVE_S)

    def give_up(self) -> None:
        """Tell nothing any more: the store hangs, or is gone."""
        self._has_left = True


class _Answers:
    """The thread that looks whether others ask. Not the one that watches deadlines: it may hang."""

    def __init__(self) -> None:
        self.desks: set[_Desk] = set()
        self._lock = threading.Lock()
        self._is_running = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, desk: _Desk) -> None:
        with self._lock:
            self.desks.add(desk)
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(
                    target=self._run, name="jitkern-comm-answer", daemon=True
                )
                self._thread.start()
                atexit.register(self._end)

    def _end(self) -> None:
        """Before the interpreter ends: a thread that it stops inside a store's C++ aborts."""
        self._is_over.set()
        thread = self._thread
        if thread is not None:
            thread.join(2 * _LEAVE_S)

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for desk in list(self.desks):
                with suppress(Exception):
                    desk.look()
            with self._lock:
                if not self.desks:
                    self._is_running = False
                    return


_answers = ForkLocal(_Answers)


def _where(found: Mapping[str, Any], is_behind: bool, is_counted: bool) -> str:
    parts = [f"has come to call {found['issued']} ({found['op']}) only"]
    if not is_counted:
        parts = ["has not come to it"]
    elif found["issued"] <= 0:
        parts = [] if found["issued"] else ["has made no call yet"]
    return ", and ".join([*parts, *([found["end"]] if found.get("end") else [])])


# -- stores and processes --------------------------------------------------------------------------


def store_of(name: str, group: Any, rank: Any, size: Any) -> tuple[Store, int, int]:
    """Return the store of a group, or the one that is given, and this process's rank and size.

    TypeError and ValueError for numbers and groups that make no sense, CommError where
    torch.distributed is not initialised.
    """
    from torch import distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store, own = group, None
    if not isinstance(group, c10d.Store):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: group: this process is not in it, expected one of its ranks")
        if not isinstance(group, dist.ProcessGroup | None):
            came = type_text(group)
            raise TypeError(f"{name}: group: {came}, expected a ProcessGroup, a Store or None")
        if not dist.is_available() or not dist.is_initialized():
            what_to_do = "call torch.distributed.init_process_group() first"
            raise CommError(f"{name}: group: torch.distributed is not initialised; {what_to_do}")
        own = dist.get_rank(group), dist.get_world_size(group)
        rank, size = own[0] if rank is None else rank, own[1] if size is None else size
        store = c10d._get_process_group_store(group or c10d._get_default_group())
    for argument, value in (("rank", rank), ("size", size)):
        if type(value) is not int:
            expected = "an int, or a group that has it"
            raise TypeError(f"{name}: {argument}: {type_text(value)}, expected {expected}")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"{name}: rank {rank} of size {size}, expected 0 <= rank < size")
    if own not in (None, (rank, size)):
        came = f"rank {rank} of size {size}"
        raise ValueError(f"{name}: {came}, expected rank {own[0]} of size {own[1]} as in the group")
    return store, rank, size


def _prefixed(prefix: str, store: Store) -> Store:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store)


def _serves(store: Any) -> bool:
    """Tell whether the server of a TCPStore is in this process."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return False
    listening = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == store.port:
                    listening.add(f"socket:[{words[9]}]")
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(fd) in listening:
                return True
    return False


def _token(came: Mapping[int, PeerInfo]) -> str:
    nonces = "".join(came[one].nonce for one in sorted(came))
    return hashlib.sha256(nonces.encode()).hexdigest()[:24]


def _polls(until: float, is_over: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Yield until a time has come, each time whether it has, with pauses that grow."""
    pause_s, most_s = _POLL_S
    while True:
        is_last = time.monotonic() >= until
        yield is_last
        if is_last or is_over():
            return
        time.sleep(min(pause_s, max(until - time.monotonic(), 0)))
        pause_s = min(2 * pause_s, most_s)


@cache
def _pids() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.stat('/proc/self/ns/pid').st_ino}"


def _state_of(pid: int) -> tuple[str, str]:
    """Return the state of a process, as ps shows it, and when it has started."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return words[0], words[19]
