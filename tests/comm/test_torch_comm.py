"""TorchCommunicator over gloo: calls, groups, wrong arguments."""

from __future__ import annotations

import pytest
from bodies import BODIES
from ranks import Pool, Rank, all_do


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[Rank]:
    return pool.make(4)


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    all_do(ranks, f"body({name!r})")


def test_a_part_of_the_ranks(pool: Pool) -> None:
    ranks = pool.join(4)
    all_do(ranks, "group = dist.new_group([3, 1], backend='gloo')")
    outside = "ValueError: TorchCommunicator: group: this process is not in it, expected"
    assert ranks[0].refuses("make(group=group)").startswith(outside)
    all_do([ranks[1], ranks[3]], "make(group=group)")
    for name in ("all_reduce", "broadcast", "send_recv"):
        all_do([ranks[1], ranks[3]], f"body({name!r})")


def test_a_group_without_gloo_on_the_cpu(pool: Pool) -> None:
    ranks = pool.join(2)
    all_do(ranks, "group = dist.new_group([0, 1], backend='cuda:gloo')")
    text = ranks[0].refuses("make(group=group)")
    assert text.startswith("UnsupportedError: TorchCommunicator: group: {'cuda': 'gloo'}, expected")


def test_one_rank(pool: Pool) -> None:
    (rank,) = pool.make(1)
    for name in BODIES:
        rank.ask(f"body({name!r})")


WRONG = {
    "all_reduce([1])": "TypeError: all_reduce: x: list, expected a tensor",
    "all_reduce(torch.ones(4, 4).t())": "ValueError: all_reduce: x: not contiguous, expected",
    "all_reduce(torch.ones(2, device='meta'))": "ValueError: all_reduce: x: on meta, expected",
    "all_reduce(torch.ones(2).to_sparse())": "ValueError: all_reduce: x: torch.sparse_coo,",
    "all_reduce(ones(2).requires_grad_())": "RuntimeError: all_reduce: x: requires a gradient,",
    "all_reduce(ones(2), 'mean')": "ValueError: all_reduce: op: 'mean', expected 'sum',",
    "all_reduce(ones(2) > 0)": "TypeError: all_reduce: x: torch.bool, expected one of float16,",
    "all_gather(ones(5), ones(3))": "ValueError: all_gather: output: 5 items, expected 6,",
    "all_gather(ones(6).int(), ones(3))": "TypeError: all_gather: output: torch.int32,",
    "broadcast(ones(2), 2)": "ValueError: broadcast: src: 2, expected 0 to 1",
    "send(ones(2), 0)": "ValueError: send: dst: 0, expected another rank than this one",
}
WRONG_NEW = {
    "group='gloo'": "TypeError: TorchCommunicator: group: str, expected a ProcessGroup,",
    "timeout_s='60'": "TypeError: TorchCommunicator: timeout_s: str, expected seconds",
}


def test_wrong_arguments(pool: Pool) -> None:
    """And nothing was sent: the next call is the same in all ranks. No gradient is lost."""
    ranks = pool.make(2)
    for code, text in WRONG.items():
        assert ranks[0].refuses(f"comm.{code}").startswith(text)
    for code, text in WRONG_NEW.items():
        assert ranks[0].refuses(f"make({code})").startswith(text)
    all_do(ranks, "torch.no_grad()(comm.all_reduce)(torch.ones(2, requires_grad=True))")


def test_without_a_group(pool: Pool) -> None:
    (rank,) = pool.start(1)
    text = "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
    assert rank.refuses("make()") == f"CommError: TorchCommunicator: group: {text}"
