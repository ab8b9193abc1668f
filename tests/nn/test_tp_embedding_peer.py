"""TPEmbedding in peer memory: each row is read from the rank that holds it; ranks are threads."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_ranks import Meeting, ThreadComm, each
from needs import needs_cxx
from ref import ref_indexing, same_bits
from torch import Tensor

import jitkern
from jitkern.comm import peer_memory
from jitkern.errors import CommError, CommTimeoutError, UnsupportedError
from jitkern.nn import TPEmbedding, tp_embedding

pytestmark = needs_cxx

# dtype, hidden size, vocabulary, added. Wide rows are few to a page: 8, 16, 16; then 16384; and
# rows of 6 bytes, of which one rank has all.
TABLES = [
    (torch.float32, 65536, 19, 4),
    (torch.bfloat16, 65536, 37, 5),
    (torch.float8_e4m3fn, 131072, 37, 0),
    (torch.float32, 32, 20_001, 3),
    (torch.float16, 3, 11, 2),
]
SMALL = (9, 65536)  # of two pages, in float32


class Ranks:
    """The modules of all ranks."""

    def __init__(
        self, kind: str, size: int, sizes: tuple[int, int] = SMALL, **options: Any
    ) -> None:
        self.meeting = Meeting(size)
        self.modules: list[TPEmbedding] = []

        def make(rank: int) -> TPEmbedding:
            comm = ThreadComm(self.meeting, rank)
            device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
            given = {"device": device, "group": self.meeting.store, "timeout_s": 20, **options}
            return TPEmbedding(*sizes, comm=comm, **given)

        self.modules = each(range(size), make)

    def each(self, body: Callable[[TPEmbedding], Any]) -> list[Any]:
        return each(self.modules, body, self.meeting)

    def num_sums(self) -> list[int]:
        return [len(one.comm.sent) for one in self.modules]  # type: ignore[attr-defined]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.multigpu])])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def table_of(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a table of any bits, NaN payloads and -0.0 among them."""
    rows, hidden = shape
    bits = torch.randint(0, 256, (rows, hidden * dtype.itemsize), dtype=torch.uint8)
    table = bits.view(dtype)
    if dtype != torch.float8_e4m3fn:
        table[0], table[1] = -0.0, torch.nan
    return table


def rows(module: TPEmbedding) -> list[float]:
    """Return what all rows hold, each number once."""
    with torch.no_grad():
        ids = torch.arange(module.num_embeddings, device=module.weight.device)
        found: list[float] = module(ids).cpu().unique().tolist()
        return found


def filled(module: TPEmbedding, value: float) -> Tensor:
    return torch.full(module.full_shape, value)


# -- look-ups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table[0]}-{table[1]}")
def test_any_row_without_a_sum(kind: str, table: tuple[torch.dtype, int, int, int]) -> None:
    dtype, hidden, vocab, added = table
    ranks = Ranks(kind, 2 if kind == "cuda" else 3, (vocab, hidden), dtype=dtype, num_added=added)
    held = []
    for one in ranks.modules:
        (start, length), (first, more) = one.vocab_range, one.added_range
        assert one.method == "peer" and len(one.weight) >= length + more
        assert not one.weight[length + more :].detach().view(torch.uint8).any()
        held += [*range(start, start + length), *range(first, first + more)]
    assert held == list(range(vocab + added))  # in the order of ranks, and each in one
    whole = table_of((vocab + added, hidden), dtype)

    def look_up(module: TPEmbedding) -> None:
        """Each rank has ids of its own, and as many calls as it likes."""
        module.load_full(whole)
        rank, device = module.comm.rank, module.weight.device
        for index in (torch.int32, torch.int64):
            ids = torch.randint(-2, len(whole), (3, 5 + rank), dtype=index)
            all_ids = torch.arange(len(whole), dtype=index).flip(0)
            for one in (all_ids, ids, ids.t(), ids[:0], ids[0, 0]):
                for grad in (torch.no_grad(), torch.inference_mode()):
                    with grad:
                        found = module(one.to(device)).cpu()
                    assert same_bits(found, ref_indexing(whole, one))
        module.weight.requires_grad_(False)
        assert same_bits(module(all_ids.to(device)).cpu(), whole.flip(0))

    ranks.each(look_up)
    assert set(ranks.num_sums()) == {0}


def test_an_id_that_no_rank_has(kind: str) -> None:
    """One rank alone asks for it: look-ups are not collective."""
    module = Ranks(kind, 2, num_added=2).modules[0]
    device = module.weight.device
    with pytest.raises(IndexError, match="index 11 at position 1, expected below 11"):
        torch.no_grad()(module)(torch.tensor([10, 11], device=device))
        torch.cuda.synchronize()
        jitkern.check(device)


