"""PyNCCLCommunicator when NCCL or the driver does what a test wants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from comm_ranks import LATE_S, Pool, Rank, everywhere
from nccl_ranks import all_do, calls_done, late, make, ranks_of

from jitkern.comm import nccl
from jitkern.errors import UnsupportedError

CLASS = "nccl.PyNCCLCommunicator"
ENDS = "lambda *a: os.kill(os.getpid(), 9)"
SHORTLY = (  # a deadline for NCCL's set-up alone
    f"setattr({CLASS}, '_connect', lambda self, id, own={CLASS}._connect: "
    "[setattr(self, 'timeout_s', 0.3), own(self, id)])"
)


# -- at the set-up ---------------------------------------------------------------------------------


def test_killed_while_nccl_is_set_up(fake_gpus: Pool) -> None:
    """The ranks have met, and the other one never comes to NCCL."""
    two = fake_gpus.join(2)
    two[0].evaluate(SHORTLY)
    two[1].evaluate(f"setattr({CLASS}, '_connect', {ENDS})")
    for rank in two:
        rank.tell("make_nccl", timeout_s=60)
    late(two[0], "", texts=["init_pynccl: the set-up on rank 0 of 2", "has ended"])
    two[0].kill()  # a thread of it is in NCCL for good


def test_slow_while_nccl_is_set_up(fake_gpus: Pool) -> None:
    """All ranks have come, and NCCL is not done: there is no call to name."""
    two = fake_gpus.join(2)
    two[0].evaluate(SHORTLY)
    two[1].evaluate(f"setattr({CLASS}, '_connect', lambda *a: time.sleep(9))")
    for rank in two:
        rank.tell("make_nccl", timeout_s=60)
    assert two[0].error()["error"] == (
        "CommTimeoutError: init_pynccl: the set-up on rank 0 of 2 was not done within 0.3 s: "
        "all ranks have come to it; if they are only slow, give a larger timeout_s"
    )
    for rank in two:
        rank.kill()


def test_killed_before_memory_is_registered(fake_gpus: Pool) -> None:
    two = fake_gpus.join(2)
    two[0].evaluate(SHORTLY)
    two[1].evaluate(f"setattr(nccl, '_Memory', {ENDS})")
    for rank in two:
        rank.tell("make_nccl", timeout_s=60, max_size_bytes=4096)
    late(two[0], "", texts=["init_pynccl: ", "has ended"])


def test_an_old_nccl(fake_gpus: Pool) -> None:
    one = fake_gpus.alone(FAKE_NCCL_VERSION="22602")
    one.tell("evaluate", code="nccl.load()")
    answer = one.error()["error"]
    assert answer.startswith("UnsupportedError: init_pynccl: no usable NCCL: ")
    assert "NCCL 2.26.2, expected NCCL 2.27 or newer; JITKERN_NCCL names it" in answer
    one.kill()


def test_no_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}/libnccl.so.2"
    monkeypatch.setattr(nccl, "settings", lambda: SimpleNamespace(nccl=path))
    with pytest.raises(UnsupportedError) as caught:
        nccl.load.__wrapped__()
    text = str(caught.value)
    assert text.startswith("init_pynccl: no usable NCCL: ")
    assert path in text and "JITKERN_NCCL names it; unset that" in text


# -- at a call -------------------------------------------------------------------------------------


def test_a_full_launch_queue(fake_gpus: Pool) -> None:
    """The fake ends a process that aborts in front of one, which takes the context on a GPU."""
    two = ranks_of(fake_gpus, 2)
    two[1].kill()
    two[0].evaluate("lib.fake_nccl_queue_limit(50)")
    late(two[0], "calls", count=1500, texts=["all_reduce: call 4 "])
    assert two[0].ask("synchronize") < LATE_S
    two[0].evaluate("lib.fake_nccl_queue_limit(1 << 30)")


def test_the_last_calls_of_a_burst(fake_gpus: Pool) -> None:
    """They have no event of their own."""
    two = ranks_of(fake_gpus, 2)
    two[0].ask("calls", count=5)
    two[1].ask("calls", count=1)
    two[1].ask("synchronize")
    two[1].kill()
    assert two[0].ask("synchronize") < LATE_S
    late(two[0], "evaluate", code="comm.check()", texts=["all_reduce: call 5 on rank 0 of 2 "])


def test_most_calls_record_no_event(fake_gpus: Pool) -> None:
    """An event is 2 us of the host: two for a burst, one for every 16 calls."""
    two = fake_gpus.join(2)
    make(two)
    calls_done(two, 1)
    code = "[time.monotonic(), do_calls(1600), time.monotonic(), lib.fake_num_records()]"
    before = everywhere(two, "lib.fake_num_records()")
    for count, (start, _, end, after) in zip(before, everywhere(two, code), strict=True):
        assert after - count <= 100 + 3 * (1 + 1000 * (end - start))  # a pause ends a burst
    all_do(two, "synchronize")
    # Also the last ones have no event, until the thread that watches sees to it.
    all_do(two, "evaluate", code="comm.close()")


def test_killed_before_close(fake_gpus: Pool) -> None:
    """close() of a communicator whose calls are done waits for nobody."""
    two = ranks_of(fake_gpus, 2)
    two[1].kill()
    two[0].ask("calls", count=1)
    late(two[0], "evaluate", code="comm.close()", texts=["all_reduce: call 4 on ", "has ended"])


def test_an_error_of_nccl(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2, count=1)
    two[0].evaluate("lib.fake_nccl_next_result(2, b'socket 7 is closed')")
    two[0].tell("calls", count=1)
    text = two[0].error()["error"]
    assert text.startswith("CommError: all_reduce: NCCL 2.28.9: unhandled system error: socket 7")
    two[0].tell("calls", count=1)
    assert two[0].error()["error"] == text  # the first one, for good
    two[0].evaluate("comm.close()")
    two[1].evaluate("comm.abort()")
    two[0].evaluate("lib.fake_nccl_next_result(0, b'')")


def test_a_receive_that_nobody_sends(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2, count=0)
    text = "recv: rank 0 of 2 from rank 1 was not done within 0.5 s"
    two[0].evaluate("comm.recv(ones(4), 1)")
    two[0].ask("synchronize")
    late(two[0], "evaluate", code="comm.check()", texts=[text, "has not come to it"])
    two[1].evaluate("comm.abort()")


def test_what_the_host_waits_for_is_not_captured(fake_gpus: Pool) -> None:
    two = fake_gpus.join(2)
    make(two)
    two[0].evaluate("capture(True)")
    two[0].tell("evaluate", code="comm.barrier()")
    assert "RuntimeError: barrier: called in a graph, expected outside" in two[0].error()["error"]
    two[0].evaluate("capture(False)")
    all_do(two, "evaluate", code="comm.barrier()")


# -- NCCL hears of a rank's end before any deadline, as over a network -----------------------------

CLOSED = "NCCL 2.28.9: remote process exited or there was a network error: socketProgress: Conn"


def hears(rank: Rank, *texts: str, missing: tuple[int, ...] = (1,)) -> str:
    """The rank's call ends soon, as it cannot be done; the error names who is gone."""
    rank.evaluate("lib.fake_nccl_break(1)")
    rank.ask("synchronize")
    rank.tell("evaluate", code="comm.check()")
    answer = rank.error()
    rank.evaluate("lib.fake_nccl_break(0)")
    assert answer.get("missing", []) == [*missing] and CLOSED in answer["error"], answer
    for text in texts:
        assert text in answer["error"], answer
    return str(answer["error"])


