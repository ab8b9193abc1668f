"""PeerCommunicator: what a communicator does, with small sums over memory of the ranks."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bodies import BODIES
from needs import needs_cxx
from ranks import LATE_S, NCCL, Pool, Rank, all_do, all_tell, errors, processes_of
from ref import refusals
from shared_gpu import IS_SHARED

from jitkern.comm import PeerCommunicator

pytestmark = needs_cxx
MANY_S = 300.0  # limit of 100,000 calls of four ranks
hosts = processes_of("cpu", NCCL, scope="module")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(hosts: Pool, request: pytest.FixtureRequest) -> list[Rank]:
    if hosts.kind != "cpu" and hosts.num_gpus < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return made(hosts, request.param, "max_bytes=1 << 40")


def made(hosts: Pool, size: int, args: str = "") -> list[Rank]:
    ranks = hosts.join(size)
    all_do(ranks, f"make_peer({hosts.kind != 'cpu'}, {args})")
    return ranks


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    all_do(ranks, f"body({name!r})")


def test_many_sums_of_ranks_that_are_late(hosts: Pool, ranks: list[Rank]) -> None:
    count = 100_000 if hosts.kind != "cpu" and not IS_SHARED else 500
    all_tell(ranks, f"many_sums({count})")
    assert [rank.value(MANY_S) for rank in ranks] == [0] * len(ranks)


def test_rows_of_one_pool(ranks: list[Rank]) -> None:
    assert all(all_do(ranks, f"rows('jitkern-test-{os.getpid()}')"))


@pytest.fixture
def two(hosts: Pool) -> list[Rank]:
    return made(hosts, 2, "device_timeout_s=0.5")


def are_summed(two: list[Rank], dtype: str = "float32") -> None:
    all_do(two, f"x = ones(5, dtype=torch.{dtype}); comm.all_reduce(x)")
    assert all_do(two, "x.tolist()") == [[2.0] * 5] * 2


def test_small_sums_take_no_other_communicator(two: list[Rank]) -> None:
    assert all_do(two, "[comm.rank, comm.world_size]") == [[0, 2], [1, 2]]
    assert two[0].ask("isinstance(comm, Communicator)")
    assert two[0].ask("comm.max_bytes") == 4 << 20
    all_do(two, "setattr(comm, '_comm', None)")
    for dtype in ("float32", "float16", "bfloat16"):
        are_summed(two, dtype)
    for call in ("all_reduce(ones(5), 'max')", "all_reduce(ones(5, dtype=torch.int32))"):
        assert two[0].refuses(f"comm.{call}").startswith("AttributeError")


def test_a_late_rank_and_all_go_on(two: list[Rank]) -> None:
    two[0].tell("sum_late()")
    assert two[0].error(0.5 + LATE_S)["missing"] == [1]
    two[1].ask("comm.all_reduce(ones(5))")  # what the other one has sent is there
    assert "until reset()" in two[0].refuses("sum_late()")
    all_do(two, "comm.reset()")
    all_do(two, "comm.all_reduce(ones(5))")


def test_a_late_gpu_and_all_go_on(hosts: Pool, two: list[Rank]) -> None:
    """What its rank queued long before is over before the others forget it."""
    if hosts.kind == "cpu":
        pytest.skip("its calls wait by themselves")
    # All kernels are loaded: to load one would wait for what the GPU has to do.
    all_do(two, "torch.cuda._sleep(1) or comm.all_reduce(ones(5) * 7)")
    two[1].ask("[torch.cuda._sleep(2_000_000_000) for _ in range(4)]")  # a second each
    two[1].tell("comm.all_reduce(ones(5) * 7)")
    two[0].tell("sum_late()")
    assert two[0].error(0.5 + LATE_S)["missing"] == [1]
    two[1].value()
    all_do(two, "comm.reset()")
    for _ in range(4):
        are_summed(two)


def test_closed(two: list[Rank]) -> None:
    """Sums go to the communicator."""
    all_do(two, "[comm.close(), comm.close()] and None")
    all_do(two, "[comm.all_reduce(ones(5)), comm.reset()]")


def test_a_rank_is_killed_among_sums(two: list[Rank]) -> None:
    all_tell(two, "many_sums(10**6)")
    time.sleep(0.3)
    two[1].kill()
    answer = two[0].error()
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call "), answer
    assert answer["missing"] == [1]


def test_ranks_that_want_something_else(hosts: Pool) -> None:
    """Each would make its calls by another protocol: wrong sums, or none."""
    two = hosts.join(2)
    for option in ("algorithm=['one_shot', 'two_shot'][{rank}]", "max_bytes=(8 << 20) + {rank}"):
        all_tell(two, f"make_peer({hosts.kind != 'cpu'}, {option})")
        for answer in errors(two):
            say = f"CommError: PeerCommunicator: {option.partition('=')[0]}: differs"
            assert answer["error"].startswith(say)


def of(size: int) -> Any:
    return Mock(rank=0, world_size=size)


def test_one_rank_has_no_memory() -> None:
    inner = of(1)
    with PeerCommunicator(inner, None) as comm:
        comm.all_reduce(torch.ones(3))
    inner.all_reduce.assert_called_once()


test_mistakes = refusals(
    PeerCommunicator,
    {"comm": of(2), "group": None},
    ({"comm": of(9)}, ValueError, "comm: 9 ranks, expected at most 8; use it as it is"),
    ({"comm": 5}, TypeError, "comm: int without rank, world_size, all_reduce, expected a Commun"),
    ({"device": "meta"}, ValueError, "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
    ({"device_timeout_s": 0}, ValueError, "device_timeout_s: 0, expected above 0"),
    ({"timeout_s": "60"}, TypeError, "timeout_s: str, expected seconds"),
    ({"max_bytes": -1}, ValueError, "max_bytes: -1, expected at least 0"),
    ({"algorithm": "ring"}, ValueError, "algorithm: 'ring', expected 'auto', 'one_shot'"),
)
