"""The guard by itself, over a store: what a communicator of its own transport is built on."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from comm_ranks import LATE_S, Pool, Rank, errors, everywhere

DEADLINE_S = 2.0


@pytest.fixture(params=["file", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def store(ranks: list[Rank], kind: str, tmp_path: Path) -> None:
    if kind == "file":
        for rank in ranks:
            rank.ask("use_store", path=str(tmp_path / "use_store"))
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for number, rank in enumerate(ranks):
        rank.ask("use_store", port=port, is_master=number == 0)


def open_guards(ranks: list[Rank], **config: object) -> None:
    for number, rank in enumerate(ranks):
        rank.tell("guard", **{"rank": number, "size": len(ranks), **config})


def values(ranks: list[Rank]) -> list[object]:
    return [rank.value() for rank in ranks]


def test_meet_and_exchange(pool: Pool, kind: str, tmp_path: Path) -> None:
    ranks = pool.start(3)
    store(ranks, kind, tmp_path)
    open_guards(ranks, facts={"nccl": "2.27", "_gpu": 1})
    values(ranks)
    pids = [rank.pid for rank in ranks]
    assert everywhere(ranks, "[card.pid for card in comm.cards]") == [pids] * 3
    assert everywhere(ranks, "comm.cards[1].facts['_gpu']") == [1] * 3
    for _ in range(2):  # a key may be used again
        came = everywhere(ranks, "comm.exchange('handles', [comm.rank])")
        assert came == [{"0": [0], "1": [1], "2": [2]}] * 3
    some = everywhere(ranks[:2], "comm.exchange('handles', comm.rank, ranks=[1, 0])")
    assert some == [{"0": 0, "1": 1}] * 2
    assert everywhere(ranks, "comm.check('x')") == [None] * 3


def test_two_processes_of_one_number(pool: Pool, kind: str, tmp_path: Path) -> None:
    """Both say so, and do not wait for the rank that is missing then."""
    ranks = pool.start(2)
    store(ranks, kind, tmp_path)
    open_guards(ranks, rank=0, timeout_s=20)
    for answer in errors(ranks, 20):
        text = answer["error"]
        assert text.startswith("CommError: init: two processes are rank 0: rank 0 (process "), text
        assert all(f"(process {rank.pid} on " in text for rank in ranks)
        assert text.endswith("give it a PrefixStore of its own")


def test_facts_differ(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.start(2)
    store(ranks, "file", tmp_path)
    for number, rank in enumerate(ranks):
        facts = {"nccl": f"2.{number}", "_gpu": number}
        rank.tell("guard", rank=number, size=2, facts=facts, timeout_s=20)
    for answer in errors(ranks, LATE_S):
        text = answer["error"]
        assert text.startswith("CommError: init: nccl: differs, expected the same in all ranks:\n")
        lines = [line.split() for line in text.splitlines()[1:]]
        assert [(line[1], line[3].rstrip(")"), line[-1]) for line in lines] == [
            (str(number), str(rank.pid), f"2.{number}") for number, rank in enumerate(ranks)
        ]


def test_sizes_differ(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.start(2)
    store(ranks, "file", tmp_path)
    ranks[0].tell("guard", rank=0, size=2, timeout_s=DEADLINE_S)
    ranks[1].tell("guard", rank=1, size=3, timeout_s=DEADLINE_S)
    first, second = errors(ranks, DEADLINE_S + LATE_S)
    assert second["missing"] == [2]
    assert "size: differs" in first["error"] or first["missing"] == [1]


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_the_size(pool: Pool, tmp_path: Path, rank: int, size: int) -> None:
    (one,) = pool.start(1)
    store([one], "file", tmp_path)
    one.tell("guard", rank=rank, size=size)
    text = f"ValueError: init: rank {rank} of size {size}, expected 0 <= rank < size"
    assert one.error()["error"] == text


def test_another_rank_than_that_of_the_group(pool: Pool) -> None:
    (one,) = pool.join(1)
    one.tell("guard", rank=1, size=2)
    text = "ValueError: init: rank 1 of size 2, expected rank 0 of size 1 as in the group"
    assert one.error()["error"] == text
    one.evaluate("globals().update(group=7)")
    one.tell("guard", rank=0, size=1)
    text = "TypeError: init: group: int, expected a ProcessGroup, a Store or None"
    assert one.error()["error"] == text


def test_a_store_of_an_earlier_run(pool: Pool, tmp_path: Path) -> None:
    """The cards of ranks that have ended are still in it."""
    ranks = pool.start(2)
    store(ranks, "file", tmp_path)
    open_guards(ranks)
    values(ranks)
    dead = ranks[1].pid
    ranks[1].kill()
    (late,) = pool.start(3)[2:]
    store([late], "file", tmp_path)
    late.tell("guard", rank=2, size=2)
    late.error()
    late.tell("guard", rank=0, size=2)
    assert "two processes are rank 0" in late.error()["error"]
    late.evaluate("group.delete_key('card/0')")
    late.tell("guard", rank=0, size=2, timeout_s=20)
    answer = late.error(LATE_S)
    assert f"cannot be done: rank 1 (process {dead} on " in answer["error"]
    assert "has ended" in answer["error"]
    assert answer["missing"] == [1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_of_the_store_hangs_or_ends(pool: Pool, tmp_path: Path, number: int) -> None:
    ranks = pool.start(2)
    store(ranks, "tcp", tmp_path)
    ranks[0].kill(number)
    ranks[1].tell("guard", rank=1, size=2, timeout_s=1.0)
    answer = ranks[1].error(1.0 + LATE_S)
    assert answer["missing"] == [0]
    text = "the store has failed" if number == signal.SIGKILL else "did not come, or the store hang"
    assert text in answer["error"]


def test_a_rank_ends_or_hangs_in_an_exchange(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.start(4)
    store(ranks, "file", tmp_path)
    open_guards(ranks, timeout_s=20)
    values(ranks)
    everywhere(ranks[3:], "position.__setitem__(slice(None), [5, 4, 'broadcast'])")
    for rank in ranks[:1]:
        code = "comm.exchange('handles', 1, op='register', number=7)"
        rank.tell("evaluate", code=code)
    time.sleep(0.2)
    ranks[2].kill(signal.SIGSTOP)
    ranks[1].kill()
    answer = ranks[0].error(LATE_S)
    text = f"register: call 7 on rank 0 of 4 cannot be done: rank 1 (process {ranks[1].pid} on "
    assert text in answer["error"]
    assert "has ended; rank 2 (process" in answer["error"]
    assert "has come to call 5 (broadcast) only; see their logs" in answer["error"]
    assert answer["missing"] == [1, 2, 3]


def test_timed_out(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.start(4)
    store(ranks, "file", tmp_path)
    open_guards(ranks)
    values(ranks)
    for rank, place in zip(ranks[1:], ([7, 6, "all_reduce"], [7, 6, "barrier"]), strict=False):
        rank.evaluate(f"position.__setitem__(slice(None), {place})")
    ranks[3].kill(signal.SIGSTOP)
    start = time.monotonic()
    text = ranks[0].evaluate("str(comm.timed_out('all_reduce', 7))")
    assert time.monotonic() - start < 3 + 1
    assert text.startswith(
        "all_reduce: call 7 on rank 0 of 4 was not done within 2 s: rank 3 (proc"
    )
    assert "does not answer (at 127.0.0.1 port " in text
    assert "): it is stopped, or hangs; rank 2 (process " in text
    assert "made call 7 as barrier; see their logs" in text
    ranks[0].tell("evaluate", code="comm.check('all_gather')")
    text = ranks[0].error()["error"]
    assert text.startswith("CommError: all_gather: init: this rank has failed: all_reduce: call 7")


def test_who_waits_for_a_dead_rank_is_not_missing(pool: Pool, tmp_path: Path) -> None:
    """In the call before, still or until it has failed; who is done with that is only slow."""
    ranks = pool.start(4)
    store(ranks, "file", tmp_path)
    open_guards(ranks)
    values(ranks)
    for rank in (ranks[0], ranks[2]):
        rank.evaluate("position.__setitem__(slice(None), [6, 5, 'all_reduce'])")
    ranks[0].evaluate("comm.fail(guard.CommError('rank 1 has ended'))")
    ranks[1].kill()
    code = "(lambda e: [str(e), list(e.missing)])(comm.timed_out('all_reduce', 7))"
    text, missing = ranks[3].evaluate(code)
    assert missing == [1]
    assert "has come to call 6 (all_reduce) only, and has failed: rank 1 has ended; rank 2" in text
    assert "has come to call 6 (all_reduce) only; see their logs" in text
    ranks[2].evaluate("position.__setitem__(slice(None), [6, 6, 'all_reduce'])")
    assert ranks[3].evaluate(code)[1] == [1, 2]


def test_all_have_come(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.start(2)
    store(ranks, "file", tmp_path)
    open_guards(ranks)
    values(ranks)
    ranks[1].evaluate("position.__setitem__(slice(None), [7, 6, 'all_reduce'])")
    code = "(lambda e: [str(e), list(e.missing)])(comm.timed_out('all_reduce', 7, timeout_s=600))"
    text, missing = ranks[0].evaluate(code)
    assert missing == []
    assert text == (
        "all_reduce: call 7 on rank 0 of 2 was not done within 600 s: all ranks have come to it; "
        "JITKERN_COMM_DEBUG=1 compares what they call; if GPUs are slow, or what was queued "
        "before, give a larger timeout_s"
    )


def test_all_have_come_to_the_set_up(pool: Pool, tmp_path: Path) -> None:
    """There is no call to name yet, and none to compare."""
    ranks = pool.start(2)
    store(ranks, "file", tmp_path)
    open_guards(ranks)
    values(ranks)
    assert ranks[0].evaluate("str(comm.timed_out('init', 0))") == (
        "init: the set-up on rank 0 of 2 was not done within 2 s: all ranks have come to it; "
        "if they are only slow, give a larger timeout_s"
    )


def test_the_first_failure_is_quoted(pool: Pool, tmp_path: Path) -> None:
    (one,) = pool.start(1)
    store([one], "file", tmp_path)
    open_guards([one])
    one.value()
    one.evaluate("[comm.fail(guard.CommError('one')), comm.fail(guard.CommError('two'))]")
    one.evaluate("comm.close('destroyed')")
    one.tell("evaluate", code="comm.check('x')")
    text = "CommError: x: init: this rank has failed: one; make a new one in all ranks"
    assert one.error()["error"] == text
