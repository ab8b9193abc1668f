"""peer_gather and peer_scatter: ranks of one process, on the CPU and on one GPU."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from ref import ref_h2d_gather
from rows_ranks import UNTOUCHED, Case, Ranks, any_case
from torch._subclasses import FakeTensorMode

import jitkern
from jitkern.comm import peer_gather, peer_scatter
from jitkern.errors import CommTimeoutError


def gathers(
    case: Case, size: int, device: torch.device, index_dtype: torch.dtype, order: Any = "auto"
) -> None:
    ranks, pool, caches = Ranks(size, device), case.pool(device), case.caches(size, device)
    pairs = case.pairs.to(device, index_dtype)
    expected = caches[0].clone()
    ref_h2d_gather(pool, expected, case.pairs)
    backing = [cache._base for cache in caches]
    for _ in range(2):  # epochs go on
        ranks.each(lambda rank: peer_gather(pool, caches, pairs, ranks.reducers[rank], order=order))
        for cache, base in zip(caches, backing, strict=True):
            assert torch.equal(cache, expected)
            assert base is None or (base[:, case.row_bytes :] == UNTOUCHED).all()


def scatters(case: Case, size: int, device: torch.device, index_dtype: torch.dtype) -> None:
    ranks, pool = Ranks(size, device), case.pool(device)
    sent = case.caches(1, device)[0]
    sent.copy_(torch.randint(256, sent.shape, dtype=torch.uint8))
    sources = [sent.clone() for _ in range(size)]
    pairs = case.pairs.flip(-1).contiguous().to(device, index_dtype)
    expected = pool.clone()
    ref_h2d_gather(sent, expected, pairs)
    ranks.each(lambda rank: peer_scatter(sources[rank], pool, pairs, ranks.reducers[rank]))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(10))
def test_any_rows(device: torch.device, seed: int, size: int) -> None:
    rng = random.Random(seed)
    for moves, repeats in ((gathers, True), (scatters, False)):
        dtype = rng.choice([torch.int32, torch.int64])
        moves(any_case(rng, repeats=repeats), size, device, dtype)
    gathers(any_case(rng, repeats=True), size, device, dtype, order="given")


@pytest.mark.parametrize("order", ["sorted", "given"])
@pytest.mark.parametrize("distinct", [1, 7, 40_000])
def test_a_large_gather(device: torch.device, distinct: int, order: str) -> None:
    count, num_host_rows = 40_000, 50_000
    generator = torch.Generator().manual_seed(distinct)
    hosts = torch.randperm(num_host_rows, generator=generator)[:distinct]
    sources = hosts[torch.randint(distinct, (count,), generator=generator)]
    pairs = torch.stack([sources, torch.randperm(count, generator=generator)], 1)
    pairs[torch.rand(count, generator=generator) < 0.1] = -1
    gathers(Case(24, num_host_rows, count, 24, pairs), 4, device, torch.int64, order)


def fetched_by_rank(
    size: int, num_rows: int, pairs: torch.Tensor, pool_rows: int = 0, order: Any = "auto"
) -> list[int]:
    """Return which rank has fetched each row of the caches.

    Each rank has a pool of its own, so that a row tells by its content who has fetched it.
    """
    device = torch.device("cuda")
    ranks = Ranks(size, device)
    pools = [
        torch.full((pool_rows or num_rows, 16), rank, dtype=torch.uint8).pin_memory()
        for rank in range(size)
    ]
    caches = Case(16, num_rows, num_rows, 16, pairs).caches(size, device)
    pairs = pairs.to(device)
    ranks.each(
        lambda rank: peer_gather(pools[rank], caches, pairs, ranks.reducers[rank], order=order)
    )
    for cache in caches[1:]:
        assert torch.equal(cache, caches[0])
    return caches[0][:, 0].tolist()


@pytest.mark.cuda
def test_each_rank_fetches_a_part() -> None:
    """Equal parts in the order of the pool, apart from a region where two meet; a row once.

    Where all rows lie within one region it is shared out by a hash.
    """
    by_rank = fetched_by_rank(3, 24_000, torch.arange(24_000).repeat(2, 1).T.contiguous())
    for rank in range(3):
        assert abs(by_rank.count(rank) - 8000) < 24_000 / 4096 * 4 + 4
    assert sum(a != b for a, b in itertools.pairwise(by_rank)) < 24
    pairs = torch.stack([torch.arange(200) + (1 << 19), torch.arange(200)], 1)
    by_rank = fetched_by_rank(2, 1000, pairs, 1 << 20)[:200]
    assert 60 <= by_rank.count(0) <= 140 and by_rank.count(0) + by_rank.count(1) == 200
    pairs = torch.stack([torch.zeros(500, dtype=torch.int64), torch.randperm(500)], 1)
    assert len(set(fetched_by_rank(2, 500, pairs))) == 1


@pytest.mark.cuda
def test_ranks_take_pairs_in_turn() -> None:
    """Each list begins with another rank, so that short ones before padding are shared evenly."""
    pairs = torch.arange(100).repeat(2, 1).T.contiguous()
    by_rank = fetched_by_rank(3, 100, pairs, order="given")
    assert by_rank == [number // 4 % 3 for number in range(100)]
    by_rank = fetched_by_rank(3, 100, pairs.view(5, 20, 2), order="given")
    assert by_rank == [(at // 4 + i) % 3 for i in range(5) for at in range(20)]


def compiled(case: Case, size: int, device: torch.device) -> None:
    """See to it that none is compiled between two launches of a call whose error is awaited."""
    ranks, pool, caches = Ranks(size, device), case.pool(device), case.caches(size, device)
    padding = torch.full((50, 2), -1, device=device)
    ranks.each(lambda rank: peer_gather(pool, caches, padding, ranks.reducers[rank]))


def test_a_row_past_the_end(device: torch.device) -> None:
    ranks, case = Ranks(2, device), Case(16, 100, 60, 16, torch.empty(0, 2))
    pool, caches = case.pool(device), case.caches(2, device)
    rows = torch.randperm(60)[:50]
    pairs = torch.stack([torch.arange(50), rows], 1).to(device)
    pairs[7, 0], pairs[9, 1] = 100, -1
    call: Any = lambda rank: peer_gather(pool, caches, pairs, ranks.reducers[rank])  # noqa: E731
    expected = torch.full_like(caches[0].cpu(), UNTOUCHED)
    if device.type == "cpu":
        for error in ranks.errors(call):
            assert isinstance(error, IndexError)
            assert str(error).startswith("peer_gather: pairs[..., 0]: index 100 at position 7, ")
    else:
        compiled(case, 2, device)
        ranks.each(call)
        with pytest.raises(IndexError, match=r"peer_gather: pairs\[..., 0\]"):
            jitkern.check()
        copied = [i for i in range(50) if i not in (7, 9)]
        expected[rows[copied]] = pool[copied]
    assert all(torch.equal(cache.cpu(), expected) for cache in caches)


def test_memory_of_ranks_at_any_address(device: torch.device) -> None:
    """Each at another one than the rest, of odd rows, also where this rank's is aligned."""
    ranks = Ranks(2, device)
    pool = torch.randint(0, 256, (100, 32), dtype=torch.uint8)
    pool = pool.pin_memory() if device.type == "cuda" else pool
    memory = [torch.full((60 * 32 + 16,), UNTOUCHED, dtype=torch.uint8, device=device)] * 2
    rows = torch.randperm(60)
    pairs = torch.stack([torch.randperm(100)[:60], rows], 1).to(device)
    for shift in (0, 1, 2, 4, 8):
        memory = [part.clone() for part in memory]
        caches = [
            part[at : at + 60 * 32].view(60, 32)
            for part, at in zip(memory, (0, shift), strict=True)
        ]
        ranks.each(lambda rank, c=caches: peer_gather(pool, c, pairs, ranks.reducers[rank]))
        for cache in caches:
            assert torch.equal(cache.cpu()[rows], pool[pairs[:, 0].cpu()])


