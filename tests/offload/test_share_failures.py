"""Ranks that fail, go away or never come: every other one hears of it, by number."""

from __future__ import annotations

import signal
import time

import pytest
from ranks import Start, all_say, errors, meet, step


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("waiting", [False, True], ids=["before", "in"])
@pytest.mark.parametrize("where", ["touched", "registered"])
def test_a_rank_that_is_killed(start: Start, victim: int, waiting: bool, where: str) -> None:
    ranks = start(3)
    meet(ranks)
    if where == "registered":
        step(ranks, "touched")
    others = [process for process in ranks if process is not ranks[victim]]
    others[0].tell("step", name=where)
    if waiting:
        ranks[victim].tell("step", name=where)
    ranks[victim].kill()
    others[1].tell("step", name=where)
    texts = [process.error() for process in others]
    prefix = f"PinnedPool: share '{ranks[0].name}': step '{where}': "
    all_say(texts, prefix + f"rank {victim} went away", "its process has ended")
    assert errors(others, "the next") == [text.replace(where, "the next", 1) for text in texts]


def test_a_rank_that_is_killed_between_steps(start: Start) -> None:
    ranks = start(3)
    meet(ranks)
    step(ranks, "touched")
    ranks[2].kill()
    all_say(errors(ranks[:2], "registered"), "PinnedPool", "rank 2 went away")


def test_a_rank_that_is_killed_before_it_connects(start: Start) -> None:
    ranks = start(3)
    ranks[1].kill()
    for rank in (0, 2):
        ranks[rank].open(rank, 3, timeout_s=1)
        ranks[rank].value()
    texts = errors([ranks[0], ranks[2]], "touched")
    said = "step 'touched': rank 1 (never connected) did not come to step 'touched' within 1 s"
    all_say(texts, "PinnedPool", said, "give a larger timeout_s", ranks[0].name)


def test_rank_0_that_never_comes(start: Start) -> None:
    ranks = start(2)
    for rank, process in enumerate(ranks, 1):
        process.open(rank, 3, timeout_s=0.3)
    texts = [process.error() for process in ranks]
    all_say(texts, "PinnedPool", "rank 0 did not come within 0.3 s", "network namespace")


@pytest.mark.parametrize("missing", [[0], [2], [1, 2]], ids=str)
def test_ranks_that_do_not_come_to_a_step(start: Start, missing: list[int]) -> None:
    ranks = start(3)
    meet(ranks, timeout_s=1)
    step(ranks, "touched")
    there = [process for rank, process in enumerate(ranks) if rank not in missing]
    named = ", ".join(f"rank {rank}" for rank in missing)
    said = f"{named} did not come to step 'registered' within 1 s"
    all_say(errors(there, "registered"), "PinnedPool", said)
    late = [ranks[rank] for rank in missing]
    all_say(errors(late, "registered"), "PinnedPool", said)  # they hear it, too


def test_the_shortest_timeout_counts(start: Start) -> None:
    ranks = start(3)
    for rank, timeout_s in enumerate([300, 1, 300]):
        ranks[rank].open(rank, 3, timeout_s=timeout_s)
    for process in ranks:
        process.value()
    ranks[1].tell("step", name="touched")
    time.sleep(0.1)
    ranks[0].tell("step", name="touched")
    texts = [process.error() for process in ranks[:2]]
    all_say(texts, "PinnedPool", "rank 2 did not come", "within 1 s")


def test_a_rank_that_hangs(start: Start) -> None:
    """Rank 0, stopped as a whole, has nobody who would speak for it."""
    ranks = start(2)
    ranks[0].open(0, 2)
    ranks[1].ask("lose_patience")
    ranks[1].open(1, 2, timeout_s=1)
    for process in ranks:
        process.value()
    ranks[0].process.send_signal(signal.SIGSTOP)
    all_say(errors(ranks[1:], "touched"), "PinnedPool", "rank 0 does not answer within 1 s")
    ranks[0].process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_rank_that_fails(start: Start, culprit: int, last: bool) -> None:
    ranks = start(3)
    meet(ranks)
    order = sorted(range(3), key=lambda rank: (rank == culprit) == last)
    reason = "no memory: 1 GiB, expected 4 ☹" if last else "☹" * 100_000
    for rank in order:
        failure = reason if rank == culprit else None
        ranks[rank].tell("step", name="touched", failure=failure)
    texts = [process.error() for process in ranks]
    said = f"rank {culprit} failed at step 'touched': {reason[:4000]}"
    all_say(texts, "PinnedPool", said)
    assert len(set(texts)) == 1


def test_a_rank_at_another_step(start: Start) -> None:
    ranks = start(2)
    meet(ranks)
    ranks[0].tell("step", name="touched")
    ranks[1].tell("step", name="registered")
    for process in ranks:
        text = process.error()
        assert "came to step" in text
        assert "'touched'" in text
        assert "'registered'" in text


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_interrupt_gets_through(start: Start, culprit: int) -> None:
    ranks = start(3)
    meet(ranks)
    ranks[culprit].tell("step", name="touched", interrupt_s=0.5)
    assert ranks[culprit].error() == "KeyboardInterrupt: "
    others = [process for process in ranks if process is not ranks[culprit]]
    said = f"rank {culprit} failed at step 'touched': interrupted by KeyboardInterrupt"
    all_say(errors(others, "touched"), "PinnedPool", said)
    all_say(errors([ranks[culprit]], "touched"), "PinnedPool", "interrupted by KeyboardInterrupt")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_closes(start: Start, culprit: int) -> None:
    ranks = start(3)
    meet(ranks)
    step(ranks, "touched")
    ranks[culprit].ask("close")
    others = [process for process in ranks if process is not ranks[culprit]]
    said = f"rank {culprit} has closed the pool"
    all_say(errors(others, "registered"), "PinnedPool", said)


def test_a_failure_is_told_to_who_comes_late(start: Start) -> None:
    ranks = start(3)
    for rank in (0, 1):
        ranks[rank].open(rank, 3)
        ranks[rank].value()
    ranks[1].kill()
    all_say(errors(ranks[:1], "touched"), "PinnedPool", "rank 1 went away")
    ranks[2].open(2, 3)
    all_say([ranks[2].error()], "PinnedPool", "rank 1 went away")
