"""PyNCCLCommunicator where NCCL or the driver does what a test wants."""

from __future__ import annotations

import subprocess
import sys

import pytest
from comm_ranks import LATE_S, Pool, Rank, everywhere
from nccl_ranks import all_do, make

DEADLINE_S = 1.0
BOUND_S = DEADLINE_S + LATE_S
CLASS = "__import__('jitkern.comm.nccl').comm.nccl.PyNCCLCommunicator"
ENDS = "lambda *a: os.kill(os.getpid(), 9)"


def two_of(gpus: Pool, **config: object) -> list[Rank]:
    two = gpus.join(2)
    make(two, **{"timeout_s": DEADLINE_S, **config})
    return two


def late(rank: Rank, *texts: str) -> None:
    answer = rank.error(BOUND_S)
    assert answer["error"].startswith("CommTimeoutError: "), answer
    assert answer["missing"] == [1], answer
    for text in texts:
        assert text in answer["error"], answer


def test_killed_while_nccl_is_set_up(failing_fake_gpus: Pool) -> None:
    """The ranks have met, and the other one never comes to NCCL."""
    two = failing_fake_gpus.join(2)
    code = (
        f"setattr(__import__('jitkern.comm.nccl').comm.nccl.PyNCCLCommunicator, '_connect', {ENDS})"
    )
    two[1].evaluate(code)
    two[0].tell("make_nccl", timeout_s=DEADLINE_S)
    two[1].tell("make_nccl", timeout_s=DEADLINE_S)
    late(two[0], "init_pynccl: the set-up on rank 0 of 2", "has ended")
    two[0].kill()  # a thread of it is in NCCL for good
    two[1].kill()


def test_slow_while_nccl_is_set_up(fake_gpus: Pool) -> None:
    """All ranks have come, and NCCL is not done: there is no call to name."""
    two = fake_gpus.join(2)
    two[1].evaluate(f"setattr({CLASS}, '_connect', lambda *a: time.sleep(9))")
    for rank in two:
        rank.tell("make_nccl", timeout_s=DEADLINE_S)
    assert two[0].error(BOUND_S)["error"] == (
        "CommTimeoutError: init_pynccl: the set-up on rank 0 of 2 was not done within 1 s: "
        "all ranks have come to it; if they are only slow, give a larger timeout_s"
    )
    two[0].kill()  # a thread of it is in NCCL for good
    two[1].kill()


def test_killed_before_memory_is_registered(failing_fake_gpus: Pool) -> None:
    two = failing_fake_gpus.join(2)
    two[1].evaluate(f"setattr(__import__('jitkern.comm.nccl').comm.nccl, '_Buffer', {ENDS})")
    for rank in two:
        rank.tell("make_nccl", timeout_s=DEADLINE_S, max_size_bytes=4096)
    late(two[0], "init_pynccl")
    two[1].kill()


def test_killed_before_close(failing_fake_gpus: Pool) -> None:
    """Of one whose calls are done nothing is waited for; with one that is not it is late."""
    two = two_of(failing_fake_gpus)
    all_do(two, "calls", count=3)
    all_do(two, "synchronize")
    two[1].kill()
    two[0].ask("calls", count=1)
    two[0].tell("evaluate", code="comm.close()")
    late(two[0], "all_reduce: call 4 on rank 0 of 2 ", "has ended")


@pytest.mark.parametrize("limit", [50, 1000])
def test_a_full_launch_queue(failing_fake_gpus: Pool, limit: int) -> None:
    """The fake ends the process that aborts in front of one, which takes the context on a GPU."""
    two = two_of(failing_fake_gpus)
    all_do(two, "calls", count=3)
    all_do(two, "synchronize")
    two[1].kill()
    two[0].evaluate(f"lib.fake_nccl_queue_limit({limit})")
    two[0].tell("calls", count=1500)
    late(two[0], "all_reduce: call 4 ")
    assert two[0].ask("synchronize") < BOUND_S
    two[0].evaluate("lib.fake_nccl_queue_limit(1 << 30)")


def test_an_error_of_nccl(fake_gpus: Pool) -> None:
    two = two_of(fake_gpus)
    all_do(two, "calls", count=1)
    two[0].evaluate("lib.fake_nccl_next_result(2, b'socket 7 is closed')")
    two[0].tell("calls", count=1)
    text = two[0].error()["error"]
    assert text.startswith("CommError: all_reduce: NCCL 2.28.9: unhandled system error: socket 7")
    two[0].tell("calls", count=1)
    assert two[0].error()["error"] == text  # the first one, for good
    two[0].evaluate("comm.close()")
    two[1].evaluate("comm.abort()")
    two[0].evaluate("lib.fake_nccl_next_result(0, b'')")


