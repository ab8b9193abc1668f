"""PyNCCLCommunicator: what calls do, and what becomes of them when a rank is missing."""

from __future__ import annotations

import signal

import pytest
from bodies import BODIES
from comm_ranks import LATE_S, Pool, Rank, everywhere
from nccl_ranks import all_do, calls_done, late, make, ranks_of
from shared_gpu import IS_SHARED

LAST: dict[Pool, tuple[list[Rank], int]] = {}


@pytest.fixture
def ranks(gpus: Pool) -> list[Rank]:
    """Up to four ranks: those of the test before, if it was one of these."""
    joined, num_starts = LAST.get(gpus, ([], -1))
    if num_starts != gpus.num_starts:
        joined = gpus.join(min(gpus.num_gpus, 4))
        make(joined, max_size_bytes=8192)
        LAST[gpus] = joined, gpus.num_starts
    return joined


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    all_do(ranks, "body", name=name)


def test_properties(ranks: list[Rank]) -> None:
    size = len(ranks)
    expected = [[r, size, f"cuda:{0 if IS_SHARED else r}"] for r in range(size)]
    assert everywhere(ranks, "[comm.rank, comm.size, str(comm.device)]") == expected
    assert ranks[0].evaluate("isinstance(comm, Communicator)")
    assert ranks[0].evaluate("comm.nccl_version").startswith("2.")


def test_float8(gpus: Pool, ranks: list[Rank]) -> None:
    if gpus.is_fake:
        pytest.skip("the fake has none")
    code = (
        "[f(x := torch.ones(33, device=device).to({0})) or float(x[0]) for f in [comm.all_reduce]]"
    )
    for dtype in ("torch.float8_e4m3fn", "torch.float8_e5m2"):
        assert everywhere(ranks, code.format(dtype)) == [[len(ranks)]] * len(ranks)


def test_graph(ranks: list[Rank]) -> None:
    size = len(ranks)
    assert all_do(ranks, "replay", count=3) == [[float(size**3)] * 3] * size


def test_streams(ranks: list[Rank]) -> None:
    size = len(ranks)
    assert all_do(ranks, "two_streams") == [[float(size**2)]] * size


def test_registered_memory(ranks: list[Rank]) -> None:
    size = len(ranks)
    assert all_do(ranks, "buffer") == [[float(size * n) for n in (1, 2, 3, 4)] * 2] * size
    assert ranks[0].evaluate("list(comm.buffer.shape)") == [8192]
    assert ranks[0].evaluate("comm.get_buffer() == comm.buffer.data_ptr() > 0")
    ranks[0].tell("evaluate", code="[comm.empty((1024,), torch.bfloat16) for _ in range(5)]")
    text = "ValueError: empty: shape (1024,) of torch.bfloat16: 2048 bytes, expected at most 0,"
    assert ranks[0].error()["error"].startswith(text)


MISTAKES = {
    "all_reduce(ones(3, on='cpu'))": "all_reduce: x: on cpu, expected on cuda:0, as the comm",
    "all_reduce(ones(3, on='cuda:1'))": "all_reduce: x: on cuda:1, expected on",
    "all_reduce(ones(3, dtype=torch.int16))": "all_reduce: x: dtype int16, expected int8, uint8,",
    "all_reduce(ones(3), 'mean')": "all_reduce: op: 'mean', expected one of sum, prod, max,",
    "all_gather(ones(3), ones(3))": "all_gather: output: 3 items, expected {three}, 3 for each of",
    "all_reduce(ones(4, 4, turned=True))": "all_reduce: x: not contiguous",
    "all_to_all(ones(4), ones(4), 4)": "all_to_all: output_splits: int, expected a list of int",
    "all_to_all(ones(4), ones(4), None, [2.0])": "all_to_all: input_splits: float, expected an int",
    "all_to_all(ones(4), ones(4), [1, 2])": "all_to_all: output_splits: 2 numbers, 3 rows in all,",
}


def test_mistakes(ranks: list[Rank]) -> None:
    """Nothing was sent: the calls of the others are as before."""
    for code, text in MISTAKES.items():
        if IS_SHARED and "cuda:1" in code:  # there is one GPU
            continue
        ranks[0].tell("evaluate", code=f"comm.{code}")
        assert text.format(three=3 * len(ranks)) in ranks[0].error()["error"]
    all_do(ranks, "body", name="empty")


