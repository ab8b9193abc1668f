"""Ranks meet over a ``torch.distributed`` store, exchange values, and learn who is missing.

Ranks write keys to the store and poll the keys of others. On one machine they also read ``/proc``.

Three kinds of threads run the methods of a ``Rendezvous``, which are in sections accordingly. The
caller's thread runs the public ones. A store whose server is gone can block for minutes: so a
helper thread, abandoned after a timeout, runs what accesses the store. One answering thread for
each rendezvous looks four times a second whether another rank asks for this one's position.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from torch.distributed.distributed_c10d import PrefixStore, Store

from jitkern.args import seconds_arg
from jitkern.comm.args import store_of
from jitkern.comm.threads import call_with_timeout, polls, watch
from jitkern.errors import CommError, CommTimeoutError, UnsupportedError
from jitkern.fs import parse_json
from jitkern.version import __version__

T = TypeVar("T")
Missing = dict[int, str]  # the reason why a rank is missing, by rank

# How long to wait. A call ends within its deadline + 5 s.
_ANSWER_S = 2.0  # until other ranks tell their position
_NEWS_S = 1.0  # NCCL may see a closed connection before Linux reports the end of the process
_LEAVE_S = 1.0  # until the store has the reason of an end
_NOT_COME = "has not come to it"
_ENDED = "has ended"
_STEP_ERRORS = {kind.__name__: kind for kind in (UnsupportedError, MemoryError, RuntimeError)}


class PeerInfo(NamedTuple):
    """The facts that a rank tells all others when they meet."""

    rank: int
    pid: int
    host: str
    pids: str  # equal if the same pid is the same process
    nonce: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def has_ended(self) -> bool:
        """Return whether the process has ended; False for one of another machine."""
        if self.pids != _pids():
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in "ZX"


class Position(NamedTuple):
    """The progress of a rank, which it tells when another one asks, and when it leaves."""

    num_calls: int  # that all ranks make; -1: not known
    last_op: str
    end: str | None = None  # why it has left
    has_failed: bool = False

    def progress(self) -> str:
        if self.num_calls > 0:
            return f"has come to call {self.num_calls} ({self.last_op}) only"
        return "has made no call yet"


class Rendezvous:
    """The ranks of one communicator, memory or pool. Making one is collective.

    ``position`` is a method that returns how many calls this rank has made and the last one's op.
    When its object is gone, the others hear that this rank has dropped it. ``facts`` are JSON
    values, the same on all ranks except for keys that begin with ``_``.

    Raises CommTimeoutError if ranks do not come, CommError if two are one rank or facts differ.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        rank: int | None,
        world_size: int | None,
        *,
        timeout_s: float,
        position: Callable[[], tuple[int, str]] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.timeout_s: float = seconds_arg(name, timeout_s)
        root, rank, world_size = store_of(name, group, rank, world_size)
        self.name, self.rank, self.world_size = name, rank, world_size
        self._others = [other for other in range(world_size) if other != rank]
        self._end: str | None = None  # why it cannot be used any more
        self._has_failed = False
        self._store: Store | None = None  # None: one rank is alone, or the store has failed
        self._num_exchanges = 0
        self._last_keys: list[str] = []  # those of the last exchange
        self._position = None if position is None else weakref.WeakMethod(position)
        facts = {"called": name, "world_size": world_size, "jitkern": __version__, **(facts or {})}
        process = os.getpid(), socket.gethostname(), _pids()
        self._own = PeerInfo(rank, *process, uuid.uuid4().hex, facts)
        self._known = {rank: self._own}  # the ranks that have come so far
        if world_size > 1:
            root = PrefixStore("jitkern", root)
            self._run(lambda until: self._meet(root, until), timeout_s)
            self._store = PrefixStore(self._token(), root)
            watch("answer", self._answer)
        self.peers: list[PeerInfo] = [self._known[peer] for peer in range(world_size)]
        for key in sorted({key for peer in self.peers for key in peer.facts if key[0] != "_"}):
            if any(peer.facts.get(key) != facts.get(key) for peer in self.peers):
                rows = "".join(f"\n  {peer}  {peer.facts.get(key)}" for peer in self.peers)
                error = CommError(f"{name}: {key}: differs, expected the same in all ranks:{rows}")
                self.fail(error)
                raise error

    # -- on the caller's thread --------------------------------------------------------------------

    def check(self, op: str) -> None:
        """Raise CommError if an earlier call has failed, or this was closed."""
        end = self._end
        if os.getpid() != self._own.pid:
            end = "has been forked: this process is a child of the one that made it"
        if end is not None:
            raise CommError(f"{op}: {self.name}: this rank {end}; make a new one in all ranks")

    def fail(self, error: BaseException) -> None:
        """Allow no more calls, and tell the others. The first error is quoted."""
        if self._end is None:
            self._has_failed = True
            kind = type(error).__name__
            text = short(error) if isinstance(error, Exception) else f"interrupted by {kind}"
            self.close(f"has failed: {text}")

    def close(self, how: str = "has closed it") -> None:
        """Allow no more calls, and tell the others."""
        if self._end is None:
            self._end = how
            store = self._store
            if store is not None and os.getpid() == self._own.pid:
                with suppress(Exception):  # the store may be gone
                    call_with_timeout(lambda: self._tell(store), _LEAVE_S)

    def exchange(
        self,
        name: str,
        value: Any = None,
        kind: Any = object,
        *,
        number: int = 0,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Return the JSON values that all ranks give, by rank: collective.

        With a ``number`` it is that call of the op ``name``, else a part of the set-up. Raises
        CommTimeoutError if a value does not come in time, or its rank has ended or left; CommError
        if it is not of the type ``kind``.
        """
        op = name if number else self.name
        self.check(op)
        store = self._store
        if store is None:
            return [value]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        step = partial(self._exchange, store, name, value, kind)
        return self._run(step, timeout_s, op, number)

    def all_or_none(self, name: str, step: Callable[[], T]) -> T:
        """Do a step that every rank does, or raise on every rank: collective.

        All raise one kind of error, so that all fall back alike. The caller undoes its step.
        """
        try:
            result = step()
        except Exception as error:
            # After a TimeoutError this rank has waited for the others already.
            timeout_s = _ANSWER_S + 1 if isinstance(error, TimeoutError) else self.timeout_s
            with suppress(CommError):
                failure = f"{type(error).__name__}: {error}"[:4000]
                self.exchange(name, failure, str | None, timeout_s=timeout_s)
            raise
        for rank, failure in enumerate(self.exchange(name, None, str | None)):
            if failure is not None:
                kind, _, text = failure.partition(": ")
                text = f"{self.name}: on rank {rank}: {text.removeprefix(f'{self.name}: ')}"
                raise _STEP_ERRORS.get(kind, CommError)(text)
        return result

    def diagnose(
        self,
        op: str,
        number: int,
        *,
        peer: int = -1,
        because: BaseException | None = None,
        timeout_s: float | None = None,
    ) -> CommError:
        """Find out who is missing in a call, return the error to raise, and allow no more calls.

        Takes 3 s at most. ``peer`` is the other rank of a send or recv. ``because`` is the error
        that ended the call. Unless it is a TimeoutError, slow ranks still have time and are not
        missing.
        """
        is_late = because is None or isinstance(because, TimeoutError)
        asked = [peer] if is_late and peer >= 0 else self._others
        positions, gone = self._positions(asked, is_late)
        behind: Missing = {}
        left_later = []  # ranks that came and left then: likely to be a consequence
        for rank, position in positions.items():
            is_behind = position.num_calls < number if peer < 0 else rank == peer
            progress = position.progress() if peer < 0 else _NOT_COME
            if position.end and not position.has_failed and (is_behind or not is_late):
                is_told = is_behind and position.num_calls >= 0
                gone[rank] = f"{progress}, and {position.end}" if is_told else position.end
            elif is_behind:
                behind[rank] = progress
            elif position.end:
                left_later.append(f"{self.peers[rank]} {position.end}")
        slow = [f"{self.peers[rank]} {progress}" for rank, progress in behind.items()]
        if gone:
            missing, notes = gone, slow
        elif is_late or any(position.has_failed for position in positions.values()):
            missing, notes = behind, left_later
        else:
            missing, notes = {}, [*slow, *left_later] or ["no rank has ended"]
        error: CommError
        if is_late:
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            error = self._late_error(op, number, peer, missing, limit_s, *notes)
        elif missing:
            error = self._late_error(op, number, peer, missing, None, short(because), *notes)
        else:
            error = CommError("; ".join([f"{op}: {short(because)}", *notes]))
        error.__cause__ = because
        self.fail(error)
        return error

    def _positions(
        self, ranks: Sequence[int], is_late: bool
    ) -> tuple[dict[int, Position], Missing]:
        """Return the positions of ranks, and why others do not answer."""
        positions: dict[int, Position] = {}
        gone: Missing = {}
        why = "does not answer: it has ended, is stopped, or hangs"
        if (store := self._store) is not None:
            ask = partial(self._ask, store, ranks, is_late)
            try:
                positions, gone = call_with_timeout(ask, _ANSWER_S + 0.5)
            except Exception as error:
                self._store = None  # it hangs, or is gone
                why = f"is not known: the store has failed: {short(error)}"
                return {}, self._ended() or dict.fromkeys(ranks, why)
        for rank in ranks:
            if rank not in positions:
                gone.setdefault(rank, why)
        return {rank: told for rank, told in positions.items() if rank not in gone}, gone

    def _late_error(
        self, op: str, number: int, peer: int, missing: Missing, limit_s: float | None, *notes: str
    ) -> CommTimeoutError:
        """Return the error of a call that was late; if `limit_s` is None, that cannot be done."""
        where = f"rank {self.rank} of {self.world_size}"
        if peer >= 0:
            where = f"{where} {'to' if op == 'send' else 'from'} rank {peer}"
        elif number or op == self.name:
            where = f"call {number} on {where}" if number else f"the set-up on {where}"
        when = "cannot be done" if limit_s is None else f"was not done within {limit_s:g} s"
        ranks, advice = sorted(missing), "if they are only slow, give a larger timeout_s"
        reasons = [f"{self._known.get(rank, f'rank {rank}')} {missing[rank]}" for rank in ranks]
        if reasons:
            advice = f"see their logs for the reason, and {advice}"
        why = "; ".join([*(reasons or ["all ranks have come to it"]), *notes, advice])
        text = f"{op}: {where} {when}: {why}"
        return CommTimeoutError(text, op=op, number=number, rank=self.rank, missing=ranks)

    def _run(
        self, step: Callable[[float], T], timeout_s: float, op: str = "", number: int = 0
    ) -> T:
        """Run ``step(until)`` on a helper thread; name the ranks that are missing in it."""
        begin_s = time.monotonic()
        try:
            return call_with_timeout(lambda: step(begin_s + timeout_s), timeout_s + 1)
        except _RanksMissing as error:
            missing = error.ranks
        except CommError as error:
            self.fail(error)
            raise
        except (TimeoutError, RuntimeError) as error:
            hangs = isinstance(error, TimeoutError)
            text = "the store hangs" if hangs else f"the store has failed: {short(error)}"
            missing = self._ended() or dict.fromkeys(self._others, f"{_NOT_COME}; {text}")
        limit_s = timeout_s if time.monotonic() - begin_s >= timeout_s else None
        late = self._late_error(op or self.name, number, -1, missing, limit_s)
        self.fail(late)
        raise late

    # -- on a helper thread: these access the store ------------------------------------------------

    def _meet(self, root: Store, until: float) -> None:
        """Write this rank's facts, until all ranks have seen the same facts of each other.

        A store may be used again, and may hold keys of an earlier run: all are overwritten, and
        ranks compare a token made of all nonces.
        """
        own_text, token = json.dumps(self._own), ""
        seen: list[str] = []  # the keys by which ranks say that they have seen all
        keys = [f"rank/{rank}" for rank in range(self.world_size)]
        root.set(keys[self.rank], own_text)
        for _ in polls(until):
            texts = [root.get(key) if root.check([key]) else None for key in keys]
            # Checked after reading: a rank that meets again has seen this meeting complete.
            if token and root.check(seen):
                return
            came = texts[self.rank]
            if came is not None and came != own_text.encode():
                root.set(keys[self.rank], own_text)  # so that the other process raises too
                other = self._peer(keys[self.rank], came)
                raise CommError(
                    f"{self.name}: two processes are rank {self.rank}: {self._own} and {other}, "
                    "expected one; give each set of ranks a PrefixStore of its own"
                )
            for rank, text in enumerate(texts):
                if text is not None:
                    self._known[rank] = self._peer(keys[rank], text)
            if len(self._known) == self.world_size and token != self._token():
                if token:
                    root.delete_key(seen[self.rank])
                token = self._token()
                seen = [f"{token}/seen/{rank}" for rank in range(self.world_size)]
                root.set(seen[self.rank], "1")
        ended = self._ended()
        late = [rank for rank in self._others if rank not in self._known or rank in ended]
        late = late or [rank for rank in self._others if not root.check([seen[rank]])]
        raise _RanksMissing({rank: ended.get(rank, _NOT_COME) for rank in late})

    def _exchange(self, store: Store, name: str, value: Any, kind: Any, until: float) -> list[Any]:
        self._num_exchanges += 1
        keys = [f"{self._num_exchanges}/{name}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], json.dumps([value]))
        for is_last in polls(until):
            if store.check(keys):
                break
            ends = {rank: self._end_of(store, rank) for rank in self._others}
            # Read after `ends`: a value that a rank gave before it ended counts.
            absent = [rank for rank in self._others if not store.check([keys[rank]])]
            ended = {rank: end for rank in absent if (end := ends[rank])}
            if ended or (is_last and absent):
                raise _RanksMissing(ended or dict.fromkeys(absent, _NOT_COME))
        values = [self._unpacked(key, store.get(key), kind)[0] for key in keys]
        # All ranks have come to this exchange, so all have read the one before.
        if self._last_keys:
            store.delete_key(self._last_keys[self.rank])
        self._last_keys = keys
        return values

    def _end_of(self, store: Store, rank: int) -> str | None:
        """Return why another rank cannot come any more, None if it can."""
        if self.peers[rank].has_ended():
            return _ENDED
        position = self._position_of(store, rank)
        return None if position is None else position.end

    def _ask(
        self, store: Store, ranks: Sequence[int], is_late: bool
    ) -> tuple[dict[int, Position], Missing]:
        """Ask ranks for their positions; return them, and why ranks will not answer."""
        positions: dict[int, Position] = {}
        gone: Missing = {}
        self._tell(store)
        store.set("trouble", "1")
        begin_s = time.monotonic()
        for _ in polls(begin_s + _ANSWER_S):
            for rank in ranks:
                try:
                    position = self._position_of(store, rank)
                except CommError as error:
                    gone[rank] = f"has given no sound answer: {short(error)}"
                    continue
                if position is not None:
                    positions[rank] = position
                if self.peers[rank].has_ended():
                    gone[rank] = _ENDED
            has_news = is_late or gone or time.monotonic() > begin_s + _NEWS_S
            if has_news and all(rank in gone or rank in positions for rank in ranks):
                break
        return positions, gone

    def _position_of(self, store: Store, rank: int) -> Position | None:
        key = f"at/{rank}"
        if not store.check([key]):
            return None
        return Position(*self._unpacked(key, store.get(key), int, str, str | None, bool))

    def _tell(self, store: Store) -> None:
        """Write this rank's position."""
        position = None if self._position is None else self._position()
        num_calls, last_op = (-1, "") if position is None else position()
        own = Position(num_calls, last_op, self._end, self._has_failed)
        store.set(f"at/{self.rank}", json.dumps(own))

    # -- on the answering thread -------------------------------------------------------------------

    def _answer(self) -> bool:
        """Tell this rank's position if another one has asked. Return whether to look again."""
        if self._position is not None and self._position() is None:
            self.close("has dropped it")
        elif self._end is None and self._store is not None and self._store.check(["trouble"]):
            self._tell(self._store)
        return self._end is None

    # -- on any thread -----------------------------------------------------------------------------

    def _ended(self) -> Missing:
        """Return the ranks whose processes have ended."""
        return {rank: _ENDED for rank, info in self._known.items() if info.has_ended()}

    def _token(self) -> str:
        nonces = "".join(self._known[rank].nonce for rank in sorted(self._known))
        return hashlib.sha256(nonces.encode()).hexdigest()[:24]

    def _peer(self, key: str, data: bytes) -> PeerInfo:
        return PeerInfo(*self._unpacked(key, data, int, int, str, str, str, dict))

    def _unpacked(self, key: str, data: bytes, *types: Any) -> list[Any]:
        """Return the list of these types that a rank wrote.

        Raises CommError if a stranger or another version of jitkern wrote it.
        """
        with suppress(ValueError):
            values = parse_json(data)
            is_list = isinstance(values, list) and len(values) == len(types)
            if is_list and all(map(isinstance, values, types)):
                return cast("list[Any]", values)
        raise CommError(
            f"{self.name}: {key} in the ranks' store: {data[:40]!r}, expected a value of jitkern "
            f"{__version__}; install one version on all ranks, and give each set of ranks a "
            "PrefixStore of its own"
        )


class _RanksMissing(Exception):  # noqa: N818 - never leaves this file
    def __init__(self, ranks: Missing) -> None:
        self.ranks = ranks


def short(error: BaseException | None) -> str:
    """Return an error's first line, cut: errors quote each other."""
    line = (str(error).splitlines() or [repr(error)])[0].rstrip(":")
    return line if len(line) <= 240 else f"{line[:240]} ..."


@cache
def boot_id() -> str:
    """Return a text that is the same in all processes of a machine, and on no other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def _pids() -> str:
    return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
