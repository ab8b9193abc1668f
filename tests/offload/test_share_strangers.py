"""Ranks that do not agree, and something or somebody else at the other end."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
from children import wait_until
from ranks import NUM_BYTES, PROMPT_S, Start, all_say, errors, meet, step

from jitkern.errors import ShareError
from jitkern.offload import wire
from jitkern.offload.share import Meeting, PoolHandle, Share, attach

# -- ranks that do not agree -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_bytes": 1}, f"num_bytes 1, expected {NUM_BYTES} as in rank 0"),
        ({"num_ranks": 5}, "num_ranks 5, expected 3 as in rank 0"),
    ],
    ids=["num_bytes", "num_ranks"],
)
def test_ranks_that_disagree(start: Start, config: dict[str, int], said: str) -> None:
    ranks = start(3)
    for rank in (0, 2):
        ranks[rank].open(rank, 3)
        ranks[rank].value()
    ranks[1].open(**{"rank": 1, "num_ranks": 3, **config})
    pid = ranks[1].process.pid
    texts = [ranks[1].error(), *errors([ranks[0], ranks[2]], "touched")]
    all_say(texts, "PinnedPool", f"rank 1 (process {pid}): {said}")


def test_two_processes_of_one_rank(start: Start) -> None:
    ranks = start(3)
    for process, rank in zip(ranks, [0, 1, 1], strict=True):
        process.open(rank, 3)
        if process is not ranks[2]:
            process.value()
    first, second = (process.process.pid for process in ranks[1:])
    said = f"rank 1 (process {second}): process {first} is rank 1 already"
    all_say([ranks[2].error(), *errors(ranks[:2], "touched")], "PinnedPool", said)


def test_a_stranger_is_no_matter_to_ranks_that_have_met(start: Start) -> None:
    *ranks, stranger = start(3)
    meet(ranks)
    for config in ({"rank": 1, "num_ranks": 2}, {"rank": 3, "num_ranks": 4}):
        stranger.open(**config)
        all_say([stranger.error()], "PinnedPool", "expected")
    step(ranks, "touched")


def test_a_name_that_is_taken(start: Start) -> None:
    *ranks, second = start(3)
    meet(ranks)
    second.open(0, 2)
    said = f"rank 0: address in use: process {ranks[0].process.pid} of uid {os.geteuid()}"
    all_say([second.error()], f"PinnedPool: share '{second.name}': {said}")
    step(ranks, "touched")


def test_a_name_is_free_when_its_owner_is_killed(start: Start) -> None:
    """Though the other rank, and a process that the owner has forked, live on."""
    owner, other, *new = start(4)
    meet([owner, other])
    child = owner.ask("fork")
    try:
        owner.kill()
        meet(new)
        step(new, "touched")
    finally:
        os.kill(child, signal.SIGKILL)
    all_say(errors([other], "touched"), "PinnedPool", "rank 0 went away")


# -- something or somebody else --------------------------------------------------------------------


def test_a_rank_of_another_user_is_refused(start: Start) -> None:
    """By rank 0, and rank 0 by the others; who is as expected may come then."""
    ranks = start(2)
    mine = os.geteuid()
    ranks[0].open(0, 2)
    ranks[0].value()
    ranks[1].ask("pretend_uid", uid=12345)
    ranks[1].open(1, 2)
    said = f"process 4711 in the place of rank 0 is of uid 12345, expected uid {mine}"
    all_say([ranks[1].error()], "PinnedPool", said)
    ranks[0].ask("pretend_uid", uid=54321)
    ranks[1].ask("pretend_uid", uid=mine)
    ranks[1].open(1, 2)
    said = f"process 4711 is of uid 54321, expected uid {mine} as rank 0"
    all_say([ranks[1].error()], "PinnedPool", said)
    ranks[0].ask("pretend_uid", uid=mine)
    ranks[1].open(1, 2)
    ranks[1].value()
    step(ranks, "touched")


def test_the_kernel_says_who_the_other_is() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert wire.peer(one) == (os.getpid(), os.geteuid())


@pytest.mark.parametrize("with_memory", [False, True], ids=["", "memory of another size"])
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"HTTP/1.1 400 Bad Request", "b'HTTP/1.1 400 Bad Request', expected a message of jitkern"),
        (b"[" * 10_000, "expected a message of jitkern's pools"),
        (b'{"magic":"jitkern-pool"}', "expected a message of jitkern's pools"),
        (
            b'{"magic":"jitkern-pool","kind":"memory","version":9}',
            "a message of protocol version 9, expected 1: use one version of jitkern",
        ),
        (
            b'{"magic":"jitkern-pool","kind":"memory","version":1}',
            f"bytes of memory, expected {NUM_BYTES}",
        ),
    ],
    ids=["http", "deep", "no kind", "version", "no memory"],
)
def test_something_else_in_the_place_of_rank_0(
    name: str, sent: bytes, said: str, with_memory: bool
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(wire._address(name))
        listener.listen()

        def answer() -> None:
            end, _ = listener.accept()
            with end, open(__file__) as file:
                socket.send_fds(end, [sent], [file.fileno()] if with_memory else [])
                end.recv(1)

        before = len(os.listdir("/proc/self/fd"))
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ShareError, match="PinnedPool") as caught:
            Meeting(Share(name, 1, 2, timeout_s=10), NUM_BYTES)
        thread.join()
        assert said in str(caught.value)
        assert f"process {os.getpid()}" in str(caught.value)
        assert len(os.listdir("/proc/self/fd")) == before


def test_something_else_at_the_door_of_rank_0(start: Start) -> None:
    """It is told so, and the ranks meet all the same."""
    ranks = start(3)
    ranks[0].open(0, 3)
    ranks[0].value()
    head = b'{"magic":"jitkern-pool","version":1,"kind":'
    count = ranks[0].ask("descriptors")
    held = []
    for sent in (b"GET / HTTP/1.1", head + b'"what"}', head + b'"join"}', b"\xff", b""):
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        held.append(end)
        end.connect(wire._address(ranks[0].name))
        if sent:
            end.settimeout(PROMPT_S)
            with open("/dev/null") as other:  # a descriptor that nobody asked for
                socket.send_fds(end, [sent], [other.fileno()])
            assert b"failure" in end.recv(1 << 16)
    for end in held:
        end.close()
    for rank in (1, 2):
        ranks[rank].open(rank, 3)
        ranks[rank].value()
    step(ranks, "touched")
    wait_until(lambda: ranks[0].ask("descriptors") == count + 2)  # the two ranks


def test_attach_to_no_pool(name: str) -> None:
    with pytest.raises(ShareError, match=f"attach: pool '{name}': rank 0 did not come within 0.1"):
        attach(PoolHandle(name, 1), timeout_s=0.1)


def test_attach_to_a_pool_of_another_size(name: str) -> None:
    meeting = Meeting(Share(name, 0, 1), 4096)
    try:
        with pytest.raises(ShareError, match="num_bytes 1 in the handle, expected 4096 as in the"):
            attach(PoolHandle(name, 1))
        meeting.step("touched")
    finally:
        meeting.close()