def test_a_connection_is_closed(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2, deadline_s=600)
    two[1].kill()
    two[0].ask("calls", count=1)
    text = "CommTimeoutError: all_reduce: call 4 on rank 0 of 2 cannot be done: rank 1 (process "
    assert hears(two[0], f"{two[1].pid} on ", "has ended; NCCL 2.28").startswith(text)
    assert two[0].evaluate("str(comm._error.__cause__)").startswith(CLOSED)
    two[0].tell("calls", count=1)
    assert two[0].error()["missing"] == [1]


def test_a_connection_is_closed_at_the_first_call(fake_gpus: Pool) -> None:
    """NCCL's function returns the error itself."""
    two = ranks_of(fake_gpus, 2, count=0, deadline_s=600)
    two[1].kill()
    two[0].evaluate("lib.fake_nccl_break(1)")
    two[0].tell("calls", count=1)
    answer = two[0].error()
    two[0].evaluate("lib.fake_nccl_break(0)")
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call 1 on rank 0 of 2 cannot")
    assert answer["missing"] == [1] and CLOSED in answer["error"], answer


def test_who_is_only_slow_is_not_missing(fake_gpus: Pool) -> None:
    four = ranks_of(fake_gpus, 4, deadline_s=600)
    four[2].kill()
    four[0].ask("calls", count=1)
    slow = f"; rank 3 (process {four[3].pid} on "
    hears(four[0], slow, "has come to call 3 (all_reduce) only", missing=(2,))
    four[3].ask("calls", count=1)
    hears(four[3], missing=(2,))
    four[1].evaluate("comm.abort()")


