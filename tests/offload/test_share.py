"""Ranks that meet in one memory, and what they may ask for."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ranks import NUM_BYTES, Start, all_say, errors, meet, step

from jitkern.errors import ShareError
from jitkern.offload.share import Meeting, PoolHandle, Share, attach

# -- together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2])
def test_ranks_see_each_others_bytes(start: Start, first: int) -> None:
    ranks = start(3)
    order = sorted(range(3), key=lambda rank: rank != first)  # rank 0 may come last
    for rank in order:
        ranks[rank].open(rank, 3)
    for rank in order:
        ranks[rank].value()
    for rank, process in enumerate(ranks):
        assert process.ask("read", start=4096 * rank, stop=4096 * rank + 1) == [0]
        process.ask("write", at=4096 * rank, byte=rank + 1)
    step(ranks, "touched")
    for process in ranks:
        assert process.ask("read", start=0, stop=NUM_BYTES)[::4096] == [1, 2, 3]
    step(ranks, "registered")
    step(ranks, "registered")  # a name may come again


def test_one_rank(name: str) -> None:
    before = os.listdir("/proc/self/fd")
    meeting = Meeting(Share(name, 0, 1), 5)
    assert (meeting.num_bytes, meeting.handle) == (5, PoolHandle(name, 5))
    assert os.fstat(meeting.fd).st_size == 5
    meeting.step("touched")
    fd = attach(pickle.loads(pickle.dumps(meeting.handle)))
    assert os.path.sameopenfile(fd, meeting.fd)
    assert not os.get_inheritable(fd)
    os.close(fd)
    meeting.close()
    meeting.close()
    assert meeting.fd == -1
    assert os.listdir("/proc/self/fd") == before
    assert not [thread for thread in threading.enumerate() if name in thread.name]
    with pytest.raises(ShareError, match="step 'more': closed by this process"):
        meeting.step("more")


def test_a_fourth_process_attaches(start: Start) -> None:
    *ranks, fourth = start(4)
    meet(ranks)
    ranks[1].ask("write", at=7, byte=70)
    handle = ranks[2].ask("handle")
    ranks[0].tell("step", name="touched")  # which keeps it busy, but not its thread
    fourth.ask("attach", handle=handle)
    assert fourth.ask("read", start=7, stop=8) == [70]
    fourth.ask("write", at=8, byte=80)
    fourth.kill()  # no matter to the ranks
    ranks[1].tell("step", name="touched")
    ranks[2].tell("step", name="touched")
    for process in ranks:
        process.value()
        assert process.ask("read", start=7, stop=9) == [70, 80]


def test_nobody_truncates_the_memory(start: Start) -> None:
    ranks = start(2)
    meet(ranks)
    for process in ranks:
        for num_bytes in (0, NUM_BYTES - 1, NUM_BYTES + 1):
            process.tell("truncate", num_bytes=num_bytes)
            assert "Operation not permitted" in process.error()


def test_no_descriptor_is_left_or_handed_on(start: Start) -> None:
    ranks = start(3)
    before = [process.ask("descriptors") for process in ranks]
    meet(ranks)
    ranks[2].ask("attach", handle=ranks[0].ask("handle"))
    step(ranks, "touched")
    for process in ranks:
        assert process.ask("inheritable") == []
    for process in ranks:
        process.ask("close")
    assert [process.ask("descriptors") for process in ranks] == [before[0], before[1], before[2]]


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_pool_may_have_the_same_name(start: Start, first: int) -> None:
    """At once, in whatever order the ranks leave one and come to the other."""
    ranks = start(2)
    meet(ranks)
    step(ranks, "touched")
    ranks[1].ask("write", at=0, byte=1)
    for rank in (first, 1 - first):
        ranks[rank].ask("close")
        ranks[rank].open(rank, 2)
    for process in ranks:
        process.value()
    step(ranks, "touched")
    assert ranks[0].ask("read", start=0, stop=1) == [0]


def test_a_python_without_memfd_create(start: Start) -> None:
    """Such as uv's: the C library has it all the same."""
    ranks = start(2)
    ranks[0].ask("forget_memfd_create")
    meet(ranks)
    ranks[0].tell("truncate", num_bytes=0)
    assert "Operation not permitted" in ranks[0].error()


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_child_that_closes_does_not_disturb(start: Start, rank: int) -> None:
    ranks = start(2)
    meet(ranks)
    said = ranks[rank].ask("fork_and_close")
    assert said.startswith("-1 ShareError: PinnedPool")  # closed already
    step(ranks, "touched")
    fd = ranks[1].ask("handle")
    ranks[0].ask("attach", handle=fd)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_child_does_not_keep_a_rank_alive(start: Start, rank: int) -> None:
    ranks = start(2)
    meet(ranks)
    child = ranks[rank].ask("fork")
    try:
        ranks[rank].kill()
        said = f"rank {rank} went away"
        all_say(errors([ranks[1 - rank]], "touched"), "PinnedPool", said)
    finally:
        os.kill(child, signal.SIGKILL)