def test_nccl_notices_that_a_rank_is_gone(fake_gpus: Pool) -> None:
    """Before the deadline, by the thread that watches."""
    two = two_of(fake_gpus, timeout_s=30)
    all_do(two, "calls", count=1)
    two[0].evaluate("lib.fake_nccl_fail_after(1)")
    all_do(two, "calls", count=1)
    assert two[0].ask("synchronize") < 10
    two[0].tell("evaluate", code="comm.check()")
    text = "CommError: all_reduce: NCCL 2.28.9: remote process exited or there was a network error"
    answer = two[0].error()["error"]
    assert answer.startswith(text) and answer.endswith("; no rank has ended"), answer
    two[1].evaluate("comm.abort()")


def test_most_calls_record_no_event(fake_gpus: Pool) -> None:
    """An event is 2 us of the host: two for a burst, one for every 16 calls."""
    two = two_of(fake_gpus, timeout_s=60)
    all_do(two, "calls", count=1)
    code = "[time.monotonic(), do_calls(1600), time.monotonic(), lib.fake_num_records()]"
    before = everywhere(two, "lib.fake_num_records()")
    for count, (start, _, end, after) in zip(before, everywhere(two, code), strict=True):
        assert after - count <= 100 + 3 * (1 + 1000 * (end - start))  # a pause ends a burst
    all_do(two, "synchronize")
    # Also the last ones have no event, until the thread that watches sees to it.
    all_do(two, "evaluate", code="comm.close()")


def test_the_last_calls_of_a_burst(failing_fake_gpus: Pool) -> None:
    two = two_of(failing_fake_gpus)
    all_do(two, "calls", count=3)
    all_do(two, "synchronize")
    two[0].ask("calls", count=5)
    two[1].ask("calls", count=1)
    two[1].ask("synchronize")
    two[1].kill()
    assert two[0].ask("synchronize") < BOUND_S
    two[0].tell("evaluate", code="comm.check()")
    late(two[0], "all_reduce: call 5 on rank 0 of 2 ")


# -- over a network: NCCL hears of a rank's end before any deadline --------------------------------

CLOSED = "NCCL 2.28.9: remote process exited or there was a network error: socketProgress: Conn"
SOON_S = 5.0


def count_up(ranks: list[Rank]) -> None:
    all_do(ranks, "calls", count=3)
    all_do(ranks, "synchronize")


def broken(rank: Rank, missing: list[int], *texts: str) -> None:
    """The rank's call ends soon, as it cannot be done; the error names who is gone."""
    assert rank.ask("synchronize") < SOON_S
    rank.tell("evaluate", code="comm.check()")
    answer = rank.error(SOON_S)
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call 4 on rank "), answer
    assert "cannot be done: " in answer["error"] and CLOSED in answer["error"], answer
    assert answer["missing"] == missing, answer
    assert (answer["op"], answer["number"]) == ("all_reduce", 4)
    for text in texts:
        assert text in answer["error"], answer


def test_a_connection_is_closed(sockets: Pool) -> None:
    two = two_of(sockets, timeout_s=60)
    count_up(two)
    two[1].kill()
    two[0].ask("calls", count=1)
    broken(two[0], [1], f"cannot be done: rank 1 (process {two[1].pid} on ", "has ended; NCCL 2.28")
    cause = two[0].evaluate("str(comm._error.__cause__)")
    assert cause.startswith(f"all_reduce: {CLOSED}")
    two[0].tell("calls", count=1)
    assert two[0].error()["missing"] == [1]


def test_a_connection_is_closed_at_the_first_call(sockets: Pool) -> None:
    """NCCL's function returns the error itself."""
    two = two_of(sockets, timeout_s=60)
    two[1].kill()
    two[0].tell("calls", count=1)
    answer = two[0].error(SOON_S)
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call 1 on rank 0 of 2 cannot")
    assert answer["missing"] == [1] and CLOSED in answer["error"], answer


def test_a_connection_is_closed_in_the_set_up(sockets: Pool) -> None:
    two = sockets.join(2)
    two[1].evaluate(f"setattr(__import__('jitkern.comm.nccl').comm.nccl, '_Buffer', {ENDS})")
    for rank in two:
        rank.tell("make_nccl", timeout_s=60, max_size_bytes=4096)
    answer = two[0].error(SOON_S)
    assert answer["error"].startswith("CommTimeoutError: init_pynccl: "), answer
    assert answer["missing"] == [1] and "has ended" in answer["error"], answer


def test_who_is_only_slow_is_not_missing(sockets: Pool) -> None:
    """Rank 3 has time left, and hears of rank 2 when it comes: all name the same ones."""
    four = sockets.join(4)
    make(four, timeout_s=60)
    count_up(four)
    four[2].kill()
    for rank in four[:2]:
        rank.ask("calls", count=1)
    slow = f"; rank 3 (process {four[3].pid} on "
    for rank in four[:2]:
        broken(rank, [2])
    two_texts = [rank.evaluate("str(comm._error)") for rank in four[:2]]
    assert any(
        slow in text and "has come to call 3 (all_reduce) only" in text for text in two_texts
    )
    four[3].tell("calls", count=1)
    assert four[3].answer()  # of NCCL, or of the thread that watches
    broken(four[3], [2])


