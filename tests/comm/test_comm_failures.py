"""Ranks that die, hang, are late or close: every other rank hears of it, in time and by name."""

from __future__ import annotations

import os
import signal
import time

import pytest
from comm_ranks import LATE_S, Pool, Rank, errors, everywhere, make

DEADLINE_S = 2.0
BOUND_S = DEADLINE_S + LATE_S
X = "globals().setdefault('x', torch.ones(4))"
LOOP = {"name": "large", "repeat_s": 40.0}


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
        rank.tell("make", timeout_s=DEADLINE_S)
    for mine, answer in zip((0, 2), errors(others, BOUND_S), strict=True):
        text = f"TorchCommunicator: the set-up on rank {mine} of 3 was not done within 2 s: rank 1"
        assert answer["error"].startswith(f"CommTimeoutError: {text} has not come to it"), answer
        assert answer["missing"] == [1]
        assert (answer["op"], answer["number"]) == ("TorchCommunicator", 0)


def test_a_rank_that_dies_while_it_waits(pool: Pool) -> None:
    ranks = pool.join(3)
    for rank in ranks[:2]:
        rank.tell("make", timeout_s=DEADLINE_S)
    time.sleep(0.3)
    ranks[1].kill()
    (answer,) = errors(ranks[:1], BOUND_S)
    assert answer["missing"] == [1, 2]
    assert "was not done within 2 s: rank 1 (process" in answer["error"]
    assert "has ended; rank 2 has not come to it" in answer["error"]


def test_a_rank_that_comes_too_late(pool: Pool) -> None:
    ranks = pool.join(2)
    ranks[0].tell("make", timeout_s=0.5)
    assert errors(ranks[:1], BOUND_S)[0]["missing"] == [1]
    ranks[1].tell("make", timeout_s=1)
    (answer,) = errors(ranks[1:], BOUND_S)
    assert answer["missing"] == [0]
    make(ranks)  # and what they have left in the store is in nobody's way
    everywhere(ranks, "comm.barrier()")


def test_versions_differ(pool: Pool) -> None:
    ranks = pool.join(2)
    ranks[1].evaluate("setattr(rendezvous.jitkern, '__version__', '0.0.9')")
    for rank in ranks:
        rank.tell("make", timeout_s=20)
    for answer in errors(ranks, BOUND_S):
        text = "CommError: TorchCommunicator: jitkern: differs, expected the same in all ranks:\n"
        assert answer["error"].startswith(text)
        assert f"{gone(1, ranks[1])}" in answer["error"]
        assert "  0.0.9" in answer["error"]
    ranks[1].kill()


# -- in a call -------------------------------------------------------------------------------------


def test_a_rank_dies_in_the_middle_of_a_collective(pool: Pool) -> None:
    ranks = pool.make(3, timeout_s=30)
    for rank in ranks:
        rank.tell("body", **LOOP)
    time.sleep(0.5)
    ranks[1].kill()
    others = [ranks[0], ranks[2]]
    for mine, answer in zip((0, 2), errors(others), strict=True):
        assert answer["seconds"] < 0.5 + LATE_S  # the connection tells, long before the deadline
        assert f"on rank {mine} of 3 cannot be done: " in answer["error"]
        assert f"{gone(1, ranks[1])}" in answer["error"]
        assert "has ended" in answer["error"]
        assert answer["missing"] == [1], answer
        assert answer["number"] > 0
    for rank in others:  # and they end by themselves
        rank.tell("exit", destroy=rank is ranks[2])
        assert rank.process.wait(10) == 0


def test_a_rank_hangs_in_the_middle_of_a_collective(pool: Pool) -> None:
    ranks = pool.make(3, timeout_s=DEADLINE_S)
    for rank in ranks:
        rank.tell("body", **LOOP)
    time.sleep(0.5)
    ranks[1].kill(signal.SIGSTOP)
    others = [ranks[0], ranks[2]]
    for answer in errors(others, 0.5 + BOUND_S + 1):
        assert f"{gone(1, ranks[1])}" in answer["error"]
        assert "does not answer: it is stopped" in answer["error"]
        assert answer["missing"] == [1]


CALLS = {
    "all_reduce": "comm.all_reduce(torch.ones(4))",
    "all_to_all": "comm.all_to_all(torch.ones(12), torch.ones(12))",
    "broadcast": "comm.broadcast(torch.ones(4), 1)",
}


@pytest.mark.parametrize("op", CALLS)
def test_a_rank_is_late(pool: Pool, op: str) -> None:
    """It is alive: it is named with the call that it has come to, and all can go on with others."""
    ranks = pool.make(3, timeout_s=1.0)
    everywhere(ranks, "comm.broadcast(torch.ones(4))")
    others = [ranks[0], ranks[2]]
    tell(others, CALLS[op])
    answers = errors(others, 1.0 + LATE_S)
    late = [answer for answer in answers if "was not done within 1 s" in answer["error"]]
    assert late  # the other one perhaps heard of that first
    for mine, answer in zip((0, 2), answers, strict=True):
        assert answer["error"].startswith(f"CommTimeoutError: {op}: call 2 on rank {mine} of 3 ")
        assert "has come to call 1 (broadcast) only" in answer["error"], answer
        assert f"{gone(1, ranks[1])}" in answer["error"]
        assert (answer["missing"], answer["number"], answer["op"]) == ([1], 2, op)
    tell(ranks[:1], "comm.barrier()")
    again = ranks[0].error(LATE_S)["error"]
    text = f"CommError: barrier: TorchCommunicator: this rank has failed: {op}: call 2 on rank 0"
    assert again.startswith(text)
    # The one that was late finds out, and does not wait.
    tell(ranks[1:2], CALLS[op])
    (answer,) = errors(ranks[1:2], 1.0 + LATE_S)
    assert answer["missing"] == []
    assert "all ranks have come to it; rank " in answer["error"]
    assert f"has failed: {op}: call 2 on rank " in answer["error"]