# -- wrong arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        ((3, 0, 1), TypeError, "name: int, expected str"),
        (("", 0, 1), ValueError, "name: '', expected 1 to 64 letters, digits, '.', '_' and '-'"),
        (("a/b", 0, 1), ValueError, "name: 'a/b', expected 1 to 64 letters"),
        (("a\n", 0, 1), ValueError, "name: 'a\\n', expected 1 to 64 letters"),
        (("a" * 65, 0, 1), ValueError, "expected 1 to 64 letters"),
        (("a", None, 1), TypeError, "rank: None, expected int"),
        (("a", True, 2), TypeError, "rank: bool, expected int"),
        (("a", -1, 1), ValueError, "rank: -1, expected at least 0"),
        (("a", 3, 2), ValueError, "rank 3, expected below num_ranks 2"),
        (("a", 0, 1.0), TypeError, "num_ranks: float, expected int"),
        (("a", 0, 0), ValueError, "num_ranks: 0, expected at least 1"),
        (("a", 0, 1, "5"), TypeError, "timeout_s: str, expected float"),
        (("a", 0, 1, 0), ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
        (("a", 0, 1, float("nan")), ValueError, "timeout_s: nan, expected above 0"),
        (("a", 0, 1, float("inf")), ValueError, "timeout_s: inf, expected above 0"),
    ],
)
def test_wrong_shares(args: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        Share(*args)
    assert str(caught.value).startswith("PinnedPool: share")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: Meeting("a", 1), TypeError, "PinnedPool: share: str, expected Share"),
        (
            lambda: Meeting(Share("a", 0, 1), 0),
            ValueError,
            "PinnedPool: num_bytes: 0, expected at least 1",
        ),
        (
            lambda: Meeting(Share("a", 0, 1), 2**63),
            ValueError,
            f"PinnedPool: num_bytes: {2**63}, expected at most {2**63 - 1}",
        ),
        (
            lambda: Meeting(Share("a", 0, 1), 1.5),
            TypeError,
            "PinnedPool: num_bytes: float, expected int",
        ),
        (lambda: PoolHandle("a b", 1), ValueError, "PoolHandle: name: 'a b', expected 1 to 64"),
        (
            lambda: PoolHandle("a", 0),
            ValueError,
            "PoolHandle: num_bytes: 0, expected at least 1",
        ),
        (lambda: attach(None), TypeError, "attach: handle: None, expected PoolHandle"),
        (
            lambda: attach(PoolHandle("a", 1), -1),
            ValueError,
            "attach: timeout_s: -1, expected above 0",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(text)
    assert os.listdir("/proc/self/fd") == before


def test_wrong_steps(name: str) -> None:
    meeting = Meeting(Share(name, 0, 1), 1)
    try:
        for args, kind, text in (
            ((1,), TypeError, "step: name: int, expected str"),
            (("",), ValueError, "step: name: '', expected 1 to 64 characters"),
            (("a", 5), TypeError, "step: failure: int, expected str"),
        ):
            with pytest.raises(kind, match=text):
                meeting.step(*args)
        meeting.step("touched")  # none of them was one
    finally:
        meeting.close()