@pytest.mark.parametrize("has_come", [False, True])
def test_a_rank_has_left(sockets: Pool, has_come: bool) -> None:
    """Its process lives: an exception has taken it out of `with`, before the call or in it."""
    two = two_of(sockets, timeout_s=60)
    count_up(two)
    two[0].ask("calls", count=1)
    if has_come:  # behind what its GPU does
        two[1].evaluate("globals().update(point=lib.fake_hold(stream))")
        two[1].ask("calls", count=1)
    two[1].evaluate("comm.abort()")
    text = "" if has_come else "has come to call 3 (all_reduce) only, and "
    broken(two[0], [1], f"{text}has aborted it; NCCL 2.28.9")
    if has_come:
        two[1].evaluate("lib.fake_release(point)")


def test_graphs_hold_a_communicator(fake_gpus: Pool) -> None:
    two = two_of(fake_gpus, timeout_s=20)
    all_do(two, "replay", count=1)
    two[0].evaluate("lib.fake_nccl_graphs(1)")
    code = "setattr(__import__('jitkern.comm.nccl').comm.nccl, '_GRAPHS_S', 0.3)"
    two[0].evaluate(code)
    for rank in two:
        rank.tell("evaluate", code="comm.close()")
    text = "CommError: close: graphs that have captured the communicator are there, expected none"
    assert two[0].error()["error"].startswith(text)
    two[1].value()
    two[0].evaluate("lib.fake_nccl_graphs(0)")


def test_a_receive_that_nobody_sends(fake_gpus: Pool) -> None:
    """Ranks that are alive are told apart by what they have sent each other."""
    two = two_of(fake_gpus)
    two[0].tell("evaluate", code="comm.recv(ones(4), 1)")
    late(two[0], "recv: rank 0 of 2 from rank 1 was not done within 1 s", "has not come to it")
    two[1].evaluate("comm.abort()")


def test_what_the_host_waits_for_is_not_captured(fake_gpus: Pool) -> None:
    two = two_of(fake_gpus)
    two[0].evaluate("capture(True)")
    two[0].tell("evaluate", code="comm.barrier()")
    assert "RuntimeError: barrier: called in a graph, expected outside" in two[0].error()["error"]
    two[0].evaluate("capture(False)")
    all_do(two, "evaluate", code="comm.barrier()")


def test_ended_ones_say_so(fake_gpus: Pool) -> None:
    two = fake_gpus.join(2)
    before = everywhere(two, "lib.fake_nccl_num_comms()")
    make(two)
    all_do(two, "calls", count=1)
    all_do(two, "evaluate", code="[comm.close(), comm.destroy(), comm.abort()] and None")
    for rank in two:
        for code in ("comm.all_reduce(ones(3))", "comm.barrier()", "comm.send(ones(3), 0)"):
            rank.tell("evaluate", code=code)
            assert "this rank has closed it; make a new one" in rank.error()["error"]
    assert everywhere(two, "lib.fake_nccl_num_comms()") == before


def test_nothing_is_left(fake_gpus: Pool) -> None:
    """Of many that were made and destroyed: no event, no communicator."""
    two = fake_gpus.join(2)
    count = "__import__('gc').collect() * 0 + lib.fake_num_events()"
    before = everywhere(two, count)
    for _ in range(3):
        make(two, max_size_bytes=1024)
        all_do(two, "calls", count=60)
        all_do(two, "evaluate", code="comm.close()")
        all_do(two, "evaluate", code="globals().update(comm=None)")
    assert everywhere(two, count) == before


def test_a_process_that_ends_with_calls_in_flight(failing_fake_gpus: Pool) -> None:
    """The driver would wait for a kernel that waits for a rank that is no more."""
    two = two_of(failing_fake_gpus, timeout_s=600)
    all_do(two, "calls", count=1)
    all_do(two, "synchronize")
    two[1].kill()
    two[0].evaluate("__import__('os').environ.update(FAKE_EXIT_WAITS='1')")
    two[0].ask("calls", count=1)
    two[0].tell("exit", destroy=False)
    assert two[0].process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("21700", "NCCL 2.17.0, expected NCCL 2.18 or newer; JITKERN_NCCL names it"),
        ("2708", "NCCL 2.7.8, expected NCCL 2.18 or newer"),
    ],
)
def test_an_old_nccl(fake_gpus: Pool, version: str, text: str) -> None:
    one = fake_gpus.alone(FAKE_NCCL_VERSION=version)
    one.tell("evaluate", code="__import__('jitkern.comm.nccl').comm.nccl.nccl_library.load()")
    answer = one.error()["error"]
    assert answer.startswith("UnsupportedError: init_pynccl: no usable NCCL: ") and text in answer
    one.kill()


def test_no_nccl(tmp_path: object) -> None:
    code = "from jitkern.comm import nccl_library; nccl_library.load()"
    path = f"{tmp_path}/libnccl.so.2"
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ['JITKERN_NCCL'] = {path!r}; {code}"],
        capture_output=True,
        text=True,
    )
    assert "UnsupportedError: init_pynccl: no usable NCCL: " in done.stderr
    assert path in done.stderr and "JITKERN_NCCL names it; unset that" in done.stderr
