"""How ranks meet over a store of ``torch.distributed``, act together, and learn who is missing.

Ranks write keys to the store, and poll those of others. On one machine they also read ``/proc``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

import jitkern
from jitkern.comm.args import seconds_arg, serves, store_of
from jitkern.comm.threads import call_with_timeout, polls, watch
from jitkern.errors import CommError, CommTimeoutError, UnsupportedError

T = TypeVar("T")
Missing = dict[int, str]  # ranks, each with what is known of it
Places = dict[int, dict[str, Any]]  # ranks, each with what it has told of its calls

_ANSWER_S = 2.0  # for other ranks to tell their position: a call ends within its deadline + 5 s
_NEWS_S = 1.0  # NCCL may see a closed connection before Linux reports the end of the process
_LEAVE_S = 1.0  # for the store to take the reason of an end
_LACKING = "has not come to it"
_STEP_ERRORS = {kind.__name__: kind for kind in (UnsupportedError, MemoryError, RuntimeError)}


class PeerInfo(NamedTuple):
    """What a rank tells all others when they meet."""

    rank: int
    pid: int
    host: str
    pids: str  # equal where the same pid is the same process
    serves: bool  # the store's server is in this process
    nonce: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def trouble(self, is_late: bool = True) -> str | None:
        """Return what Linux knows of a process of this machine that has ended or is stopped."""
        if self.pids != _pids():
            return None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in "ZX":
            return "has ended"
        return "does not answer: it is stopped" if is_late and state in "Tt" else None


class Rendezvous:
    """The ranks of one communicator, memory or pool. Making one is collective.

    ``position`` is a method that returns how many calls this rank has made and the last one's op;
    a thread calls it. When its object is gone, the others hear that this rank has dropped it.
    ``facts`` are JSON values, the same on all ranks except for keys that begin with ``_``.

    Raises CommTimeoutError if ranks do not come, CommError if two are one rank or facts differ.
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
        root, rank, size = store_of(name, group, rank, size)
        self.name, self.rank, self.size = name, rank, size
        self._others = [one for one in range(size) if one != rank]
        self._end: str | None = None  # why it cannot be used any more
        self._store: Store | None = None  # this rendezvous's own part of the store
        self._keys: list[str] = []  # of the last exchange
        self._num_exchanges = 0
        self._position = None if position is None else weakref.WeakMethod(position)
        facts = {"called": name, "jitkern": jitkern.__version__, "size": size, **(facts or {})}
        process = os.getpid(), socket.gethostname(), _pids(), serves(root, rank)
        self._mine = PeerInfo(rank, *process, uuid.uuid4().hex, facts)
        self._known = {rank: self._mine}
        if size > 1:
            root = PrefixStore("jitkern", root)
            self._wait(lambda until: self._meet(root, until), timeout_s)
            self._store = PrefixStore(_token(self._known), root)
            watch("answer", self._look)
        self.peers: list[PeerInfo] = [self._known[one] for one in range(size)]
        for key in sorted({key for one in self.peers for key in one.facts if key[0] != "_"}):
            if any(one.facts.get(key) != facts.get(key) for one in self.peers):
                rows = "".join(f"\n  {one}  {one.facts.get(key)}" for one in self.peers)
                error = CommError(f"{name}: {key}: differs, expected the same in all ranks:{rows}")
                self.fail(error)
                raise error

    def check(self, op: str) -> None:
        """Raise CommError if an earlier call has failed, or this was closed."""
        end = self._end
        if os.getpid() != self._mine.pid:
            end = "has been forked: this process is a child of the one that made it"
        if end is not None:
            raise CommError(f"{op}: {self.name}: this rank {end}; make a new one in all ranks")

    def fail(self, error: BaseException) -> None:
        """Allow no more calls, and tell the others. The first error is quoted."""
        kind = type(error).__name__
        text = short(error) if isinstance(error, Exception) else f"interrupted by {kind}"
        self.close(f"has failed: {text}")

    def close(self, how: str = "has closed it") -> None:
        """Allow no more calls, and tell the others."""
        if self._end is None:
            self._end = how
            store = self._store
            if store is not None and os.getpid() == self._mine.pid:
                with suppress(Exception):  # the store may be gone
                    call_with_timeout(lambda: self._leave(store), 2 * _LEAVE_S)

    # -- together ----------------------------------------------------------------------------------

    def exchange(
        self, name: str, value: Any = None, *, number: int = 0, timeout_s: float | None = None
    ) -> list[Any]:
        """Return the JSON values that all ranks give, by rank: collective.

        With a ``number`` it is that call of the op ``name``, else a part of the set-up. Raises
        CommTimeoutError if a value does not come in time, or its rank has ended or left.
        """
        op = name if number else self.name
        self.check(op)
        store = self._store
        if store is None:
            return [value]
        self._num_exchanges += 1
        keys = [f"{self._num_exchanges}/{name}/{one}" for one in range(self.size)]
        values: list[Any] = []

        def work(until: float) -> Missing:
            store.set(keys[self.rank], json.dumps(value))
            for is_last in polls(until):
                if store.check(keys):
                    break
                ends = {
                    one: self.peers[one].trouble(is_last) or self._at(store, one).get("end")
                    for one in self._others
                }
                # Read after `ends`: a value that a rank gave before it ended counts.
                lacking = [one for one in self._others if not store.check([keys[one]])]
                why = {one: text for one in lacking if (text := ends[one])}
                if why or (is_last and lacking):
                    return why or dict.fromkeys(lacking, _LACKING)
            values.extend(json.loads(store.get(key)) for key in keys)
            # All ranks have come to this exchange, so all have read the one before.
            if self._keys:
                store.delete_key(self._keys[self.rank])
            self._keys = keys
            return {}

        self._wait(work, self.timeout_s if timeout_s is None else timeout_s, op, number)
        return values

    def all_or_none(self, name: str, step: Callable[[], T]) -> T:
        """Do a step that every rank does, or raise on every rank: collective.

        All raise one kind of error, so that all fall back alike. The caller undoes its step.
        """
        told, timeout_s = None, self.timeout_s
        try:
            result = step()
        except Exception as error:
            told = [type(error).__name__, str(error)[:4000]]
            if isinstance(error, TimeoutError):  # it has waited for the others already
                timeout_s = _ANSWER_S + 1
            with suppress(CommError):
                self.exchange(name, told, timeout_s=timeout_s)
            raise
        for rank, told in enumerate(self.exchange(name)):
            if told is not None:
                kind, text = _STEP_ERRORS.get(told[0], CommError), told[1]
                raise kind(f"{self.name}: on rank {rank}: {text.removeprefix(f'{self.name}: ')}")
        return result

    # -- who is missing ----------------------------------------------------------------------------

    def diagnose(
        self,
        op: str,
        number: int,
        ops: Sequence[str] = (),
        *,
        peer: int = -1,
        because: BaseException | None = None,
        timeout_s: float | None = None,
    ) -> CommError:
        """Find out who is missing in a call, return the error to raise, and allow no more calls.

        Takes 3 s at most. ``ops`` are the call's and the next ones' if it may be one of these;
        ``peer`` is the other rank of a send or recv. ``because`` is the error that ended the call.
        Unless it is a TimeoutError, slow ranks still have time and are not missing.
        """
        is_late = because is None or isinstance(because, TimeoutError)
        at, gone = self._ask([peer] if is_late and peer >= 0 else self._others, is_late)
        if ops and at and not gone:
            first = max(number, min(place["issued"] for place in at.values()) + 1)
            last = min(first, number + len(ops) - 1)
            op, number = ops[last - number], last
        behind: Missing = {}
        notes = []  # other ends, which are likely to be a consequence
        failed = [one for one in at if str(at[one]["end"]).startswith("has failed")]
        for one, place in at.items():
            end, issued = place["end"] or "", place["issued"]
            is_behind, progress = issued < number, "has made no call yet"
            if peer >= 0:
                is_behind, progress = one == peer, _LACKING
            elif issued > 0:
                progress = f"has come to call {issued} ({place['op']}) only"
            if end and one not in failed and (is_behind or not is_late):
                gone[one] = f"{progress}, and {end}" if is_behind and issued >= 0 else end
            elif is_behind:
                behind[one] = progress
            elif end:
                notes.append(f"{self.peers[one]} {end}")
        why = gone or (behind if is_late or failed else {})
        slow = [f"{self.peers[one]} {behind[one]}" for one in behind if why is not behind]
        notes = slow if gone else [*slow, *notes]
        if is_late or why:
            limit_s = (self.timeout_s if timeout_s is None else timeout_s) if is_late else None
            notes += [] if is_late else [short(because)]
            error: CommError = self._late_error(op, number, peer, why, limit_s, *notes)
        else:
            notes = [short(because), *(notes or ["no rank has ended"])]
            error = CommError(f"{op}: {'; '.join(notes)}")
        error.__cause__ = because
        self.fail(error)
        return error

    def _ask(self, ranks: Sequence[int], is_late: bool) -> tuple[Places, Missing]:
        """Return the positions of ranks, and why others do not answer."""
        at: Places = {}
        gone: Missing = {}
        silent, why = ranks, "does not answer: it has ended, is stopped, or hangs"

        def work(store: Store) -> None:
            self._tell(store)
            store.set("trouble", "1")
            begun = time.monotonic()
            for _ in polls(begun + _ANSWER_S):
                for one in ranks:
                    at[one] = self._at(store, one)
                    if text := self.peers[one].trouble(is_late):
                        gone[one] = text
                is_news = is_late or gone or time.monotonic() > begun + _NEWS_S
                if is_news and all(one in gone or at[one] for one in ranks):
                    return

        if (store := self._store) is not None:
            try:
                call_with_timeout(lambda: work(store), _ANSWER_S + 0.5)
            except Exception as error:
                self._store = None  # it hangs, or is gone
                why = f"serves the store, which has failed: {short(error)}"
                silent = [one for one in ranks if self.peers[one].serves]
                gone.update(self._ended())
        gone.update({one: why for one in silent if not at.get(one) and one not in gone})
        return {one: place for one, place in at.items() if place and one not in gone}, gone

    def _late_error(
        self, op: str, number: int, peer: int, missing: Missing, limit_s: float | None, *notes: str
    ) -> CommTimeoutError:
        where = f"rank {self.rank} of {self.size}"
        if peer >= 0:
            where = f"{where} {'to' if op == 'send' else 'from'} rank {peer}"
        elif number or op == self.name:
            where = f"call {number} on {where}" if number else f"the set-up on {where}"
        when = "cannot be done" if limit_s is None else f"was not done within {limit_s:g} s"
        ranks, advice = sorted(missing), "if they are only slow, give a larger timeout_s"
        texts = [f"{self._known.get(one, f'rank {one}')} {missing[one]}" for one in ranks]
        if texts:
            advice = f"see their logs for the reason, and {advice}"
        why = "; ".join([*(texts or ["all ranks have come to it"]), *notes, advice])
        text = f"{op}: {where} {when}: {why}"
        return CommTimeoutError(text, op=op, number=number, rank=self.rank, missing=ranks)

    # -- this rank's position, for others ----------------------------------------------------------

    def _look(self) -> bool:
        """Answer if a rank asks. Returns whether to look again."""
        if self._position is not None and self._position() is None:
            self.close("has dropped it")
        elif self._end is None and self._store is not None and self._store.check(["trouble"]):
            self._tell(self._store)
        return self._end is None

    def _tell(self, store: Store) -> None:
        position = None if self._position is None else self._position()
        issued, op = (-1, "") if position is None else position()
        told = {"issued": issued, "op": op, "end": self._end}
        store.set(f"at/{self.rank}", json.dumps(told))

    def _at(self, store: Store, rank: int) -> dict[str, Any]:
        """Return what another rank has told, nothing if it has not."""
        return json.loads(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else {}

    def _leave(self, store: Store) -> None:
        """Tell the others why. The last rank to leave clears the store."""
        self._tell(store)
        num_left = store.add("left", 1)
        if self._mine.serves and str(self._end).startswith("has failed"):
            # This process is likely to end, and the store with it: first the others read its error.
            for _ in polls(time.monotonic() + _LEAVE_S):
                if (num_left := store.add("left", 0)) == self.size:
                    break
        if num_left == self.size:
            keys = [f"{name}/{one}" for one in range(self.size) for name in ("at", "seen")]
            for key in [*keys, *self._keys, "trouble", "left"]:
                store.delete_key(key)

    def _wait(
        self, work: Callable[[float], Missing], timeout_s: float, op: str = "", number: int = 0
    ) -> None:
        """Call ``work(until)`` in a thread, and raise for the ranks that it returns."""
        begun = time.monotonic()
        try:
            missing = call_with_timeout(lambda: work(begun + timeout_s), timeout_s + 1)
        except CommError as error:
            self.fail(error)
            raise
        except (TimeoutError, RuntimeError) as error:
            hangs = isinstance(error, TimeoutError)
            text = "the store hangs" if hangs else f"the store has failed: {short(error)}"
            missing = self._ended() or dict.fromkeys(self._others, f"{_LACKING}; {text}")
        if missing:
            limit_s = timeout_s if time.monotonic() - begun >= timeout_s else None
            late = self._late_error(op or self.name, number, -1, missing, limit_s)
            self.fail(late)
            raise late

    def _ended(self) -> Missing:
        """Return the known ranks that have ended or are stopped."""
        return {one: why for one, info in self._known.items() if (why := info.trouble())}

    def _meet(self, root: Store, until: float) -> Missing:
        """Post what this rank tells of itself, until all ranks have seen the same of each other.

        A store may be used again, and may hold keys of an earlier run: all are overwritten, and
        ranks compare a token made of all nonces.
        """
        mine, token = json.dumps(self._mine), ""
        seen: list[str] = []
        names = [f"rank/{one}" for one in range(self.size)]
        root.set(names[self.rank], mine)
        for _ in polls(until):
            texts = [root.get(one).decode() if root.check([one]) else "" for one in names]
            # Checked after reading: a rank that meets again has seen this meeting complete.
            if token and root.check(seen):
                return {}
            if texts[self.rank] != mine:
                root.set(names[self.rank], mine)  # for the other process to see
                both = f"{self._mine} and {PeerInfo(*json.loads(texts[self.rank]))}"
                raise CommError(
                    f"{self.name}: two processes are rank {self.rank}: {both}, expected one; "
                    "give each set of ranks a PrefixStore of its own"
                )
            told = {one: PeerInfo(*json.loads(text)) for one, text in enumerate(texts) if text}
            self._known |= told
            if len(self._known) == self.size and token != _token(self._known):
                if token:
                    root.delete_key(seen[self.rank])
                token = _token(self._known)
                seen = [f"{token}/seen/{one}" for one in range(self.size)]
                root.set(seen[self.rank], "1")
        ended = self._ended()
        late = [one for one in self._others if one not in self._known or one in ended]
        late = late or [one for one in self._others if not root.check([seen[one]])]
        return {one: ended.get(one, _LACKING) for one in late}


def short(error: BaseException | None) -> str:
    """Return an error's first line, cut: errors quote each other."""
    line = (str(error).splitlines() or [repr(error)])[0].rstrip(":")
    line = re.sub(r"^\[\S+:\d+\] ", "", line)  # gloo's source file and line
    line = line.partition(". This is typically caused by")[0]
    return line if len(line) <= 240 else f"{line[:240]} ..."


def _token(known: Mapping[int, PeerInfo]) -> str:
    nonces = "".join(known[one].nonce for one in sorted(known))
    return hashlib.sha256(nonces.encode()).hexdigest()[:24]


@cache
def boot_id() -> str:
    """Return a text that is the same in all processes of a machine, and on no other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def _pids() -> str:
    return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