def test_a_gradient_comes_by_the_communicator(kind: str) -> None:
    ranks = Ranks(kind, 2, (19, 65536), num_added=4, padding_idx=8)
    theirs = torch.nn.Embedding(23, 65536, padding_idx=8)
    start = {name: one.clone() for name, one in theirs.state_dict().items()}
    ids = torch.randperm(23)[:9]
    factor = torch.arange(9.0).unsqueeze(1)
    expected = theirs(ids).detach()
    (theirs(ids) * factor).sum().backward()
    torch.optim.SGD([theirs.weight], lr=0.5).step()
    trained = theirs(ids).detach()

    def train(module: TPEmbedding) -> None:
        module.load_state_dict(start)
        on_device = ids.to(module.weight.device)
        found = module(on_device)
        assert found.requires_grad and same_bits(found.detach().cpu(), expected)
        (found * factor.to(found.device)).sum().backward()
        module.fence()
        torch.optim.SGD([module.weight], lr=0.5).step()
        module.fence()
        with torch.no_grad():
            assert same_bits(module(on_device).cpu(), trained)

    ranks.each(train)
    assert ranks.num_sums() == [1, 1]


def test_another_weight_in_its_place_is_summed(kind: str) -> None:
    """By torch.func.functional_call: the other ranks' memory does not have it."""
    ranks = Ranks(kind, 2)

    def call(module: TPEmbedding) -> Tensor:
        other = {"weight": torch.ones_like(module.weight)}
        ids = torch.arange(9, device=module.weight.device)
        with torch.no_grad():
            return torch.func.functional_call(module, other, (ids,))  # type: ignore[no-any-return]

    assert all((found == 1).all() for found in ranks.each(call))
    assert ranks.num_sums() == [1, 1]


def test_it_is_in_a_full_graph(kind: str) -> None:
    ranks = Ranks(kind, 2, padding_idx=3)
    module = ranks.modules[1]
    ids = torch.tensor([0, 7, 3], device=module.weight.device)
    run = torch.compile(lambda ids: module(ids + 1), backend="aot_eager", fullgraph=True)
    for whole in (table_of(SMALL, torch.float32), table_of(SMALL, torch.float32)):
        ranks.each(lambda one: one.load_full(whole))  # noqa: B023
        with torch.no_grad():  # what is compiled reads what is there
            assert same_bits(run(ids).cpu(), whole[(ids + 1).cpu()])
    assert ranks.num_sums() == [0, 0]


# -- loading ---------------------------------------------------------------------------------------


def test_state_dicts_of_the_whole_and_of_a_part(kind: str) -> None:
    """Assigned, swapped or not: the memory stays the same."""
    ranks = Ranks(kind, 2, (19, 65536), num_added=4)
    at = [module.weight.data_ptr() for module in ranks.modules]
    whole = table_of((23, 65536), torch.float32)

    def load(module: TPEmbedding) -> None:
        model = torch.nn.ModuleDict({"a": module})
        for assign in (False, True):
            keys = model.load_state_dict({"a.weight": whole}, assign=assign)
            assert not keys.missing_keys and not keys.unexpected_keys
            mine = {key: value.clone() for key, value in model.state_dict().items()}
            assert set(mine) == {"a.weight"}
            module.load_full(filled(module, 0))
            model.load_state_dict(mine, assign=assign)
            model.load_state_dict(model.state_dict(), assign=assign)  # of itself
        keys = model.load_state_dict({"a.more": whole}, strict=False)
        assert keys.missing_keys == ["a.weight"] and keys.unexpected_keys == ["a.more"]
        assert module.weight.requires_grad
        with torch.no_grad():
            ids = torch.arange(23, device=module.weight.device)
            assert same_bits(module(ids).cpu(), whole)

    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            ranks.each(load)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert [module.weight.data_ptr() for module in ranks.modules] == at


def by_hand(module: TPEmbedding, value: float) -> None:
    module.fence()
    with torch.no_grad():
        module.weight.fill_(value)
    module.fence()


