"""PyNCCLCommunicator: calls, and what becomes of them when NCCL or the driver misbehaves."""

from __future__ import annotations

import pytest
from bodies import BODIES
from ranks import CALL_S, LATE_S, Pool, Rank, all_do
from shared_gpu import IS_SHARED


@pytest.fixture(scope="module")
def ranks(gpus: Pool) -> list[Rank]:
    return gpus.make(min(gpus.num_gpus, 4), "max_size_bytes=8192")


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    all_do(ranks, f"body({name!r})")


def test_graphs_streams_and_registered_memory(gpus: Pool, ranks: list[Rank]) -> None:
    size = len(ranks)
    assert all_do(ranks, "replay(3)") == [[float(size**3)] * 3] * size
    if gpus.kind == "nccl":
        assert all_do(ranks, "two_streams()") == [[float(size**2)]] * size
    assert all_do(ranks, "buffer()") == [[float(size * n) for n in (1, 2, 3, 4)]] * size
    assert ranks[0].ask("list(comm.buffer.shape)") == [8192]
    assert ranks[0].ask("comm.get_buffer() == comm.buffer.data_ptr() > 0")


MISTAKES = {
    "all_reduce(ones(3, on='cpu'))": "all_reduce: x: on cpu, expected on cuda:0, as the comm",
    "all_reduce(ones(3, on='cuda:1'))": "all_reduce: x: on cuda:1, expected on",
    "all_reduce(ones(3, dtype=torch.int16))": "all_reduce: x: dtype int16, expected int8, uint8,",
    "all_reduce(ones(3), 'mean')": "all_reduce: op: 'mean', expected 'sum', 'prod', 'max',",
    "all_gather(ones(3), ones(3))": "all_gather: output: 3 items, expected {three}, 3 for each of",
    "all_reduce(taken(torch.ones(4, 4).t()))": "all_reduce: x: not contiguous",
}


def test_mistakes(gpus: Pool, ranks: list[Rank]) -> None:
    """Nothing was sent: the calls of the others are as before."""
    for code, text in MISTAKES.items():
        if not (IS_SHARED and "cuda:1" in code):  # there is one GPU
            assert text.format(three=3 * len(ranks)) in ranks[0].refuses(f"comm.{code}")
    if gpus.kind == "nccl":  # the fake has tensors that are none of PyTorch's, and no float8
        text = ranks[0].refuses("comm.all_reduce(ones(3).requires_grad_())")
        assert "all_reduce: x: requires a gradient, expected none" in text
        for dtype in ("torch.float8_e4m3fn", "torch.float8_e5m2"):
            all_do(ranks, f"x = ones(33).to({dtype}); comm.all_reduce(x)")
            assert all_do(ranks, "float(x[0])") == [len(ranks)] * len(ranks)
    all_do(ranks, "body('empty')")


def test_graph_with_the_first_calls(gpus: Pool) -> None:
    """Nothing was called before the capture: NCCL connects in it."""
    two = gpus.make(2)
    assert all_do(two, "replay(3)") == [[8.0] * 3] * 2
    all_do(two, "comm.close()")


# -- where calls wait for a rank that is missing ---------------------------------------------------


def late(rank: Rank, code: str, *texts: str) -> None:
    """The rank raises in time, and names rank 1. It was told before if there is no code."""
    if code:
        rank.tell(code)
    answer = rank.error(CALL_S + LATE_S)
    assert answer["error"].startswith("CommTimeoutError: "), answer
    assert answer["missing"] == [1], answer
    for text in texts:
        assert text in answer["error"], answer


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (None, "calls(1)"),  # waits inside of NCCL, which connects
        # More than a launch queue holds: an abort in front of a full one would cost the context.
        # The fake, whose queue holds 50, ends a process that does.
        ("[calls(3), synchronize()] and None", "calls(1500)"),
        ("replay(1)", "replay(1)"),  # no calls, but watched
    ],
)
def test_a_rank_is_killed(gpus: Pool, before: str, code: str) -> None:
    """The other one raises in time, and its CUDA context lives."""
    two = gpus.make(2)
    all_do(two, f"{before}")
    if gpus.kind != "nccl":
        two[0].ask("lib.fake_nccl_queue_limit(50)")
    all_do(two, f"setattr(comm, 'timeout_s', {CALL_S})")
    two[1].kill()
    late(two[0], code)
    assert two[0].ask("synchronize()") < LATE_S
    assert two[0].ask("lives()")


# -- where NCCL or the driver does what a test wants ---------------------------------------------

CLASS = "nccl.PyNCCLCommunicator"
SHORTLY = (  # a deadline for NCCL's set-up alone
    f"setattr({CLASS}, '_connect', lambda self, id, own={CLASS}._connect: "
    "[setattr(self, 'timeout_s', 0.2), own(self, id)])"
)


def ranks_of(pool: Pool, size: int, count: int = 3, deadline_s: float = CALL_S) -> list[Rank]:
    """Ranks that have made calls, and whose next ones have a short deadline; the set-up had not."""
    ranks = pool.make(size)
    all_do(ranks, f"[calls({count}), synchronize()] and None")
    all_do(ranks, f"setattr(comm, 'timeout_s', {deadline_s})")
    return ranks