def test_a_rank_that_does_not_come(device: torch.device) -> None:
    ranks, case = Ranks(3, device, device_timeout_s=1.0), any_case(random.Random(1), repeats=True)
    pool, caches = case.pool(device), case.caches(3, device)
    pairs = case.pairs.to(device)
    call: Any = lambda rank: peer_gather(pool, caches, pairs, ranks.reducers[rank])  # noqa: E731
    compiled(case, 3, device)
    first = ranks.errors(call, [0, 2])
    if device.type == "cuda":
        assert first == [None, None]
        with pytest.raises(CommTimeoutError, match="device_barrier"):
            jitkern.check()  # the device's one record of a fault
    for error in ranks.errors(call, [0, 2]):
        assert isinstance(error, CommTimeoutError) and error.missing == (1,), error
        assert error.op == "device_barrier"
    assert all((cache == UNTOUCHED).all() for cache in caches)


@pytest.mark.cuda
def test_in_a_graph() -> None:
    device = torch.device("cuda")
    ranks, case = Ranks(2, device), Case(656, 900, 500, 656, torch.empty(0, 2))
    pool, caches = case.pool(device), case.caches(2, device)
    pairs = torch.full((400, 2), -1, device=device)
    ranks.each(lambda rank: peer_gather(pool, caches, pairs, ranks.reducers[rank]))
    graphs = []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            peer_gather(pool, caches, pairs, ranks.reducers[rank])
        graphs.append(graph)
    for _ in range(5):
        sources, rows = torch.randint(900, (400,)), torch.randperm(500)[:400]
        pairs.copy_(torch.stack([sources, rows], 1))
        pool.random_()
        ranks.each(lambda rank: graphs[rank].replay())
        for cache in caches:
            assert torch.equal(cache[rows.cuda()].cpu(), pool[sources])
    jitkern.check()