@pytest.mark.parametrize("call", ["send(torch.ones(4), 1)", "recv(torch.ones(4), 1)"])
def test_a_message_that_nobody_takes_or_sends(pool: Pool, call: str) -> None:
    ranks = pool.make(2, timeout_s=1.0)
    tell(ranks[:1], f"comm.{call}")
    (answer,) = errors(ranks[:1], 1.0 + LATE_S)
    path = "to rank 1" if call.startswith("send") else "from rank 1"
    text = f"{call[:4]}: rank 0 of 2 {path} was not done within 1 s: "
    assert answer["error"].startswith(f"CommTimeoutError: {text}{gone(1, ranks[1])}")
    assert answer["missing"] == [1]


def test_ends_between_calls(pool: Pool) -> None:
    ranks = pool.make(2, timeout_s=20)
    everywhere(ranks, "comm.barrier()")
    ranks[1].kill()
    tell(ranks[:1], "comm.barrier()")
    (answer,) = errors(ranks[:1], LATE_S)
    assert f"barrier: call 2 on rank 0 of 2 cannot be done: {gone(1, ranks[1])}" in answer["error"]


def test_the_groups_own_deadline_is_shorter(pool: Pool) -> None:
    ranks = pool.join(2, timeout_s=1.0)
    make(ranks, timeout_s=60)
    tell(ranks[:1], "comm.barrier()")
    (answer,) = errors(ranks[:1], 1.0 + LATE_S)
    assert answer["missing"] == [1]
    assert "was not done within 1" in answer["error"]


def test_no_thread_of_gloo_is_left(pool: Pool) -> None:
    """The group can be destroyed: its destructor waits for its threads, one left for 30 minutes."""
    ranks = pool.make(2, timeout_s=0.5)
    tell(ranks[:1], "comm.all_reduce(torch.ones(1 << 20))")
    errors(ranks[:1], 0.5 + LATE_S)
    for rank in ranks:
        rank.tell("exit", destroy=True)
        assert rank.process.wait(60) == 0


# -- the end ---------------------------------------------------------------------------------------


def test_after_destroy(pool: Pool) -> None:
    ranks = pool.make(2, timeout_s=1.0)
    assert ranks[0].evaluate("[comm.close(), comm.destroy()]") == [None, None]
    for code in ("comm.all_reduce(torch.ones(2))", "comm.barrier()", "comm.send(torch.ones(2), 1)"):
        tell(ranks[:1], code)
        op = code[5:].partition("(")[0]
        text = f"CommError: {op}: TorchCommunicator: this rank has closed it; make a new one in"
        assert ranks[0].error()["error"].startswith(text)
    assert ranks[0].evaluate("[comm.rank, comm.size]") == [0, 2]
    # A rank that goes on alone hears of it, with the deadline.
    tell(ranks[1:], "comm.barrier()")
    (answer,) = errors(ranks[1:], 1.0 + LATE_S)
    assert answer["missing"] == [0]
    assert "has made no call yet, and has closed it" in answer["error"]


@pytest.mark.parametrize("destroyed", [True, False])
def test_a_rank_drops_it(pool: Pool, destroyed: bool) -> None:
    """It does not live for its board's sake, which goes on to answer."""
    ranks = pool.make(2, timeout_s=1.0)
    everywhere(ranks, "comm.barrier()")
    if destroyed:
        ranks[0].evaluate("comm.close()")
    ranks[0].evaluate("globals().update(weak=weakref.ref(comm), comm=None)")
    assert ranks[0].evaluate("weak() is None")
    tell(ranks[1:], "comm.barrier()")
    (answer,) = errors(ranks[1:], 1.0 + LATE_S)
    place = "has come to call 1 (barrier) only, and has closed it"
    assert (place if destroyed else f"on {os.uname().nodename}) has dropped it") in answer["error"]


def test_a_rank_dies_before_the_others_destroy(pool: Pool) -> None:
    ranks = pool.make(2, timeout_s=DEADLINE_S)
    ranks[1].kill()
    ranks[0].evaluate("comm.close()")
    ranks[0].tell("exit", destroy=True)
    assert ranks[0].process.wait(10) == 0


def test_abort_by_another_thread(pool: Pool) -> None:
    """The call that waits raises at once; the others hear of it with their deadline, or sooner."""
    ranks = pool.make(3, timeout_s=DEADLINE_S)
    ranks[0].evaluate("threading.Timer(0.5, comm.abort).start()")
    tell([ranks[0], ranks[2]], "comm.barrier()")
    answer = ranks[0].error(DEADLINE_S)
    text = "CommError: barrier: TorchCommunicator: this rank has aborted it; make a new one in all "
    assert answer["error"].startswith(text)
    (answer,) = errors(ranks[2:], BOUND_S)
    assert answer["missing"] == [1]
    ranks[0].evaluate("comm.abort()")


def test_with(pool: Pool) -> None:
    ranks = pool.make(2)
    code = "[comm.__enter__().rank, comm.__exit__(None, None, None)]"
    assert everywhere(ranks, code) == [[0, None], [1, None]]
    tell(ranks, "comm.barrier()")
    assert all("this rank has closed it" in answer["error"] for answer in errors(ranks))


def test_a_fork_does_not_use_it(pool: Pool) -> None:
    ranks = pool.make(2, timeout_s=20)
    text = ranks[0].ask("fork")
    start = "CommError: barrier: TorchCommunicator: this rank has been forked"
    assert text.startswith(start), text
    everywhere(ranks, "comm.barrier()")
