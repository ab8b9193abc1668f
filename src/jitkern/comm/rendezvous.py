"""How ranks meet over a store of ``torch.distributed``, and find out who is missing.

Each rank has a few keys in the store, and polls those of the others. Store calls run in threads: a
server that hangs must not keep the caller past its deadline. Ranks on one machine also look in
``/proc`` for each other.
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
from concurrent.futures import Future, wait
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

_LOOK_S = 0.25  # between two looks of a Watch
_ANSWER_S = 2.0  # for other ranks to say where they are: a call ends within its deadline + 5 s
_NEWS_S = 1.0  # NCCL may hear of a closed connection before Linux says that the process has ended
_LEAVE_S = 1.0  # for the store to take an end
_LACKING = "has not come to it"
_STEP_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UnsupportedError, MemoryError, RuntimeError)
}


def call_with_timeout(function: Callable[[], T], timeout_s: float) -> T:
    """Call it in a thread; raise TimeoutError if it takes longer, and leave it running."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, name="jitkern-comm-call", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down
        run()
    wait([outcome], min(timeout_s, threading.TIMEOUT_MAX))
    if not outcome.done():
        raise TimeoutError(f"not over within {timeout_s:g} s")
    return outcome.result()


class Watch:
    """A daemon thread that calls functions four times a second, each until it returns False."""

    def __init__(self, name: str) -> None:
        self._looks: set[Callable[[], bool]] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, look: Callable[[], bool]) -> None:
        """Call `look` from now on."""
        self._looks.add(look)
        with suppress(RuntimeError):  # it runs
            self._thread.start()
            atexit.register(self._stop)

    def _stop(self) -> None:
        # An interpreter that ends while the thread is in a store's C++ code aborts.
        self._is_over.set()
        self._thread.join(2 * _LEAVE_S)

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for look in list(self._looks):
                with suppress(Exception):
                    if not look():
                        self._looks.discard(look)


_answers = ForkLocal(lambda: Watch("jitkern-comm-answer"))


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
        """Return what Linux says of a process of this machine that has ended, or is stopped."""
        if self.pids != _pids():
            return None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "has ended"
        if state in "ZX":
            return "has ended"
        return "does not answer: it is stopped" if is_late and state in "Tt" else None