MISTAKES = {
    "peer_gather(s, d[0], p, r)": "TypeError: peer_gather: dsts: Tensor, expected",
    "peer_gather(s, d[:1], p, r)": "ValueError: peer_gather: dsts: 1 tensors, expected 2,",
    "peer_gather(s, d, p, None)": "TypeError: peer_gather: comm: None, expected",
    "peer_gather(s, [d[0], d[1][:3]], p, r)": "ValueError: peer_gather: dsts[1]: ",
    "peer_gather(s, [d[0], d[0]], p, r)": "ValueError: peer_gather: dsts[1]: overlaps dsts[0],",
    "peer_gather(s, [d[0], d[1].int()], p, r)": "TypeError: peer_gather: dsts[1]: dtype int32",
    "peer_gather(s, d, p[:, 0].contiguous(), r)": "ValueError: peer_gather: pairs: shape [4],",
    "peer_gather(s, d, p, r, num_sms=0)": "ValueError: peer_gather: num_sms: 0, expected",
    "peer_gather(s, d, p, r, order='host')": "ValueError: peer_gather: order: 'host', expected",
    "peer_gather(s.requires_grad_(), d, p, r)": "RuntimeError: peer_gather: src",
    "peer_scatter(d[0], s[:, :3], p, r)": "ValueError: peer_scatter: ",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_wrong_calls_wait_for_nobody(code: str) -> None:
    reducer = Ranks(2, torch.device("cpu"), device_timeout_s=0.05).reducers[0]
    src, dsts = torch.ones(10, 4), [torch.ones(10, 4) for _ in range(2)]
    pairs = torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(Exception) as raised:
        eval(code, globals(), {"s": src, "d": dsts, "p": pairs, "r": reducer})
    assert f"{raised.typename}: {raised.value}".startswith(MISTAKES[code])
    assert all((dst == 1).all() for dst in dsts)


def test_what_is_written_has_changed() -> None:
    """For PyTorch, which would else use what it has kept of it; a tracer would see nothing."""
    ranks = Ranks(2, torch.device("cpu"))
    dsts = [torch.ones(10, 4) for _ in range(2)]
    pairs = torch.zeros(4, 2, dtype=torch.int64)
    before = [dst._version for dst in dsts]
    ranks.each(lambda rank: peer_gather(torch.zeros(10, 4), dsts, pairs, ranks.reducers[rank]))
    assert all((dst[0] == 0).all() and (dst[1:] == 1).all() for dst in dsts)
    ranks.each(lambda rank: peer_gather(torch.ones(3, 4), dsts, pairs[:0], ranks.reducers[rank]))
    assert all(dst._version > version for dst, version in zip(dsts, before, strict=True))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="peer_gather: cannot run inside"):
        peer_gather(torch.ones(3, 4), dsts, pairs, ranks.reducers[0])


@pytest.mark.cuda
def test_memory_that_is_not_pinned() -> None:
    ranks, case = Ranks(2, torch.device("cuda")), any_case(random.Random(1), repeats=True)
    caches, pairs = case.caches(2, torch.device("cuda")), case.pairs.cuda()
    pageable = case.pool(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"peer_gather: src: .*pinned host memory"):
        peer_gather(pageable, caches, pairs, ranks.reducers[0])
    with pytest.raises(ValueError, match="peer_gather: pairs: "):
        peer_gather(pageable.pin_memory(), caches, case.pairs, ranks.reducers[0])
