"""Ranks over gloo that die, hang, are late or close: the others hear of it in time, and by name.

Communicators are made with a long deadline, and calls that cannot be done get a short one: so no
test depends on how fast the machine is.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from comm_ranks import LATE_S, Pool, Rank, errors, everywhere, make

DEADLINE_S = 0.3
BOUND_S = DEADLINE_S + LATE_S
BARRIER = "comm.barrier()"


def ranks_of(pool: Pool, size: int) -> list[Rank]:
    """Ranks that have made a call, and whose next ones have a short deadline."""
    ranks = pool.make(size)
    everywhere(ranks, "comm.broadcast(torch.ones(4))")
    everywhere(ranks, f"setattr(comm._rendezvous, 'timeout_s', {DEADLINE_S})")
    return ranks


def tell(ranks: list[Rank], code: str) -> None:
    for rank in ranks:
        rank.tell("evaluate", code=code)


def gone(number: int, rank: Rank) -> str:
    return f"rank {number} (process {rank.pid} on "


# -- at the set-up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_does_not_come(pool: Pool, number: int) -> None:
    ranks = pool.join(3)
    ranks[1].kill(number)
    others = [ranks[0], ranks[2]]
    for rank in others:
        rank.tell("make", timeout_s=1.0)
    for mine, answer in zip((0, 2), errors(others, 1.0 + LATE_S), strict=True):
        text = f"TorchCommunicator: the set-up on rank {mine} of 3 was not done within 1 s: rank 1"
        assert answer["error"].startswith(f"CommTimeoutError: {text} has not come to it"), answer
        assert answer["missing"] == [1]
        assert (answer["op"], answer["number"]) == ("TorchCommunicator", 0)


def test_a_rank_that_comes_too_late(pool: Pool) -> None:
    ranks = pool.join(2)
    for early in (0, 1):
        ranks[early].tell("make", timeout_s=0.2)
        assert ranks[early].error(BOUND_S)["missing"] == [1 - early]
    make(ranks)  # what they have left in the store is in nobody's way
    everywhere(ranks, BARRIER)


# -- in a call -------------------------------------------------------------------------------------


def test_a_rank_dies_in_the_middle_of_a_collective(pool: Pool) -> None:
    """Nobody waits for the deadline."""
    ranks = pool.make(3, timeout_s=600)
    for rank in ranks:
        rank.tell("body", name="large", repeat_s=60.0)
    time.sleep(0.3)
    ranks[1].kill()
    others = [ranks[0], ranks[2]]
    for mine, answer in zip((0, 2), errors(others), strict=True):
        assert f"on rank {mine} of 3 cannot be done: " in answer["error"]
        assert gone(1, ranks[1]) in answer["error"] and "has ended" in answer["error"]
        assert answer["missing"] == [1] and answer["number"] > 0, answer
    for rank in others:  # and they end by themselves
        rank.tell("exit", destroy=rank is ranks[2])
        assert rank.process.wait(10) == 0


def test_a_rank_hangs(pool: Pool) -> None:
    ranks = ranks_of(pool, 2)
    ranks[1].kill(signal.SIGSTOP)
    tell(ranks[:1], BARRIER)
    (answer,) = errors(ranks[:1], BOUND_S)
    assert gone(1, ranks[1]) + f"{os.uname().nodename}) does not answer: it is" in answer["error"]
    assert answer["missing"] == [1]


def test_a_rank_is_late(pool: Pool) -> None:
    """It is alive: it is named with the call that it has come to."""
    op, call = "all_to_all", "comm.all_to_all(torch.ones(12), torch.ones(12))"
    ranks = ranks_of(pool, 3)
    others = [ranks[0], ranks[2]]
    tell(others, call)
    answers = errors(others, BOUND_S)
    late = [answer for answer in answers if "was not done within 0.3 s" in answer["error"]]
    assert late  # the other one perhaps heard of that first
    for mine, answer in zip((0, 2), answers, strict=True):
        assert answer["error"].startswith(f"CommTimeoutError: {op}: call 2 on rank {mine} of 3 ")
        assert "has come to call 1 (broadcast) only" in answer["error"], answer
        assert gone(1, ranks[1]) in answer["error"]
        assert (answer["missing"], answer["number"], answer["op"]) == ([1], 2, op)
    tell(ranks[:1], BARRIER)
    text = f"CommError: barrier: TorchCommunicator: this rank has failed: {op}: call 2 on rank 0"
    assert ranks[0].error()["error"].startswith(text)
    # The one that was late hears of it.
    tell(ranks[1:2], call)
    (answer,) = errors(ranks[1:2], BOUND_S)
    assert f"has failed: {op}: call 2 on rank " in answer["error"], answer
    assert not answer.get("missing")


@pytest.mark.parametrize("call", ["send(torch.ones(4), 1)", "recv(torch.ones(4), 1)"])
def test_a_message_that_nobody_takes_or_sends(pool: Pool, call: str) -> None:
    ranks = ranks_of(pool, 2)
    tell(ranks[:1], f"comm.{call}")
    (answer,) = errors(ranks[:1], BOUND_S)
    path = "to rank 1" if call.startswith("send") else "from rank 1"
    text = f"{call[:4]}: rank 0 of 2 {path} was not done within 0.3 s: "
    assert answer["error"].startswith(f"CommTimeoutError: {text}{gone(1, ranks[1])}")
    assert answer["missing"] == [1]


def test_no_thread_of_gloo_is_left(pool: Pool) -> None:
    """The group can be destroyed: its destructor waits for its threads, one left for 30 minutes."""
    ranks = ranks_of(pool, 2)
    tell(ranks[:1], "comm.all_reduce(torch.ones(1 << 20))")
    errors(ranks[:1], BOUND_S)
    for rank in ranks:
        rank.tell("exit", destroy=True)
        assert rank.process.wait(60) == 0


# -- the end ---------------------------------------------------------------------------------------


def test_after_close(pool: Pool) -> None:
    ranks = ranks_of(pool, 2)
    assert ranks[0].evaluate("[comm.close(), comm.destroy()]") == [None, None]
    for code in ("comm.all_reduce(torch.ones(2))", BARRIER, "comm.send(torch.ones(2), 1)"):
        tell(ranks[:1], code)
        op = code[5:].partition("(")[0]
        text = f"CommError: {op}: TorchCommunicator: this rank has closed it; make a new one in"
        assert ranks[0].error()["error"].startswith(text)
    assert ranks[0].evaluate("[comm.rank, comm.size]") == [0, 2]
    # A rank that goes on alone hears of it, at its deadline.
    tell(ranks[1:], BARRIER)
    (answer,) = errors(ranks[1:], BOUND_S)
    assert answer["missing"] == [0]
    assert "has come to call 1 (broadcast) only, and has closed it" in answer["error"]


def test_a_rank_drops_it(pool: Pool) -> None:
    """The thread that answers does not keep it alive, and says so."""
    ranks = ranks_of(pool, 2)
    ranks[0].evaluate("globals().update(weak=weakref.ref(comm), comm=None)")
    assert ranks[0].evaluate("weak() is None")
    tell(ranks[1:], BARRIER)
    (answer,) = errors(ranks[1:], BOUND_S)
    assert f"on {os.uname().nodename}) has dropped it" in answer["error"]


def test_abort_by_another_thread(pool: Pool) -> None:
    """The call that waits raises at once; the others hear of it at their deadline, or sooner."""
    ranks = pool.make(3)
    ranks[2].evaluate("setattr(comm._rendezvous, 'timeout_s', 1.0)")
    ranks[0].evaluate("threading.Timer(0.3, comm.abort).start()")
    tell([ranks[0], ranks[2]], BARRIER)
    answer = ranks[0].error(10.0)
    text = "CommError: barrier: TorchCommunicator: this rank has aborted it; make a new one in all "
    assert answer["error"].startswith(text)
    ranks[2].error(1.0 + LATE_S)
    ranks[0].evaluate("comm.abort()")


def test_a_fork_does_not_use_it(pool: Pool) -> None:
    ranks = pool.make(2)
    text = ranks[0].ask("fork")
    start = "CommError: barrier: TorchCommunicator: this rank has been forked"
    assert text.startswith(start), text
    everywhere(ranks, BARRIER)