class Rendezvous:
    """The ranks of one communicator, memory or pool. Making one is collective.

    ``name`` is what messages begin with. ``group`` is a ``Store``, or a group of torch.distributed
    (None: the default one), which has ``rank`` and ``size``. ``position`` returns how many calls
    this rank has made and the last one's op, for another thread; when the object of a bound method
    is gone, the others hear that this rank has dropped it. ``facts`` are JSON values that all ranks
    must have in common, but for keys that begin with ``_``; :attr:`peers` has those of all ranks.

    Raises CommTimeoutError if ranks do not come, CommError if two processes are one rank or ranks
    differ in a fact, and what :func:`store_of` raises.
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
        self._store: Store | None = None  # the part of it that is this rendezvous's own
        self._keys: list[str] = []  # of the last exchange
        self._num_exchanges = 0
        self._place: tuple[int, str] = (-1, "")
        is_method = hasattr(position, "__self__")
        self._position: Any = weakref.WeakMethod(position) if is_method else lambda: position
        common = {"called": name, "jitkern": jitkern.__version__, "size": size}
        self._mine = PeerInfo(
            *(rank, os.getpid(), socket.gethostname(), _pids(), _serves(root, rank)),
            *(uuid.uuid4().hex, {**common, **(facts or {})}),
        )
        self._known = {rank: self._mine}
        if size > 1:
            root = _prefixed("jitkern", root)
            self._wait(lambda until: self._meet(root, until), timeout_s, name, 0)
            self._store = _prefixed(_token(self._known), root)
            _answers.value.add(self._look)
        self.peers: list[PeerInfo] = [self._known[one] for one in range(size)]
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
        """Raise CommError if an earlier call has failed, or this was closed."""
        end = self._end
        if os.getpid() != self._mine.pid:
            end = "has been forked: this process is a child of the one that made it"
        if end is not None:
            raise CommError(f"{op}: {self.name}: this rank {end}; make a new one in all ranks")

    def fail(self, error: BaseException) -> None:
        """Allow no more calls, and tell the others. The first error is quoted."""
        is_error = isinstance(error, Exception)
        text = short(error) if is_error else f"interrupted by {type(error).__name__}"
        self.close(f"has failed: {text}")

    def close(self, how: str = "has closed it") -> None:
        """Allow no more calls, and tell the others."""
        if self._end is None:
            self._end = how
            if self._store is not None and os.getpid() == self._mine.pid:
                with suppress(Exception):  # the store may be gone
                    call_with_timeout(self._leave, 2 * _LEAVE_S)

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
        """Return the JSON values that all ranks give, by rank: collective.

        ``op`` and ``number`` are the call that this is a part of. Raises CommTimeoutError if a
        value does not come in time, or its rank has ended or left.
        """
        self.check(op or self.name)
        store = self._store
        if store is None:
            return [value]
        self._num_exchanges += 1
        keys = [f"{self._num_exchanges}/{name}/{one}" for one in range(self.size)]
        values: list[Any] = []

        def work(until: float) -> dict[int, str]:
            store.set(keys[self.rank], canonical_json(value).decode())
            for is_last in _polls(until):
                if store.check(keys):
                    break
                ends = {one: self._end_of(store, one, is_last) for one in self._others}
                # After the ends: what a rank gave before its end counts.
                lacking = [one for one in self._others if not store.check([keys[one]])]
                why = {one: text for one in lacking if (text := ends[one])}
                if why or (is_last and lacking):
                    return why or dict.fromkeys(lacking, _LACKING)
            values.extend(parse_json(store.get(key)) for key in keys)
            # All ranks have come to this exchange, so all have read the one before.
            if self._keys:
                store.delete_key(self._keys[self.rank])
            self._keys = keys
            return {}

        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._wait(work, limit_s, op or self.name, number)
        return values

    def all_or_none(self, name: str, step: Callable[[], T]) -> T:
        """Do a step that every rank does, or raise on every rank: collective.

        All raise one kind of error, so that all fall back alike. The caller undoes its step.
        """
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:
            failure = error
        told = None if failure is None else [type(failure).__name__, str(failure)[:4000]]
        # A TimeoutError has waited for the others already.
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
        self,
        op: str,
        number: int,
        ops: Sequence[str] = (),
        *,
        peer: int = -1,
        because: BaseException | None = None,
        timeout_s: float | None = None,
    ) -> CommError:
        """Find out who is missing in a call that is not done, and return what to raise.

        Takes 3 s at most, and allows no more calls. ``ops`` are the call's and the next ones' if it
        may be one of these; ``peer`` is the other rank of a send or recv. ``because`` has ended the
        call: an error other than a TimeoutError leaves slow ranks time, so they are not missing. If
        no rank is, it is a CommError, else a CommTimeoutError.
        """
        is_late = because is None or isinstance(because, TimeoutError)
        at, gone = self._ask([peer] if is_late and peer >= 0 else self._others, is_late)
        if ops and at and not gone:
            first = max(number, min(place["issued"] for place in at.values()) + 1)
            last = min(first, number + len(ops) - 1)
            op, number = ops[last - number], last
        behind: dict[int, str] = {}
        notes = []
        has_failed = False
        for one, place in at.items():
            end = place["end"] or ""
            is_behind = place["issued"] < number if peer < 0 else one == peer
            if end.startswith("has failed"):
                has_failed = True
            elif end and (is_behind or not is_late):
                is_known = is_behind and place["issued"] >= 0
                gone[one] = f"{_progress(place, peer)}, and {end}" if is_known else end
                continue
            if is_behind:
                behind[one] = f"{self.peers[one]} {_progress(place, peer)}"
            elif end:
                notes.append(f"{self.peers[one]} {end}")
            elif peer < 0 < number == place["issued"] and place["op"] != op:
                notes.append(f"{self.peers[one]} made call {number} as {place['op']}")
        why = {one: f"{self.peers[one]} {gone[one]}" for one in sorted(gone)}
        if gone:
            notes = [*behind.values()]  # other ends are likely to be a consequence
        elif is_late or has_failed:  # of its deadline, and so has this call
            why = behind
        else:
            notes = [*behind.values(), *notes]
        if is_late or why:
            limit_s = (self.timeout_s if timeout_s is None else timeout_s) if is_late else None
            notes = notes if is_late else [*notes, short(because)]
            error: CommError = self._late_error(op, number, why, limit_s, notes, peer)
        else:
            notes = [short(because), *(notes or ["no rank has ended"])]
            error = CommError(f"{op}: {'; '.join(notes)}")
        error.__cause__ = because
        self.fail(error)
        return error

    def _ask(
        self, ranks: Sequence[int], is_late: bool
    ) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """Return where ranks are, and why others do not answer."""
        at: dict[int, dict[str, Any]] = {}
        gone: dict[int, str] = {}
        silent, why = ranks, "does not answer: it has ended, is stopped, or hangs"

        def work(store: Store) -> None:
            self._tell(store)
            store.set("trouble", "1")
            begun = time.monotonic()
            for _ in _polls(begun + _ANSWER_S):
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
                gone.update({one: text for one in ranks if (text := self.peers[one].trouble())})
        gone.update({one: why for one in silent if not at.get(one) and one not in gone})
        return {one: place for one, place in at.items() if place and one not in gone}, gone

    def _late_error(
        self,
        op: str,
        number: int,
        why: Mapping[int, str],
        timeout_s: float | None,
        notes: Sequence[str] = (),
        peer: int = -1,
    ) -> CommTimeoutError:
        where = f"rank {self.rank} of {self.size}"
        if peer >= 0:
            where = f"{where} {'to' if op == 'send' else 'from'} rank {peer}"
        elif number or op == self.name:
            where = f"call {number} on {where}" if number else f"the set-up on {where}"
        when = "cannot be done" if timeout_s is None else f"was not done within {timeout_s:g} s"
        texts = [*why.values()] or ["all ranks have come to it"]
        what_to_do = "see their logs for the reason, and if" if why else "if"
        return CommTimeoutError(
            f"{op}: {where} {when}: {'; '.join([*texts, *notes])}; {what_to_do} they are only "
            "slow, give a larger timeout_s",
            op=op,
            number=number,
            rank=self.rank,
            missing=sorted(why),
        )

    # -- where this rank is, for others ------------------------------------------------------------

    def _look(self) -> bool:
        """Answer if a rank asks: for the Watch."""
        if isinstance(self._position, weakref.WeakMethod) and self._position() is None:
            self.close("has dropped it")
        elif self._end is None and self._store is not None and self._store.check(["trouble"]):
            self._tell(self._store)
        return self._end is None

    def _tell(self, store: Store) -> None:
        position = self._position()
        if position is not None:
            with suppress(Exception):  # its object may be half made
                self._place = position()
        told = {"issued": self._place[0], "op": self._place[1], "end": self._end}
        store.set(f"at/{self.rank}", canonical_json(told).decode())

    def _at(self, store: Store, rank: int) -> dict[str, Any]:
        """Return what another rank has told, nothing if it has not."""
        return parse_json(store.get(f"at/{rank}")) if store.check([f"at/{rank}"]) else {}

    def _end_of(self, store: Store, rank: int, is_late: bool) -> str | None:
        """Return why a rank can come no more, None if it can."""
        return self.peers[rank].trouble(is_late) or self._at(store, rank).get("end")

    def _leave(self) -> None:
        """Say why. The last rank to leave clears the store."""
        store, end = self._store, self._end
        assert store is not None and end is not None
        self._tell(store)
        num_left = store.add("left", 1)
        if self._mine.serves and end.startswith("has failed"):
            # This process is likely to end, and the store with it: first the others read its error.
            for _ in _polls(time.monotonic() + _LEAVE_S):
                if (num_left := store.add("left", 0)) == self.size:
                    break
        if num_left == self.size:
            keys = [f"{name}/{one}" for one in range(self.size) for name in ("at", "seen")]
            for key in [*keys, *self._keys, "trouble", "left"]:
                store.delete_key(key)

    # -- inside ------------------------------------------------------------------------------------

    def _wait(
        self, work: Callable[[float], dict[int, str]], timeout_s: float, op: str, number: int
    ) -> None:
        """Call ``work(until)`` in a thread, and raise for the ranks that it returns, each why."""
        begun = time.monotonic()
        try:
            why = call_with_timeout(lambda: work(begun + timeout_s), timeout_s + 1)
        except CommError as error:
            self.fail(error)
            raise
        except (TimeoutError, RuntimeError) as error:
            hangs = isinstance(error, TimeoutError)
            text = "the store hangs" if hangs else f"the store has failed: {short(error)}"
            found = {one: self._trouble(one) for one in self._others}
            why = {one: text for one, text in found.items() if text}
            why = why or dict.fromkeys(self._others, f"{_LACKING}; {text}")
        if why:
            texts = {one: f"{self._known.get(one, f'rank {one}')} {why[one]}" for one in why}
            limit_s = timeout_s if time.monotonic() - begun >= timeout_s else None
            late = self._late_error(op, number, texts, limit_s)
            self.fail(late)
            raise late

    def _trouble(self, rank: int) -> str | None:
        return self._known[rank].trouble() if rank in self._known else None

    def _meet(self, root: Store, until: float) -> dict[int, str]:
        """Post what this rank tells of itself, until all ranks have seen the same of each other.

        A store may be used by one meeting after the other, and may hold what is left of an earlier
        run: all of it is overwritten, and what ranks have seen has a token made of all nonces.
        """
        mine, token = canonical_json(self._mine).decode(), ""
        root.set(f"rank/{self.rank}", mine)

        def read(rank: int) -> str:
            return root.get(f"rank/{rank}").decode() if root.check([f"rank/{rank}"]) else ""

        for _ in _polls(until):
            texts = {one: read(one) for one in self._others}
            # After that: a rank that is at its next meeting has seen this one complete.
            if token and root.check([f"{token}/seen/{one}" for one in self._others]):
                return {}
            self._known |= {one: _info(text) for one, text in texts.items() if text}
            if (own := read(self.rank)) != mine:
                root.set(f"rank/{self.rank}", mine)  # for the other process to see
                both = f"{self._mine} and {_info(own)}"
                raise CommError(
                    f"{self.name}: two processes are rank {self.rank}: {both}, expected one; "
                    "give each set of ranks a PrefixStore of its own"
                )
            if len(self._known) == self.size and token != _token(self._known):
                if token:
                    root.delete_key(f"{token}/seen/{self.rank}")
                token = _token(self._known)
                root.set(f"{token}/seen/{self.rank}", "1")
        late = [one for one in self._others if one not in self._known or self._trouble(one)]
        late = late or [one for one in self._others if not root.check([f"{token}/seen/{one}"])]
        return {one: self._trouble(one) or _LACKING for one in late}


def short(error: BaseException | None) -> str:
    """Return an error's first line, cut: errors quote each other."""
    line = (str(error).splitlines() or [repr(error)])[0].rstrip(":")
    line = re.sub(r"^\[\S+:\d+\] ", "", line)  # gloo's source file and line
    line = line.partition(". This is typically caused by")[0]
    return line if len(line) <= 240 else f"{line[:240]} ..."