@pytest.mark.parametrize("has_come", [False, True])
def test_a_rank_has_left(fake_gpus: Pool, has_come: bool) -> None:
    """Its process lives: an exception has taken it out of `with`, before the call or in it."""
    two = ranks_of(fake_gpus, 2, deadline_s=600)
    two[0].ask("calls", count=1)
    if has_come:  # behind what its GPU does
        two[1].evaluate("globals().update(point=lib.fake_hold(stream))")
        two[1].ask("calls", count=1)
    two[1].evaluate("comm.abort()")
    text = "" if has_come else "has come to call 3 (all_reduce) only, and "
    hears(two[0], f"{text}has aborted it; NCCL 2.28.9")
    if has_come:
        two[1].evaluate("lib.fake_release(point)")


def test_no_rank_has_ended(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2, deadline_s=600)
    two[1].evaluate("globals().update(point=lib.fake_hold(stream))")
    all_do(two, "calls", count=1)
    text = hears(two[0], missing=())
    assert text.startswith(f"CommError: all_reduce: {CLOSED}") and text.endswith(
        "no rank has ended"
    )
    two[1].evaluate("[comm.abort(), lib.fake_release(point)] and None")


# -- the end ---------------------------------------------------------------------------------------


def test_graphs_hold_a_communicator(fake_gpus: Pool) -> None:
    two = fake_gpus.join(2)
    make(two)
    all_do(two, "replay", count=1)
    two[0].evaluate("lib.fake_nccl_graphs(1)")
    two[0].evaluate("setattr(nccl, '_GRAPHS_S', 0.3)")
    for rank in two:
        rank.tell("evaluate", code="comm.close()")
    text = "CommError: close: graphs that have captured the communicator are there, expected none"
    assert two[0].error()["error"].startswith(text)
    two[1].value()
    two[0].evaluate("lib.fake_nccl_graphs(0)")


def test_nothing_is_left(fake_gpus: Pool) -> None:
    """Of many that were made and closed: no event, no communicator of NCCL's."""
    two = fake_gpus.join(2)
    code = "[__import__('gc').collect() * 0 + lib.fake_num_events(), lib.fake_nccl_num_comms()]"
    before = everywhere(two, code)
    for _ in range(3):
        make(two, max_size_bytes=1024)
        all_do(two, "calls", count=60)
        all_do(two, "evaluate", code="comm.close()")
        all_do(two, "evaluate", code="globals().update(comm=None)")
    assert everywhere(two, code) == before


def test_a_process_that_ends_with_calls_in_flight(fake_gpus: Pool) -> None:
    """The driver would wait for a kernel that waits for a rank that is no more."""
    two = ranks_of(fake_gpus, 2, count=1, deadline_s=600)
    two[1].kill()
    two[0].evaluate("__import__('os').environ.update(FAKE_EXIT_WAITS='1')")
    two[0].evaluate("setattr(nccl, '_EXIT_S', 0.3)")
    two[0].ask("calls", count=1)
    two[0].tell("exit", destroy=False)
    assert two[0].process.wait(timeout=30) == 0
