"""Ranks that meet over a store: exchanges, steps of all or none, and who is missing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ranks import LATE_S, Pool, Rank, all_do
from torch.distributed import HashStore, PrefixStore

from jitkern.comm.rendezvous import Rendezvous
from jitkern.errors import CommError, CommTimeoutError, UnsupportedError

Place = tuple[int, str]


class Position:
    def __init__(self, place: Place = (7, "all_reduce")) -> None:
        self.place = place

    def get(self) -> Place:
        return self.place


def on_threads(
    size: int,
    body: Callable[[Rendezvous], Any],
    store: Any = None,
    facts: Callable[[int], Any] = lambda rank: {},
    number: Callable[[int], int] = lambda rank: rank,
    places: Mapping[int, Place] = {},
) -> list[Any]:
    """Run ranks as threads; return the result or the error of each."""
    store = store or HashStore()
    positions = [Position(places[rank]) if rank in places else Position() for rank in range(size)]

    def run(rank: int) -> Any:
        options = {"timeout_s": 20, "facts": facts(rank), "position": positions[rank].get}
        met = Rendezvous("init", store, number(rank), size, **options)
        try:
            return body(met)
        finally:
            met.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    return [future.exception() or future.result() for future in futures]


def meet(ranks: list[Rank], pool: Pool, kind: str, args: str = "") -> str:
    if kind == "file":
        use = f"use_store(path={pool.path()!r})"
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            use = f"use_store(port={server.getsockname()[1]}, is_master={{rank}} == 0)"
    for number, rank in enumerate(ranks):  # the server first
        rank.ask(use.replace("{rank}", str(number)))
    all_do(ranks, f"meet({{rank}}, {len(ranks)}, {args})")
    return use


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_processes_meet_and_exchange(pool: Pool, kind: str) -> None:
    ranks = pool.start(3)
    meet(ranks, pool, kind, "facts={'nccl': '2.27', '_gpu': 1}")
    assert all_do(ranks, "[peer.pid for peer in comm.peers]") == [[r.pid for r in ranks]] * 3
    assert all_do(ranks, "comm.peers[1].facts['_gpu']") == [1] * 3
    for _ in range(2):  # a name may be used again
        assert all_do(ranks, "comm.exchange('handles', [comm.rank])") == [[[0], [1], [2]]] * 3


def test_all_or_none() -> None:
    assert on_threads(2, lambda met: met.all_or_none("step", lambda: met.rank + 5)) == [5, 6]

    def fails(kind: type[Exception]) -> list[Any]:
        def step(met: Rendezvous) -> None:
            if met.rank == 1:
                raise kind("init: no more of this")

        return on_threads(3, lambda met: met.all_or_none("step", lambda: step(met)))

    for kind, of_others in ((UnsupportedError, UnsupportedError), (ZeroDivisionError, CommError)):
        first, own, last = fails(kind)
        assert (type(own), str(own)) == (kind, "init: no more of this")
        for other in (first, last):
            assert (type(other), str(other)) == (of_others, "init: on rank 1: no more of this")


def test_ranks_that_do_not_fit_together() -> None:
    for error in on_threads(2, lambda met: None, facts=lambda rank: {"nccl": rank}):
        text = str(error)
        assert text.startswith("init: nccl: differs, expected the same in all ranks:\n  rank 0 (")
        assert text.splitlines()[2].endswith("  1")
    # Both say so, and do not wait for the rank that is missing then.
    for error in on_threads(2, lambda met: None, number=lambda _: 0):
        assert str(error).startswith("init: two processes are rank 0: rank 0 (process "), error


def test_a_store_of_an_earlier_run(pool: Pool) -> None:
    """The keys of a rank that has ended are no answer, and do not disturb later ranks."""
    ranks = pool.start(2)
    use = meet(ranks, pool, "file")
    ranks[1].kill()
    ranks[0].tell("meet(0, 2, timeout_s=0.2)")
    answer = ranks[0].error(0.2 + LATE_S)
    assert f"rank 1 (process {ranks[1].pid} on " in answer["error"]
    assert "has ended" in answer["error"] and answer["missing"] == [1]
    again = pool.start(2)
    all_do(again, use)
    all_do(again, "meet({rank}, 2)")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_of_the_store_hangs_or_ends(pool: Pool, number: int) -> None:
    ranks = pool.start(2)
    meet(ranks, pool, "tcp")
    ranks[0].kill(number)
    text, missing = ranks[1].ask("diagnosed()")
    state = "has ended" if number == signal.SIGKILL else "is not known: the store has failed"
    assert f"rank 0 (process {ranks[0].pid} on {os.uname().nodename}) {state}" in text
    assert missing == [0]


def test_a_rank_ends_in_an_exchange(pool: Pool) -> None:
    """Nobody waits for the deadline; a slow rank is not missing."""
    ranks = pool.start(3)
    meet(ranks, pool, "file")
    ranks[0].tell("comm.exchange('register', 1, number=7)")
    ranks[1].kill()
    answer = ranks[0].error(LATE_S)
    text = f"register: call 7 on rank 0 of 3 cannot be done: rank 1 (process {ranks[1].pid} on "
    assert text in answer["error"] and "has ended; see their logs" in answer["error"]
    assert answer["missing"] == [1]
    ranks[2].tell("comm.exchange('handles', 1)")
    assert 1 in ranks[2].error(LATE_S)["missing"]


def test_a_rank_of_another_host_ends(pool: Pool) -> None:
    """Linux does not know its state. It does not answer; a slow rank does."""
    ranks = pool.start(3)
    all_do(ranks, "setattr(rendezvous, '_pids', lambda: 'host {rank}')")
    all_do(ranks, "setattr(rendezvous, '_ANSWER_S', 1.0)")
    meet(ranks, pool, "tcp")
    ranks[1].kill()
    text, missing = ranks[0].ask("diagnosed(because=RuntimeError('connection closed'))")
    assert missing == [1]
    assert f"rank 1 (process {ranks[1].pid} on {os.uname().nodename}) does not answer" in text
    assert f"; connection closed; rank 2 (process {ranks[2].pid} on " in text
    assert "has made no call yet" in text


def diagnosed(places: dict[int, Place], ends: dict[int, str], **options: Any) -> CommError:
    """Return rank 0's error of its call 7; the others are at `places`, or have left."""
    left, done = (threading.Barrier(len(places) + 1) for _ in range(2))

    def body(met: Rendezvous) -> Any:
        met.exchange("all are here")
        if met.rank in ends:
            met.close(ends[met.rank])
        left.wait()
        error = met.diagnose("all_reduce", 7, **options) if met.rank == 0 else None
        done.wait()
        return error

    error: CommError = on_threads(len(places) + 1, body, places=places)[0]
    return error