def _progress(place: Mapping[str, Any], peer: int) -> str:
    if peer >= 0:
        return _LACKING
    if place["issued"] <= 0:
        return "has made no call yet"
    return f"has come to call {place['issued']} ({place['op']}) only"


# -- stores and processes --------------------------------------------------------------------------


def store_of(name: str, group: Any, rank: Any, size: Any) -> tuple[Store, int, int]:
    """Return the store of a group, or the one that is given, and this process's rank and size.

    Raises TypeError or ValueError for a wrong argument, CommError if torch.distributed is not
    initialised.
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


def _serves(store: Any, rank: int) -> bool:
    """Tell whether a TCPStore's server is in this process: rank 0's, unless torchrun has it."""
    from torch import distributed as dist

    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return False
    world_rank = dist.get_rank() if dist.is_initialized() else rank
    return world_rank == 0 and not dist.is_torchelastic_launched()


def _info(text: str) -> PeerInfo:
    return PeerInfo(*parse_json(text.encode()))


def _token(known: Mapping[int, PeerInfo]) -> str:
    nonces = "".join(known[one].nonce for one in sorted(known))
    return hashlib.sha256(nonces.encode()).hexdigest()[:24]


def _polls(until: float) -> Iterator[bool]:
    """Yield until a time has come, each time whether it has, with pauses that grow."""
    pause_s = 0.0005
    while (left_s := until - time.monotonic()) > 0:
        yield False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.05)
    yield True


@cache
def _pids() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.stat('/proc/self/ns/pid').st_ino}"