def test_a_gradient_is_refused(gpus: Pool, ranks: list[Rank]) -> None:
    if gpus.is_fake:
        pytest.skip("its tensors are none of PyTorch's")
    ranks[0].tell("evaluate", code="comm.all_reduce(ones(3).requires_grad_())")
    assert "all_reduce: x: requires a gradient, expected none" in ranks[0].error()["error"]
    all_do(ranks, "body", name="empty")


def test_graph_with_the_first_calls(gpus: Pool) -> None:
    """Nothing was called before the capture: NCCL connects in it."""
    two = gpus.join(2)
    make(two)
    assert all_do(two, "replay", count=3) == [[8.0] * 3] * 2
    all_do(two, "evaluate", code="comm.close()")


def test_two_ranks_on_one_gpu(gpus: Pool) -> None:
    if IS_SHARED:
        pytest.skip("ranks say that they are not")
    two = gpus.join(2)
    for rank in two:
        rank.evaluate("setattr(torch.cuda, 'current_device', lambda: 0)")
        rank.tell("make_nccl", timeout_s=30)
    for rank in two:
        answer = rank.error()
        assert answer["error"].startswith("CommError: init_pynccl: ranks 0 and 1 are on one GPU")
        rank.kill()


# -- ranks that are missing ------------------------------------------------------------------------


def lives(rank: Rank) -> None:
    """The CUDA context is not lost."""
    assert rank.ask("live")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_that_waits_on_the_gpu(gpus: Pool, number: int) -> None:
    """A host that synchronises is freed; then the error is there, whoever asks first."""
    two = ranks_of(gpus, 2)
    two[1].kill(number)
    two[0].ask("calls", count=1)
    assert two[0].ask("synchronize") < LATE_S
    late(two[0], "evaluate", code="comm.check()")
    late(two[0], "calls", count=1)
    lives(two[0])
    two[1].kill()


def test_the_first_call(gpus: Pool) -> None:
    """It waits inside of NCCL, which connects."""
    two = ranks_of(gpus, 2, count=0)
    two[1].kill()
    late(two[0], "calls", count=1)
    lives(two[0])


def test_many_calls(gpus: Pool) -> None:
    """More than a launch queue holds: to abort in front of a full one would cost the context."""
    two = ranks_of(gpus, 2)
    two[1].kill()
    late(two[0], "calls", count=1500)
    two[0].ask("synchronize")
    lives(two[0])


def test_a_graph(gpus: Pool) -> None:
    """Replays are no calls; one that is watched has a deadline."""
    two = ranks_of(gpus, 2, count=0)
    all_do(two, "replay", count=1)
    two[1].kill()
    two[0].tell("replay", count=1)
    answer = two[0].error(LATE_S)
    assert answer["error"].startswith("CommTimeoutError"), answer
    lives(two[0])


def test_those_left_go_on(gpus: Pool) -> None:
    """With two GPUs it is one rank that is left; its calls work."""
    count = min(gpus.num_gpus, 3)
    some = ranks_of(gpus, count)
    some[1].kill()
    left = [some[0], *some[2:]]
    all_do(left, "calls", count=1)
    assert all(seconds < LATE_S for seconds in all_do(left, "synchronize"))
    path = some[0].evaluate("path + '-new'")
    for rank, process in enumerate(left):
        process.tell("regroup", rank=rank, size=len(left), path=path)
    for process in left:
        process.value()
    make(left)
    assert everywhere(left, "comm.size") == [count - 1] * (count - 1)
    all_do(left, "body", name="mixed")
    all_do(left, "evaluate", code="comm.close()")


def test_a_rank_that_comes_too_late(gpus: Pool) -> None:
    """The one that waited has given up; the late one is told so, and not left alone."""
    two = ranks_of(gpus, 2)
    two[0].ask("calls", count=1)
    two[0].ask("synchronize")
    late(two[0], "evaluate", code="comm.check()")
    two[1].ask("calls", count=1)
    two[1].ask("synchronize")
    everywhere(two, "comm.abort()")
    for rank in two:
        lives(rank)


def test_calls_end(gpus: Pool) -> None:
    two = gpus.join(2)
    make(two)
    calls_done(two, 3)
    all_do(two, "evaluate", code="[comm.close(), comm.destroy(), comm.abort()] and None")
    for rank in two:
        for code in ("comm.all_reduce(ones(3))", "comm.barrier()", "comm.send(ones(3), 0)"):
            rank.tell("evaluate", code=code)
            assert "this rank has closed it; make a new one" in rank.error()["error"]