@pytest.mark.parametrize("at", [f"{CLASS}, '_connect'", "nccl, 'as_torch'"])
def test_killed_while_nccl_is_set_up(fake_gpus: Pool, at: str) -> None:
    """The ranks have met, and the other one never comes to NCCL, or to register its memory."""
    two = fake_gpus.join(2)
    two[0].ask(SHORTLY)
    two[1].ask(f"setattr({at}, lambda *a: end())")
    for rank in two:
        rank.tell("make_nccl(max_size_bytes=4096)")
    late(two[0], "", "init_pynccl: ", "on rank 0 of 2", "has ended")


def test_no_usable_nccl(fake_gpus: Pool) -> None:
    too_old, no_file = fake_gpus.start(2)
    too_old.ask("os.environ.update(FAKE_NCCL_VERSION='22602')")
    no_file.ask("os.environ.update(JITKERN_NCCL='/nowhere/libnccl.so.2')")
    for rank, text in (
        (too_old, "NCCL 2.26.2, expected NCCL 2.27 or newer; JITKERN_NCCL names it"),
        (no_file, "/nowhere/libnccl.so.2"),
    ):
        answer = rank.refuses("nccl.settings.cache_clear() or nccl.load()")
        assert answer.startswith("UnsupportedError: init_pynccl: no usable NCCL: ")
        assert text in answer and "JITKERN_NCCL names it; unset that" in answer


def test_the_oldest_call_is_named(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2)
    two[0].ask("capture(True)")
    text = two[0].refuses("comm.barrier()")
    assert "RuntimeError: barrier: called in a graph, expected outside" in text
    two[0].ask("capture(False)")
    two[0].ask("calls(5)")
    two[1].ask("[calls(1), synchronize()] and None")
    two[1].kill()
    assert two[0].ask("synchronize()") < LATE_S
    late(two[0], "comm.check()", "all_reduce: call 5 on rank 0 of 2 ")


def test_killed_before_close(fake_gpus: Pool) -> None:
    """close() of a communicator whose calls are done waits for nobody."""
    two = ranks_of(fake_gpus, 2)
    two[1].kill()
    two[0].ask("calls(1)")
    late(two[0], "comm.close()", "all_reduce: call 4 on ", "has ended")


def test_an_error_of_nccl(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2, 1)
    two[0].ask("lib.fake_nccl_next_result(2, b'socket 7 is closed')")
    text = two[0].refuses("calls(1)")
    assert text.startswith("CommError: all_reduce: NCCL 2.28.9: unhandled system error: socket 7")
    assert two[0].refuses("calls(1)") == text  # the first one, for good
    two[0].ask("comm.close()")
    two[1].ask("comm.abort()")


# -- NCCL hears of a rank's end before any deadline, as over a network -----------------------------

CLOSED = "NCCL 2.28.9: remote process exited or there was a network error: socketProgress: Conn"


def hears(rank: Rank, *texts: str, code: str = "[synchronize(), comm.check()]") -> str:
    """The rank's call ends soon, as it cannot be done; the error names who is gone."""
    rank.ask("lib.fake_nccl_break(1)")
    rank.tell(code)
    answer = rank.error()
    rank.ask("lib.fake_nccl_break(0)")
    assert answer["missing"] == [1] and CLOSED in answer["error"], answer
    for text in texts:
        assert text in answer["error"], answer
    return str(answer["error"])


def test_a_connection_is_closed(fake_gpus: Pool) -> None:
    two = ranks_of(fake_gpus, 2, deadline_s=600)
    two[1].kill()
    two[0].ask("calls(1)")
    text = "CommTimeoutError: all_reduce: call 4 on rank 0 of 2 cannot be done: rank 1 (process "
    assert hears(two[0], f"{two[1].pid} on ", "has ended; NCCL 2.28").startswith(text)
    assert two[0].ask("str(comm._error.__cause__)").startswith(CLOSED)
    # At the first call NCCL's function returns the error itself.
    two = ranks_of(fake_gpus, 2, 0, 600)
    two[1].kill()
    text = "CommTimeoutError: all_reduce: call 1 on rank 0 of 2 cannot"
    assert hears(two[0], code="calls(1)").startswith(text)


def test_graphs_hold_a_communicator(fake_gpus: Pool) -> None:
    two = fake_gpus.make(2)
    all_do(two, "replay(1)")
    two[0].ask("lib.fake_nccl_graphs(1), setattr(nccl, '_GRAPHS_S', 0.2)")
    for rank in two:
        rank.tell("comm.close()")
    text = "CommError: close: graphs that have captured the communicator are there, expected none"
    assert two[0].error()["error"].startswith(text)
    two[1].value()


def test_nothing_is_left(fake_gpus: Pool) -> None:
    """Of many that were made and closed: no event, no communicator of NCCL's."""
    two = fake_gpus.join(2)
    code = "[gc.collect() * 0 + lib.fake_num_events(), lib.fake_nccl_num_comms()]"
    before = all_do(two, code)
    for _ in range(3):
        all_do(two, "make_nccl(max_size_bytes=1024)")
        all_do(two, "calls(60)")
        all_do(two, "comm.close(); comm = None")
    assert all_do(two, code) == before


def test_a_process_that_ends_with_calls_in_flight(fake_gpus: Pool) -> None:
    """The driver would wait for a kernel that waits for a rank that is no more."""
    two = ranks_of(fake_gpus, 2, 1, 600)
    two[1].kill()
    two[0].ask("os.environ.update(FAKE_EXIT_WAITS='1'), setattr(nccl, '_EXIT_S', 0.3)")
    two[0].ask("calls(1)")
    two[0].tell("raise SystemExit")
    assert two[0].wait(30) == 0
