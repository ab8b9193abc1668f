"""TorchCommunicator over gloo: calls, groups, wrong arguments."""

from __future__ import annotations

import pytest
from bodies import BODIES
from comm_ranks import Pool, Rank, everywhere, make

from jitkern.host import module as host


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[Rank]:
    return pool.make(4)


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    for rank in ranks:
        rank.tell("body", name=name)
    for rank in ranks:
        rank.value()


def test_a_part_of_the_ranks(pool: Pool) -> None:
    """Numbers are the group's, not the world's."""
    ranks = pool.join(4)
    for rank in ranks:
        code = "globals().update(group=dist.new_group([3, 1], backend='gloo'))"
        rank.tell("evaluate", code=code)
    for rank in ranks:
        rank.value()
    for rank in ranks:
        rank.tell("evaluate", code="globals().update(comm=TorchCommunicator(group, timeout_s=20))")
    outside = "ValueError: TorchCommunicator: group: this process is not in it, expected"
    assert ranks[0].error()["error"].startswith(outside)
    assert ranks[2].error()["error"].startswith(outside)
    inside = [ranks[1], ranks[3]]
    assert [rank.value() for rank in inside] == [None, None]
    for name in ("all_reduce", "broadcast", "send_recv", "all_to_all_splits"):
        for rank in inside:
            rank.tell("body", name=name)
        for rank in inside:
            rank.value()


def test_one_rank(pool: Pool) -> None:
    (rank,) = pool.make(1)
    for name in BODIES:
        rank.ask("body", name=name)


def test_no_port_of_our_own(pool: Pool) -> None:
    """Nor a Unix socket, once a memory is made: strangers can connect to nothing new."""
    host.module()  # built here, once, and not by each rank while it is waited for
    ranks = pool.join(2)
    before = [rank.ask("listening") for rank in ranks]
    make(ranks)
    everywhere(ranks, "globals().update(peers=PeerMemory(64, None))")
    assert [rank.ask("listening") for rank in ranks] == before


WRONG = {
    "comm.all_reduce([1])": "TypeError: all_reduce: x: list, expected a tensor",
    "comm.all_reduce(torch.ones(4, 4).t())": "ValueError: all_reduce: x: not contiguous, expected "
    "contiguous; call .contiguous()",
    "comm.all_reduce(torch.ones(2, device='meta'))": "ValueError: all_reduce: x: on meta, expected "
    "on cpu",
    "comm.all_reduce(torch.ones(2).to_sparse())": "ValueError: all_reduce: x: torch.sparse_coo, "
    "expected a dense tensor",
    "comm.all_reduce(torch.ones(2, requires_grad=True))": "RuntimeError: all_reduce: x: requires a "
    "gradient, expected none: the op writes in place and has no gradient; call it under "
    "torch.no_grad(), or pass x.detach()",
    "comm.all_reduce(torch.ones(2), 'mean')": "ValueError: all_reduce: op: 'mean', expected one of "
    "sum, prod, max, min, avg",
    "comm.all_reduce(torch.ones(2, dtype=torch.bool))": "TypeError: all_reduce: x: torch.bool, "
    "expected one of float16, bfloat16, float32, float64, uint8, int8, int32, int64",
    "comm.all_gather(torch.ones(5), torch.ones(3))": "ValueError: all_gather: output: 5 items, "
    "expected 6, 3 for each of 2 ranks",
    "comm.all_gather(torch.ones(6).int(), torch.ones(3))": "TypeError: all_gather: output: "
    "torch.int32, expected torch.float32 as x",
    "(lambda x: comm.all_gather(x, x[1:4]))(torch.ones(6))": "ValueError: all_gather: x and output "
    "overlap, expected no memory in common, or part 0 of output",
    "comm.broadcast(torch.ones(2), 2)": "ValueError: broadcast: src: 2, expected 0 to 1",
    "comm.send(torch.ones(2), 0)": "ValueError: send: dst: 0, expected another rank than this one",
    "comm.all_to_all(torch.ones(3), torch.ones(3))": "ValueError: all_to_all: 3 rows, expected "
    "a multiple of 2, or output_splits",
    "comm.all_to_all(torch.ones(4, 2), torch.ones(4, 3))": "ValueError: all_to_all: output: rows "
    "of [2], expected [3] as x",
    "comm.all_to_all(torch.ones(4), torch.ones(4), [1, 2])": "ValueError: all_to_all: "
    "output_splits: 2 numbers, 3 rows in all, expected 2, one for each rank, and 4 rows",
    "comm.all_to_all(torch.ones(4), torch.ones(4), None, [5, -1])": "ValueError: all_to_all: "
    "input_splits: -1, expected at least 0",
    "comm.all_to_all(torch.ones(4), torch.ones(4), 4)": "TypeError: all_to_all: output_splits: "
    "int, expected a list of int",
    "(lambda x: comm.all_to_all(x, x))(torch.ones(4))": "ValueError: all_to_all: x and output "
    "overlap, expected no memory in common",
    "TorchCommunicator('gloo')": "TypeError: TorchCommunicator: group: str, expected a "
    "ProcessGroup, a Store or None",
    "TorchCommunicator(timeout_s='60')": "TypeError: TorchCommunicator: timeout_s: str, expected "
    "seconds",
}


def test_wrong_arguments(pool: Pool) -> None:
    """And nothing was sent: the next call is the same in all ranks."""
    ranks = pool.make(2)
    for code, text in WRONG.items():
        ranks[0].tell("evaluate", code=code)
        assert ranks[0].error()["error"] == text
    everywhere(ranks, "comm.barrier()")


def test_no_gradient_is_lost(pool: Pool) -> None:
    ranks = pool.make(2)
    code = "torch.no_grad()(lambda x: comm.all_reduce(x))(torch.ones(2, requires_grad=True))"
    everywhere(ranks, code)


def test_without_a_group(pool: Pool) -> None:
    (rank,) = pool.start(1)
    rank.tell("make")
    text = "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
    assert rank.error()["error"] == f"CommError: TorchCommunicator: group: {text}"
