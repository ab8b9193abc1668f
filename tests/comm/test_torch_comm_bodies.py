"""TorchCommunicator over gloo: what every call does, with 2 and 4 ranks."""

from __future__ import annotations

import pytest
from bodies import BODIES
from comm_ranks import Pool, Rank, everywhere


@pytest.fixture(scope="module", params=[2, 4])
def ranks(pool: Pool, request: pytest.FixtureRequest) -> list[Rank]:
    return pool.make(request.param)


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    for rank in ranks:
        rank.tell("body", name=name)
    for rank in ranks:
        rank.value()


def test_properties(ranks: list[Rank]) -> None:
    size = len(ranks)
    assert everywhere(ranks, "[comm.rank, comm.size]") == [[r, size] for r in range(size)]
    text = f"TorchCommunicator(rank=0, size={size}, devices=[cpu])"
    assert ranks[0].evaluate("repr(comm)") == text
    assert ranks[0].evaluate("isinstance(comm, Communicator)")
