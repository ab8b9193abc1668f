"""PyNCCLCommunicator: what calls do; see test_comm_failures.py for ranks that are missing."""

from __future__ import annotations

import pytest
from bodies import BODIES
from ranks import CALL_S, LATE_S, Pool, Rank, all_do, errors
from shared_gpu import IS_SHARED


@pytest.fixture(scope="module")
def ranks(gpus: Pool) -> list[Rank]:
    """Up to four ranks."""
    return gpus.make(min(gpus.num_gpus, 4), "max_size_bytes=8192")


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    all_do(ranks, f"body({name!r})")


def test_properties(ranks: list[Rank]) -> None:
    size = len(ranks)
    expected = [[r, size, f"cuda:{0 if IS_SHARED else r}"] for r in range(size)]
    assert all_do(ranks, "[comm.rank, comm.size, str(comm.device)]") == expected
    assert ranks[0].ask("isinstance(comm, Communicator)")
    assert ranks[0].ask("comm.nccl_version").startswith("2.")


def test_graphs_streams_and_registered_memory(ranks: list[Rank]) -> None:
    size = len(ranks)
    assert all_do(ranks, "replay(3)") == [[float(size**3)] * 3] * size
    assert all_do(ranks, "two_streams()") == [[float(size**2)]] * size
    assert all_do(ranks, "buffer()") == [[float(size * n) for n in (1, 2, 3, 4)]] * size
    assert ranks[0].ask("list(comm.buffer.shape)") == [8192]
    assert ranks[0].ask("comm.get_buffer() == comm.buffer.data_ptr() > 0")
    text = "ValueError: empty: shape (1024,) of torch.bfloat16: 2048 bytes, expected at most 0,"
    assert ranks[0].refuses("comm.empty((1024,), torch.bfloat16)").startswith(text)


MISTAKES = {
    "all_reduce(ones(3, on='cpu'))": "all_reduce: x: on cpu, expected on cuda:0, as the comm",
    "all_reduce(ones(3, on='cuda:1'))": "all_reduce: x: on cuda:1, expected on",
    "all_reduce(ones(3, dtype=torch.int16))": "all_reduce: x: dtype int16, expected int8, uint8,",
    "all_reduce(ones(3), 'mean')": "all_reduce: op: 'mean', expected one of sum, prod, max,",
    "all_gather(ones(3), ones(3))": "all_gather: output: 3 items, expected {three}, 3 for each of",
    "all_reduce(taken(torch.ones(4, 4).t()))": "all_reduce: x: not contiguous",
    "all_to_all(ones(4), ones(4), 4)": "all_to_all: output_splits: int, expected a list of int",
    "all_to_all(ones(4), ones(4), None, [2.0])": "all_to_all: input_splits: float, expected an int",
    "all_to_all(ones(4), ones(4), [1, 2])": "all_to_all: output_splits: 2 numbers, 3 rows in all,",
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


def test_two_ranks_on_one_gpu(gpus: Pool) -> None:
    if IS_SHARED:
        pytest.skip("ranks say that they are not")
    two = gpus.join(2)
    all_do(two, "setattr(torch.cuda, 'current_device', lambda: 0)")
    for rank in two:
        rank.tell("make_nccl()")
    for answer in errors(two):
        assert answer["error"].startswith("CommError: init_pynccl: ranks 0, 1 are on one GPU, ex")


# -- where calls wait for a rank that is missing ---------------------------------------------------


def late(ranks: list[Rank], code: str) -> None:
    """The rank raises in time, and its CUDA context lives."""
    all_do(ranks, f"setattr(comm, 'timeout_s', {CALL_S})")
    ranks[1].kill()
    ranks[0].tell(code)
    answer = ranks[0].error(CALL_S + LATE_S)
    assert answer["error"].startswith("CommTimeoutError: "), answer
    assert answer["missing"] == [1], answer
    assert ranks[0].ask("synchronize()") < LATE_S
    assert ranks[0].ask("lives()")


def test_the_first_call(gpus: Pool) -> None:
    """It waits inside of NCCL, which connects."""
    late(gpus.make(2), "calls(1)")


def test_many_calls(gpus: Pool) -> None:
    """More than a launch queue holds: to abort in front of a full one would cost the context.

    The fake, whose queue holds 50, ends a process that does.
    """
    two = gpus.make(2)
    all_do(two, "[calls(3), synchronize()] and None")
    if gpus.kind != "nccl":
        two[0].ask("lib.fake_nccl_queue_limit(50)")
    late(two, "calls(1500)")


def test_a_graph(gpus: Pool) -> None:
    """Replays are no calls; one that is watched has a deadline."""
    two = gpus.make(2)
    all_do(two, "replay(1)")
    late(two, "replay(1)")