WAYS: dict[str, Callable[[TPEmbedding, float], Any]] = {
    "load_full": lambda m, value: m.load_full(filled(m, value)),
    "load_state_dict": lambda m, value: m.load_state_dict({"weight": filled(m, value)}),
    "reset_parameters": lambda m, value: m.reset_parameters(),
    "fence": by_hand,
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_writes_while_another_reads(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(kind, 2)
    ranks.each(lambda module: by_hand(module, 1))
    monkeypatch.setattr(Tensor, "normal_", lambda self: self.fill_(2))

    def load(module: TPEmbedding) -> None:
        until = time.monotonic() + 0.2 * module.comm.rank  # the second reads until then
        while time.monotonic() < until:
            assert rows(module) == [1]
        WAYS[way](module, 2)
        assert rows(module) == [2]

    ranks.each(load)


def test_nobody_reads_before_all_is_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(kind, 2)
    slow, real = ranks.modules[1].weight.data_ptr(), tp_embedding._write

    def write(to: Tensor, parts: list[Tensor]) -> None:
        time.sleep(0.2 if to.data_ptr() == slow else 0)
        real(to, parts)

    monkeypatch.setattr(tp_embedding, "_write", write)
    assert ranks.each(lambda one: [one.load_full(filled(one, 3)), rows(one)]) == [[None, [3]]] * 2


def test_a_rank_that_does_not_come_to_load_is_named(kind: str) -> None:
    ranks = Ranks(kind, 2, timeout_s=1)
    ranks.each(lambda module: by_hand(module, 1))
    module = ranks.modules[0]
    with pytest.raises(CommTimeoutError, match=r"^barrier:") as raised:
        module.load_full(filled(module, 2))
    assert raised.value.missing == (1,)
    assert rows(module) == [1]  # also what the other rank holds
    with pytest.raises(CommError, match="make a new one"):
        module.load_full(filled(module, 2))


def test_a_rank_that_fails_to_write(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not go on with a table of which a part is lacking."""
    ranks = Ranks(kind, 2, timeout_s=1)
    broken, real = ranks.modules[1].weight.data_ptr(), tp_embedding._write

    def write(to: Tensor, parts: list[Tensor]) -> None:
        if to.data_ptr() == broken:
            raise OSError("no rows")
        real(to, parts)

    monkeypatch.setattr(tp_embedding, "_write", write)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(one.load_full, filled(one, 2)) for one in ranks.modules]
    error = calls[0].exception()
    assert isinstance(error, CommTimeoutError) and error.missing == (1,)
    assert isinstance(calls[1].exception(), OSError)


def test_a_wrong_table_is_refused_before_ranks_meet(kind: str) -> None:
    ranks = Ranks(kind, 2)
    module = ranks.modules[0]
    with pytest.raises(ValueError, match=r"weight: shape \[8, 65536\], expected \[9, 65536\]"):
        module.load_full(torch.zeros(8, 65536))
    for wrong in (torch.zeros(7, 65536), [1]):
        with pytest.raises(RuntimeError, match="loading state_dict"):
            module.load_state_dict({"weight": wrong})
    ranks.each(lambda module: by_hand(module, 5))
    assert rows(module) == [5]


# -- what it is ------------------------------------------------------------------------------------


def test_it_stays_where_it_is(kind: str) -> None:
    module = Ranks(kind, 2).modules[0]
    at = module.weight.data_ptr()
    for same in (module.float(), module.to(module.weight.device), module.eval()):
        assert same is module and module.weight.data_ptr() == at
    for move in (module.half, lambda: module.to("meta"), torch.nn.Sequential(module).double):
        with pytest.raises(RuntimeError, match=r"make a new module with dtype= and device=$"):
            move()
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="in memory that other ranks read, cannot be copied"):
            make(module)
    assert repr(module) == "TPEmbedding(9, 65536, num_added=0, method='peer', rank=0, size=2)"


def test_a_module_takes_its_memory_along() -> None:
    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("jitkern-peers")

    before = mappings()
    ranks = Ranks("cpu", 2)
    assert mappings() == before + 4
    del ranks
    assert mappings() == before


def test_where_there_can_be_no_peer_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks sum, or all raise."""
    numbers = itertools.count()
    monkeypatch.setattr(peer_memory, "_machine", lambda: str(next(numbers)))
    ranks = Ranks(kind, 2)
    assert [one.method for one in ranks.modules] == ["all_reduce", "all_reduce"]
    assert [one.vocab_range for one in ranks.modules] == [(0, 5), (5, 4)]
    ranks.each(lambda module: by_hand(module, 4))
    assert ranks.each(rows) == [[4], [4]] and ranks.num_sums() == [1, 1]
    with pytest.raises(UnsupportedError, match=r"PeerMemory: rank 0 is on .*all on one host"):
        Ranks(kind, 2, method="peer")


def test_wasteful_rows(kind: str) -> None:
    """131 * 2 bytes: whole pages are of 2**20 rows."""
    sizes, dtype = (1000, 131), torch.bfloat16
    assert Ranks(kind, 2, sizes, dtype=dtype).modules[0].method == "all_reduce"
    assert Ranks(kind, 2, (1000, 160), dtype=dtype).modules[0].method == "peer"
