"""PyNCCLCommunicator: what calls do, and what becomes of them when a rank is missing."""

from __future__ import annotations

import signal
import time

import pytest
from bodies import BODIES
from comm_ranks import LATE_S, Pool, Rank, errors, everywhere
from nccl_ranks import all_do, make
from shared_gpu import IS_SHARED

DEADLINE_S = 15.0 if IS_SHARED else 3.0  # there NCCL alone takes 4 s to be set up
BOUND_S = DEADLINE_S + LATE_S
SIZES = [2, 4]
LAST: dict[tuple[Pool, int], tuple[list[Rank], int]] = {}


@pytest.fixture(params=SIZES)
def ranks(gpus: Pool, request: pytest.FixtureRequest) -> list[Rank]:
    """Those of the test before, where it was one of these."""
    if gpus.num_gpus < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    joined, num_starts = LAST.get((gpus, request.param), ([], -1))
    if num_starts != gpus.num_starts:
        joined = gpus.join(request.param)
        make(joined, max_size_bytes=8192)
        LAST[gpus, request.param] = joined, gpus.num_starts
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


def test_graph_with_the_first_calls(gpus: Pool) -> None:
    """Nothing was called before the capture: NCCL connects in it."""
    two = gpus.join(2)
    make(two)
    assert all_do(two, "replay", count=3) == [[8.0] * 3] * 2
    all_do(two, "evaluate", code="comm.close()")


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


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "comm.all_reduce(ones(3, on='cpu'))",
            "all_reduce: x: on cpu, expected on cuda:0, as the comm",
        ),
        (
            "comm.all_reduce(ones(3, on='cuda:1'))",
            "all_reduce: x: on cuda:1, expected on",
        ),
        (
            "comm.all_reduce(ones(3, dtype=torch.int16))",
            "all_reduce: x: dtype int16, expected int8, uint8, int32,",
        ),
        (
            "comm.all_gather(ones(3), ones(3))",
            "all_gather: output: 3 items, expected 6, 3 for each of 2 ranks",
        ),
        (
            "comm.all_reduce(ones(4, 4, turned=True))",
            "all_reduce: x: not contiguous",
        ),
        (
            "comm.all_to_all(ones(4), ones(4), 4)",
            "TypeError: all_to_all: output_splits: int, expected a list of int",
        ),
        (
            "comm.all_to_all(ones(4), ones(4), None, [2.0, 2])",
            "TypeError: all_to_all: input_splits: float in it, expected int",
        ),
        (
            "comm.all_to_all(ones(4), ones(4), [1, 2])",
            "all_to_all: output_splits: 2 numbers, 3 rows in all, expected 2, one for each rank",
        ),
    ],
)
def test_mistakes(ranks: list[Rank], code: str, text: str) -> None:
    """Nothing was sent: the calls of the others are as before."""
    if len(ranks) != 2:
        pytest.skip("the texts are those of two ranks")
    if IS_SHARED and "cuda:1" in code:
        pytest.skip("names a second GPU")
    ranks[0].tell("evaluate", code=code)
    assert text in ranks[0].error()["error"]
    all_do(ranks, "body", name="empty")


def test_a_gradient_is_refused(gpus: Pool, ranks: list[Rank]) -> None:
    if gpus.is_fake:
        pytest.skip("its tensors are none of PyTorch's")
    ranks[0].tell("evaluate", code="comm.all_reduce(ones(3).requires_grad_())")
    assert "all_reduce: x: requires a gradient, expected none" in ranks[0].error()["error"]
    all_do(ranks, "body", name="empty")


# -- ranks that are missing ------------------------------------------------------------------------


def late(rank: Rank, do: str, **config: object) -> dict[str, object]:
    rank.tell(do, **config)
    answer = rank.error(BOUND_S)
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call "), answer
    assert answer["missing"] == [1], answer
    return answer


