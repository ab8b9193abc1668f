"""TPEmbedding in peer memory: writes and fences, refusals, and the fallback to sums."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from embedding_ranks import Way
from needs import needs_cxx
from ref import same_bits
from torch import Tensor

from jitkern.comm import peer_memory
from jitkern.errors import CommError, CommTimeoutError, UnsupportedError
from jitkern.nn import TPEmbedding, tp_embedding

pytestmark = needs_cxx
SMALL = (9, 65536)  # two pages in float32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.multigpu])])
def way(request: pytest.FixtureRequest) -> Way:
    return Way("peer", request.param)


def rows(module: TPEmbedding) -> list[float]:
    """Return the distinct numbers of all rows."""
    with torch.no_grad():
        ids = torch.arange(module.num_embeddings, device=module.weight.device)
        values: list[float] = module(ids).cpu().unique().tolist()
        return values


def filled(module: TPEmbedding, value: float) -> Tensor:
    return torch.full(module.full_shape, value)


def by_hand(module: TPEmbedding, value: float) -> None:
    module.fence()
    with torch.no_grad():
        module.weight.fill_(value)
    module.fence()


def test_another_weight_in_its_place_is_summed(way: Way) -> None:
    """By torch.func.functional_call: the other ranks' memory does not have it."""
    ranks = way.ranks(2, *SMALL)

    def call(module: TPEmbedding) -> Tensor:
        other = {"weight": torch.ones_like(module.weight)}
        ids = torch.arange(9, device=module.weight.device)
        with torch.no_grad():
            return torch.func.functional_call(module, other, (ids,))  # type: ignore[no-any-return]

    assert all((rows == 1).all() for rows in ranks.each(call))
    assert ranks.num_sums() == 1


def test_it_is_in_a_full_graph(way: Way) -> None:
    ranks = way.ranks(2, *SMALL)
    module = ranks.modules[1]
    ids = torch.tensor([0, 7, 3], device=module.weight.device)
    run = torch.compile(lambda ids: module(ids + 1), backend="aot_eager", fullgraph=True)
    for whole in (torch.randn(SMALL), torch.randn(SMALL)):
        ranks.each(lambda rank: rank.load_full(whole))  # noqa: B023
        with torch.no_grad():  # the graph reads the new rows
            assert same_bits(run(ids).cpu(), whole[(ids + 1).cpu()])
    assert ranks.num_sums() == 0


WAYS: dict[str, Callable[[TPEmbedding, float], Any]] = {
    "load_full": lambda m, value: m.load_full(filled(m, value)),
    "load_state_dict": lambda m, value: m.load_state_dict({"weight": filled(m, value)}),
    "fence": by_hand,
}


def before_a_write(patch: pytest.MonkeyPatch, of: TPEmbedding, do: Callable[[], object]) -> None:
    at, real = of.weight.data_ptr(), tp_embedding._write

    def write(to: Tensor, parts: list[Tensor]) -> None:
        if to.data_ptr() == at:
            do()
        real(to, parts)

    patch.setattr(tp_embedding, "_write", write)


@pytest.mark.parametrize("method", WAYS)
def test_nobody_writes_while_another_reads(
    way: Way, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = way.ranks(2, *SMALL)
    ranks.each(lambda module: by_hand(module, 1))
    before_a_write(monkeypatch, ranks.modules[1], lambda: time.sleep(0.1))

    def load(module: TPEmbedding) -> None:
        until = time.monotonic() + 0.1 * module.comm.rank  # the second reads until then
        while time.monotonic() < until:
            assert rows(module) == [1]
        WAYS[method](module, 2)
        assert rows(module) == [2]

    ranks.each(load)


def test_a_rank_that_does_not_come_to_load_is_named(way: Way) -> None:
    ranks = way.ranks(2, *SMALL, timeout_s=1)
    ranks.each(lambda module: by_hand(module, 1))
    module = ranks.modules[0]
    with pytest.raises(CommTimeoutError, match=r"^barrier:") as raised:
        module.load_full(filled(module, 2))
    assert raised.value.missing == (1,)
    assert rows(module) == [1]  # the rows of both ranks
    with pytest.raises(CommError, match="make a new one"):
        module.load_full(filled(module, 2))


def test_a_rank_that_fails_to_write(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not go on with a table of which a part is lacking."""
    ranks = way.ranks(2, *SMALL, timeout_s=1)
    before_a_write(monkeypatch, ranks.modules[1], Mock(side_effect=OSError("no rows")))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(rank.load_full, filled(rank, 2)) for rank in ranks.modules]
    error = calls[0].exception()
    assert isinstance(error, CommTimeoutError) and error.missing == (1,)
    assert isinstance(calls[1].exception(), OSError)


def test_it_stays_where_it_is(way: Way) -> None:
    module = way.ranks(2, *SMALL).modules[0]
    at = module.weight.data_ptr()
    for same in (module.float(), module.to(module.weight.device), module.eval()):
        assert same is module and module.weight.data_ptr() == at
    for move in (module.half, lambda: module.to("meta"), torch.nn.Sequential(module).double):
        with pytest.raises(RuntimeError, match=r"make a new module with dtype= and device=$"):
            move()
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot pickle"):
            make(module)
    text = "9, 65536, num_added=0, algorithm='peer', rank=0, world_size=2"
    assert repr(module) == f"TPEmbedding({text})"


def test_where_there_can_be_no_peer_memory(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks sum, or all raise. Whole pages of rows of 131 * 2 bytes are of 2**20 rows."""
    for hidden, algorithm in ((131, "all_reduce"), (160, "peer")):
        ranks = way.ranks(2, 1000, hidden, dtype=torch.bfloat16, algorithm="auto")
        assert [rank.algorithm for rank in ranks.modules] == [algorithm] * 2
    numbers = itertools.count()
    monkeypatch.setattr(peer_memory, "_host", lambda: str(next(numbers)))
    ranks = way.ranks(2, *SMALL, algorithm="auto")
    assert [rank.algorithm for rank in ranks.modules] == ["all_reduce", "all_reduce"]
    assert [rank.vocab_range for rank in ranks.modules] == [(0, 5), (5, 4)]
    ranks.each(lambda module: by_hand(module, 4))
    assert ranks.each(rows) == [[4], [4]] and ranks.num_sums() == 1
    with pytest.raises(
        UnsupportedError, match=r"PeerMemory: rank 0 is on .* and rank 1 is on .*all on one host"
    ):
        way.ranks(2, *SMALL)