HERE, BEHIND, NEVER = (7, "all_reduce"), (5, "broadcast"), (0, "")
CLOSED = {"because": RuntimeError("connection closed")}
LATE = "all_reduce: call 7 on rank 0 of {size} was not done within 20 s: "
CANNOT = "all_reduce: call 7 on rank 0 of {size} cannot be done: "
DIAGNOSES: list[tuple[dict[int, Place], dict[int, str], dict[str, Any], tuple[int, ...], str]] = [
    ({1: HERE, 2: BEHIND, 3: NEVER}, {}, {}, (2, 3),
     LATE + "rank 2 .* has come to call 5 .broadcast. only; rank 3 .* has made no call yet; see "),
    ({1: HERE}, {}, {}, (), LATE + "all ranks have come to it; if they are only slow, give a larg"),
    ({1: HERE, 2: BEHIND}, {}, {"peer": 1}, (1,),
     "all_reduce: rank 0 of 3 from rank 1 was not done within 20 s: rank 1 .* has not come to it"),
    ({1: HERE, 2: BEHIND}, {2: "has left"}, {}, (2,),
     LATE + "rank 2 .* has come to call 5 .broadcast. only, and has left; see"),
    ({1: HERE}, {1: "has left"}, {}, (), LATE + "all ranks have come to it; rank 1 .* has left; "),
    # Before the deadline a slow rank is not missing.
    ({1: HERE, 2: BEHIND}, {1: "has left"}, CLOSED, (1,),
     CANNOT + "rank 1 .* has left; connection closed; rank 2 .* has come to call 5"),
    ({1: HERE, 2: BEHIND}, {}, CLOSED, (), "all_reduce: connection closed; rank 2 .* has come to"),
    ({1: HERE}, {}, CLOSED, (), "all_reduce: connection closed; no rank has ended$"),
]  # fmt: skip


@pytest.mark.parametrize(("places", "ends", "options", "missing", "text"), DIAGNOSES)
def test_who_is_missing(
    places: dict[int, Place],
    ends: dict[int, str],
    options: dict[str, Any],
    missing: tuple[int, ...],
    text: str,
) -> None:
    error = diagnosed(places, ends, **options)
    assert re.match(text.format(size=len(places) + 1), str(error)), error
    assert isinstance(error, CommTimeoutError) == ("connection closed" not in text[:40])
    if isinstance(error, CommTimeoutError):
        assert (error.missing, error.op) == (missing, "all_reduce")


def test_the_first_failure_is_quoted() -> None:
    met = Rendezvous("init", HashStore(), 0, 1, timeout_s=1)
    met.fail(CommError("one"))
    met.fail(CommError("two"))
    met.close()
    text = "^all_gather: init: this rank has failed: one; make a new one in all ranks$"
    with pytest.raises(CommError, match=text):
        met.check("all_gather")


DAMAGED = [b"", b"\xff\xfe", b"[1", b"[" * 100_000]
# A rank of the same version wrote something else.
SHAPES: list[Any] = [5, None, [], [1], [1, 2], {"end": 1}, "x", [0, 1, 2, 3, 4, 5], [[1, 2]]]
DAMAGED += [json.dumps(value).encode() for value in SHAPES]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_value_that_no_rank_wrote(data: bytes) -> None:
    """The error is ours wherever the value is, and the rendezvous has failed."""
    text = "in the ranks' store: b.*, expected a value of jitkern"
    store = HashStore()
    PrefixStore("jitkern", store).set("rank/1", data)
    with pytest.raises(CommError, match=f"^init: rank/1 {text}"):
        Rendezvous("init", store, 0, 2, timeout_s=20)

    written = threading.Event()

    def body(met: Rendezvous) -> Any:
        met.exchange("all are here")
        store = met._store
        assert store is not None
        if met.rank == 1:
            met.close()  # it writes no answer of its own
            store.set("at/1", data)
            store.set("2/x/1", data)
            written.set()
            return None
        assert written.wait(20)
        with pytest.raises(CommError, match=f"^init: 2/x/1 {text}"):
            met.all_or_none("x", lambda: None)
        with pytest.raises(CommError, match="this rank has failed: init: 2/x/1"):
            met.check("y")
        return met.diagnose("all_reduce", 7)

    error = on_threads(2, body)[0]
    assert isinstance(error, CommTimeoutError), error
    assert error.missing == (1,) and "has given no sound answer: init: at/1 in" in str(error)