def lives(rank: Rank) -> None:
    """The CUDA context is not lost."""
    assert rank.ask("live")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_that_waits_on_the_gpu(failing_gpus: Pool, number: int) -> None:
    """A host that synchronises is freed; then the error is there, whoever asks first."""
    two = failing_gpus.join(2)
    make(two, timeout_s=DEADLINE_S)
    all_do(two, "calls", count=3)
    all_do(two, "synchronize")
    two[1].kill(number)
    two[0].ask("calls", count=1)
    assert two[0].ask("synchronize") < BOUND_S
    late(two[0], "evaluate", code="comm.check()")
    late(two[0], "calls", count=1)
    lives(two[0])
    two[1].kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_first_call(failing_gpus: Pool, number: int) -> None:
    """It waits inside of NCCL, which connects."""
    two = failing_gpus.join(2)
    make(two, timeout_s=DEADLINE_S)
    two[1].kill(number)
    late(two[0], "calls", count=1)
    lives(two[0])
    two[1].kill()


def test_many_calls(failing_gpus: Pool) -> None:
    """More than a launch queue holds: an abort behind a full one would cost the context."""
    two = failing_gpus.join(2)
    make(two, timeout_s=DEADLINE_S)
    all_do(two, "calls", count=3)
    all_do(two, "synchronize")
    two[1].kill()
    late(two[0], "calls", count=1500)
    two[0].ask("synchronize")
    lives(two[0])


def test_a_graph(failing_gpus: Pool) -> None:
    """Replays are no calls; one that is watched has a deadline."""
    two = failing_gpus.join(2)
    make(two, timeout_s=DEADLINE_S)
    all_do(two, "replay", count=1)
    two[1].kill()
    two[0].tell("replay", count=1)
    answer = two[0].error(BOUND_S)
    assert answer["error"].startswith("CommTimeoutError"), answer
    lives(two[0])


def test_set_up(failing_gpus: Pool) -> None:
    two = failing_gpus.join(2)
    two[1].kill()
    two[0].tell("make_nccl", timeout_s=DEADLINE_S)
    assert errors(two[:1], BOUND_S)[0]["missing"] == [1]


def test_those_left_go_on(failing_gpus: Pool) -> None:
    """With two GPUs it is one rank that is left; its calls work."""
    count = min(failing_gpus.num_gpus, 4)
    some = failing_gpus.join(count)
    make(some, timeout_s=DEADLINE_S)
    all_do(some, "calls", count=3)
    all_do(some, "synchronize")
    some[1].kill()
    left = [some[0], *some[2:]]
    for rank in left:
        rank.tell("calls", count=1)
    for rank in left:
        rank.value()
    for rank in left:
        rank.tell("synchronize")
    for rank in left:
        assert rank.value() < BOUND_S
    path = some[0].evaluate("path + '-new'")
    for rank, process in enumerate(left):
        process.tell("regroup", rank=rank, size=len(left), path=path)
    for process in left:
        process.value()
    make(left)
    assert everywhere(left, "comm.size") == [count - 1] * (count - 1)
    for name in ("all_reduce", "all_gather", "mixed"):
        all_do(left, "body", name=name)
    all_do(left, "evaluate", code="comm.close()")


def test_a_rank_that_comes_too_late(failing_gpus: Pool) -> None:
    """The one that waited has given up; the late one is told so, and not left alone."""
    two = failing_gpus.join(2)
    make(two, timeout_s=DEADLINE_S)
    all_do(two, "calls", count=3)
    two[0].ask("calls", count=1)
    two[0].ask("synchronize")
    late(two[0], "evaluate", code="comm.check()")
    time.sleep(1)
    two[1].ask("calls", count=1)
    two[1].ask("synchronize")
    two[0].evaluate("comm.abort()")
    two[1].evaluate("comm.abort()")
    for rank in two:
        lives(rank)


def test_two_ranks_on_one_gpu(gpus: Pool) -> None:
    if IS_SHARED:
        pytest.skip("ranks say that they are not")
    two = gpus.join(2)
    for rank in two:
        rank.tell("evaluate", code="setattr(torch.cuda, 'current_device', lambda: 0)")
        rank.value()
        rank.tell("make_nccl", timeout_s=30)
    for rank in two:
        answer = rank.error()
        assert answer["error"].startswith("CommError: init_pynccl: ranks 0 and 1 are on one GPU")
        rank.kill()
