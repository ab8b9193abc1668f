"""Ranks that die, hang, are late or leave: the others hear of it in time, by name, and go on.

Over gloo, over a NCCL of our own, and over NCCL. Communicators are made with a long deadline, and
calls that cannot be done get a short one: so no test depends on how fast the machine is.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from ranks import CALL_S, LATE_S, Pool, Rank, all_do, all_tell, errors

BOUND_S = CALL_S + LATE_S


def ranks_of(pool: Pool, size: int) -> list[Rank]:
    """Ranks that have made a call, and whose next ones have a short deadline."""
    ranks = pool.make(size)
    all_do(ranks, "call()")
    if pool.kind == "cpu":
        all_do(ranks, f"set_group_timeout({CALL_S})")
    else:
        all_do(ranks, f"setattr(comm, 'timeout_s', {CALL_S})")
    return ranks


def gone(number: int, rank: Rank) -> str:
    return f"rank {number} (process {rank.pid} on "


def test_a_rank_that_comes_too_late(pool: Pool) -> None:
    ranks = pool.join(2)
    for early in (0, 1):
        ranks[early].tell("make(timeout_s=0.2)")
        answer = ranks[early].error(BOUND_S)
        text = f"TorchCommunicator: the set-up on rank {early} of 2 was not done within 0.2 s: rank"
        assert answer["error"].startswith(f"CommTimeoutError: {text} {1 - early} "), answer
        assert "has not come to it" in answer["error"] and answer["missing"] == [1 - early]
        assert (answer["op"], answer["number"]) == ("TorchCommunicator", 0)
    all_do(ranks, "make()")  # what they have left in the store is in nobody's way
    all_do(ranks, "comm.barrier()")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_ends_or_hangs(some: Pool, number: int) -> None:
    """A host that waits for the GPU is freed, and its context lives; so are later calls."""
    ranks = ranks_of(some, 2)
    ranks[1].kill(number)
    ranks[0].tell("call()")
    answer = ranks[0].error(BOUND_S)
    state = "has ended" if number == signal.SIGKILL else "does not answer: it has ended, is stop"
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call 2 on rank 0 of 2 ")
    assert f"{gone(1, ranks[1])}{os.uname().nodename}) {state}" in answer["error"]
    assert (answer["missing"], answer["number"], answer["op"]) == ([1], 2, "all_reduce")
    assert ranks[0].refuses("call()").startswith("Comm")
    assert ranks[0].ask("lives()")
    ranks[1].kill()


def test_a_rank_dies_in_the_middle_of_a_collective(pool: Pool) -> None:
    ranks = ranks_of(pool, 3)
    all_tell(ranks, "body('large', repeat_s=60.0)")
    time.sleep(0.3)
    ranks[1].kill()
    others = [ranks[0], ranks[2]]
    for answer in errors(others, BOUND_S):
        assert gone(1, ranks[1]) in answer["error"] and "has ended" in answer["error"]
        assert answer["missing"] == [1] and answer["number"] > 0, answer
    for rank in others:  # and they end by themselves
        rank.tell(f"leave(destroy={rank is ranks[2]})")
        assert rank.wait(10) == 0


def test_a_rank_is_late(some: Pool) -> None:
    """It is alive: it is named with the call that it has come to, and hears that it is late."""
    ranks = ranks_of(some, min(some.num_gpus or 3, 3))
    others = [ranks[0], *ranks[2:]]
    all_tell(others, "call()")
    answers = errors(others, BOUND_S)
    # The other one perhaps heard of that first.
    assert any(f"was not done within {CALL_S:g} s" in answer["error"] for answer in answers)
    for answer in answers:
        assert answer["error"].startswith("CommTimeoutError: all_reduce: call 2 on rank ")
        assert "has come to call 1 (all_reduce) only" in answer["error"], answer
        assert gone(1, ranks[1]) in answer["error"] and answer["missing"] == [1]
    assert ranks[0].refuses("comm.barrier()").startswith("Comm")
    ranks[1].tell("call()")
    if some.kind == "cpu":
        (answer,) = errors(ranks[1:2], BOUND_S)
        assert "has failed: all_reduce: call 2 on rank " in answer["error"], answer
        assert answer["missing"] == []
    else:  # it is not left alone
        assert ranks[1].answer()["seconds"] < BOUND_S
    assert all(all_do(ranks, "lives()"))


def test_a_message_that_nobody_sends(gpus: Pool) -> None:
    ranks = ranks_of(gpus, 2)
    ranks[0].tell("call('recv(ones(4), 1)')")
    (answer,) = errors(ranks[:1], BOUND_S)
    text = f"recv: rank 0 of 2 from rank 1 was not done within {CALL_S:g} s: {gone(1, ranks[1])}"
    assert answer["error"].startswith(f"CommTimeoutError: {text}"), answer
    assert answer["missing"] == [1]


def test_those_left_go_on(some: Pool) -> None:
    """By a new communicator of a new group. With two GPUs it is one rank that is left."""
    count = min(some.num_gpus or 3, 3)
    ranks = ranks_of(some, count)
    ranks[1].kill()
    left = [ranks[0], *ranks[2:]]
    all_tell(left, "call()")
    errors(left, BOUND_S)
    all_do(left, f"join({some.path()!r}, {{rank}}, {len(left)})")
    all_do(left, "make()" if some.kind == "cpu" else "make_nccl()")
    assert all_do(left, "comm.world_size") == [count - 1] * (count - 1)
    all_do(left, "body('broadcast')")
    all_do(left, "comm.close()")


def test_after_close(some: Pool) -> None:
    # NCCL takes longer to end than the short deadline.
    ranks = ranks_of(some, 2) if some.kind == "cpu" else some.make(2)
    all_do(ranks if some.kind != "cpu" else ranks[:1], "[comm.close(), comm.close()] and None")
    for code in ("all_reduce(ones(2))", "barrier()", "send(ones(2), 1)"):
        text = ranks[0].refuses(f"comm.{code}")
        assert text.startswith(f"CommError: {code.partition('(')[0]}: "), text
        assert "this rank has closed it; make a new one in all ranks" in text
    assert ranks[0].ask("[comm.rank, comm.world_size]") == [0, 2]
    if some.kind == "cpu":  # a rank that goes on alone hears of it, at its deadline
        ranks[1].tell("comm.barrier()")
        (answer,) = errors(ranks[1:], BOUND_S)
        assert answer["missing"] == [0]
        assert "has come to call 1 (all_reduce) only, and has closed it" in answer["error"]


def test_a_rank_drops_it(pool: Pool) -> None:
    """The thread that answers does not keep it alive, and says so."""
    ranks = ranks_of(pool, 2)
    ranks[0].ask("weak = weakref.ref(comm); comm = None")
    assert ranks[0].ask("weak() is None")
    ranks[1].tell("comm.barrier()")
    assert "has dropped it" in ranks[1].error(BOUND_S)["error"]


def test_a_fork_does_not_use_it(pool: Pool) -> None:
    ranks = pool.make(2)
    text = ranks[0].ask("fork('comm.barrier()')")
    assert text.startswith("CommError: barrier: TorchCommunicator: this rank has been forked"), text
    all_do(ranks, "comm.barrier()")
