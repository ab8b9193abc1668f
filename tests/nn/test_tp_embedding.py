"""TPEmbedding against a plain look-up, its layout, loading and tracing; ranks are threads."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm, Way
from hypothesis import given
from hypothesis import strategies as st
from needs import needs_cxx
from ref import ref_indexing, refusals, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jitkern
from jitkern.errors import EarlierRuntimeError
from jitkern.nn import TPEmbedding, tp_embedding

pytestmark = needs_cxx
PAGE_BYTES = 2 << 20
CUDA = [
    pytest.param(("all_reduce", "cuda"), marks=pytest.mark.cuda),
    pytest.param(("peer", "cuda"), marks=pytest.mark.multigpu),
]


@pytest.fixture(params=[("all_reduce", "cpu"), ("peer", "cpu"), *CUDA], ids="-".join)
def way(request: pytest.FixtureRequest) -> Way:
    return Way(*request.param)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


def any_bits(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Return any bits: NaN payloads, -0.0, infinities, subnormal numbers."""
    return torch.randint(0, 256, (rows, hidden * dtype.itemsize), dtype=torch.uint8).view(dtype)


# dtype, hidden size, vocabulary, added. Wide rows are few to a page: 8, 16, 16; then 16384; and
# rows of 6 bytes, of which one rank has all.
TABLES = [
    (torch.float32, 65536, 19, 4),
    (torch.bfloat16, 65536, 37, 5),
    (torch.float8_e4m3fn, 131072, 37, 0),
    (torch.float32, 32, 20_001, 3),
    (torch.float16, 3, 11, 2),
]


def any_table(seed: int) -> tuple[torch.dtype, int, int, int]:
    rng = random.Random(seed)
    hidden = rng.choice([1, 2, 3, 5, 8, 33, 64])
    return rng.choice(DTYPES), hidden, rng.randrange(1, 40), rng.choice([0, 0, 1, 3, 9])


@pytest.mark.parametrize("table", [*TABLES, *map(any_table, range(6))], ids=str)
def test_any_row(way: Way, table: tuple[torch.dtype, int, int, int]) -> None:
    dtype, hidden, vocab, added = table
    rng = random.Random(vocab)
    size = 2 if way.kind == "cuda" else rng.choice([1, 2, 3, 4])
    whole = any_bits(vocab + added, hidden, dtype)
    ranks = way.ranks_of(size, whole, num_added=added)
    assert same_bits(ranks.whole(), whole)
    is_summed = size > 1 and way.algorithm == "all_reduce"
    index = rng.choice([torch.int32, torch.int64])
    shapes = [(vocab + added,), (3, 5), (5, 3), (), (0, 2)]
    all_ids = [torch.randint(-2, vocab + added, shape, dtype=index) for shape in shapes]
    all_ids[0] = torch.arange(vocab + added, dtype=index).flip(0)
    all_ids[2] = all_ids[1].t()

    def look_up(module: TPEmbedding) -> None:
        for ids in all_ids:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    rows = module(ids.to(module.weight.device))
                assert same_bits(rows.cpu(), ref_indexing(whole, ids))
                sent, nbytes = module.comm.sent, rows.numel() * dtype.itemsize  # type: ignore[attr-defined]
                if is_summed and nbytes:
                    expected = (torch.uint8, nbytes) if nbytes % 4 else (torch.int32, nbytes // 4)
                    assert sent.pop() == expected
                assert sent == []

    ranks.each(look_up)


def test_an_id_that_no_rank_has(way: Way) -> None:
    """Every rank raises before it has sent anything; one that reads peers may ask alone."""
    ranks = way.ranks(2, 10, 4, num_added=2)

    device = ranks.modules[1].weight.device

    def look_up(module: TPEmbedding) -> None:
        module(torch.tensor([11, 12], device=module.weight.device))

    with pytest.raises(IndexError, match="index 12 at position 1, expected below 12"):
        if way.algorithm == "peer":
            look_up(ranks.modules[1])
        else:
            ranks.each(look_up)
        if device.type == "cuda":  # one record of a GPU for all of its ranks
            torch.cuda.synchronize(device)
            jitkern.check(device)
    if device.type == "cuda":  # a fault of the other rank's kernel, if that came later
        torch.cuda.synchronize(device)
        with suppress(IndexError):
            jitkern.check(device)
    assert way.kind == "cuda" or ranks.num_sums() == 0


WRONG_IDS: list[tuple[Any, type[Exception], str]] = [
    (torch.zeros(3), TypeError, "dtype float32, expected int32 or int64"),
    ([1, 2], TypeError, "list, expected a tensor"),
    (
        torch.zeros(3, dtype=torch.int32, device="meta"),
        ValueError,
        "on meta, expected on cpu as we",
    ),
    (torch.tensor([[2, 3], [10, 5]]).t(), IndexError, "index 10 at position 1, expected below 10"),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("ids", "kind", "text"), WRONG_IDS)
def test_wrong_ids_are_refused_before_a_sum(
    ids: Any, kind: type[Exception], text: str, size: int
) -> None:
    module = TPEmbedding(10, 4, comm=(comm := SilentComm(0, size)))
    with pytest.raises(kind, match=f"^TPEmbedding: ids: {text}"):
        module(ids)
    assert comm.sent == []


def test_the_sum_is_made_over_any_fault_of_an_earlier_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its type, and no other error."""
    earlier: list[Exception] = [EarlierRuntimeError("unpack: ...")]
    real = tp_embedding.indexing

    def indexing(*args: Any, **options: Any) -> Tensor:
        if earlier:
            raise earlier.pop()
        return real(*args, **options)

    monkeypatch.setattr(tp_embedding, "indexing", indexing)
    module = TPEmbedding(10, 8, comm=(comm := SilentComm()))
    with pytest.raises(RuntimeError, match="unpack"):
        module(torch.arange(10))
    assert len(comm.sent) == 1
    earlier.append(RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        module(torch.arange(10))
    assert len(comm.sent) == 1


test_wrong_arguments = refusals(
    TPEmbedding,
    {"vocab_size": 10, "hidden_size": 3, "num_added": 1, "comm": SilentComm()},
    ({"vocab_size": 0}, ValueError, "vocab_size: 0, expected at least 1"),
    ({"hidden_size": 4.0}, TypeError, "hidden_size: float, expected an int"),
    ({"num_added": -1}, ValueError, "num_added: -1, expected at least 0"),
    ({"dtype": torch.int32}, TypeError, "dtype: int32, expected a floating dtype"),
    ({"dtype": "float32"}, TypeError, "dtype: str, expected a torch.dtype"),
    ({"device": "gpu"}, ValueError, "device: gpu, expected a device of PyTorch"),
    ({"group": 5}, TypeError, "group: int, expected a ProcessGroup, a Store or None"),
    ({"comm": None}, TypeError,
     "comm: None without rank, world_size, all_reduce, expected a Communicator"),
    ({"comm": SilentComm(2, 2)}, ValueError,
     "comm: rank 2 of 2, expected a rank of 0 to world_size - 1"),
    ({"algorithm": "nccl"}, ValueError,
     "algorithm: 'nccl', expected 'auto', 'peer' or 'all_reduce'"),
    ({"algorithm": "peer"}, ValueError,
     "group: None, expected the ranks' gloo group or store for algorithm='peer'"),
    ({"timeout_s": 0}, ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
)  # fmt: skip


@given(st.integers(1, 300), st.integers(0, 40), st.integers(1, 9), st.integers(0, 60))
def test_each_row_has_one_rank(vocab: int, added: int, size: int, more: int) -> None:
    needed = -(-(vocab + added) // size)
    for each in (None, needed, needed + more):
        parts = [tp_embedding.part_of(vocab, added, rank, size, each) for rank in range(size)]
        vocab_ranges = [part.vocab_range for part in parts]
        added_ranges = [part.added_range for part in parts]
        for ranges, begin, end in ((vocab_ranges, 0, vocab), (added_ranges, vocab, vocab + added)):
            assert [row for at, n in ranges for row in range(at, at + n)] == [*range(begin, end)]
            assert all(begin <= at <= end for at, _ in ranges)
        assert len({part.num_rows for part in parts}) == 1
        held = [
            first[1] + second[1] for first, second in zip(vocab_ranges, added_ranges, strict=True)
        ]
        assert all(0 <= rows <= parts[0].num_rows for rows in held)
        if each is not None:  # in the order of the ranks
            assert held == [min(max(vocab + added - rank * each, 0), each) for rank in range(size)]


@given(st.integers(1, 300_000), st.integers(1, 9), st.integers(1, 40_000))
def test_whole_pages(rows: int, size: int, row_bytes: int) -> None:
    each = tp_embedding.rows_in_pages(rows, size, row_bytes)
    assert each * size >= rows and each * row_bytes % PAGE_BYTES == 0
    smaller = range(max(each - PAGE_BYTES // (row_bytes & -row_bytes), 0) + 1, each)
    assert all(count * row_bytes % PAGE_BYTES for count in smaller[:100])


@pytest.mark.parametrize("options", [
    {"comm": SilentComm(0, 1), "algorithm": "peer", "group": object()},
    {"comm": SilentComm(0, 2), "device": "meta", "group": object()},
])  # fmt: skip
def test_no_peer_memory_for_one_rank_or_on_the_meta_device(options: dict[str, Any]) -> None:
    module = TPEmbedding(10, 4, **options)
    assert module.algorithm == "all_reduce"
    module.fence()
    if module.weight.is_meta:
        table = torch.randn(10, 4)
        module.to_empty(device="cpu").load_full(table)
        assert torch.equal(module.weight, table[:5])


def test_as_torch_has_it() -> None:
    table = torch.randn(11, 4, dtype=torch.float64)
    theirs = torch.nn.Embedding.from_pretrained(table)
    ours = TPEmbedding.from_pretrained(table, comm=SilentComm(0, 1), num_added=3)
    assert (ours.num_embeddings, ours.embedding_dim) == (11, 4) == ours.full_shape
    assert (theirs.num_embeddings, theirs.embedding_dim) == (11, 4)
    assert ours.vocab_size == 8
    ids = torch.tensor([[0, 10], [2, 3]])
    assert torch.equal(ours(ids), theirs(ids))
    half = TPEmbedding.from_pretrained(table, comm=SilentComm(0, 1), dtype=torch.half)
    assert torch.equal(half.weight, table.half())
    module = TPEmbedding(10, 2, comm=SilentComm(rank=3, world_size=4), num_added=5)
    assert not module.weight.any()
    assert (module.vocab_range, module.added_range) == ((9, 1), (15, 0))
    text = "TPEmbedding(10, 2, num_added=5, algorithm='all_reduce', rank=3, world_size=4)"
    assert repr(module) == text


VOCAB, ADDED, HIDDEN = 11, 3, 5
FULL = (VOCAB + ADDED, HIDDEN)


class Slice:
    """As ``safe_open(...).get_slice(name)`` returns it; records the rows that are read."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.read: list[tuple[int, int]] = []

    def get_shape(self) -> list[int]:
        return list(self.table.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(len(self.table))
        assert step == 1 and start < stop
        self.read.append((start, stop - start))
        return self.table[rows].clone()


@pytest.mark.parametrize("size", [1, 3, 20])
def test_only_the_rows_of_a_rank_are_read(size: int) -> None:
    table = torch.randn(FULL)
    ranks = Way("all_reduce", "cpu").ranks(size, VOCAB, HIDDEN, num_added=ADDED)
    for module in ranks.modules:
        source = Slice(table)
        module.load_full(source)
        assert source.read == [held for held in (module.vocab_range, module.added_range) if held[1]]
    assert torch.equal(ranks.whole(), table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_and_devices(way: Way, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"embed": torch.randn(FULL).to(dtype)}, tmp_path / "weights.pt")
    table = torch.load(tmp_path / "weights.pt", mmap=True)["embed"]
    ranks = way.ranks(2, VOCAB, HIDDEN, num_added=ADDED)
    ranks.each(lambda module: module.load_full(table))
    assert same_bits(ranks.whole(), table.float())


class Lists(Slice):
    def __getitem__(self, rows: slice) -> Any:
        return super().__getitem__(rows).tolist()


WRONG_TABLES: list[tuple[Any, type[Exception], str]] = [
    (torch.zeros(VOCAB, HIDDEN), ValueError, f"shape [{VOCAB}, {HIDDEN}], expected {[*FULL]}"),
    (Slice(torch.zeros(13, HIDDEN)), ValueError, f"shape [13, {HIDDEN}], expected {[*FULL]}"),
    (Lists(torch.zeros(FULL)), TypeError, "slices are list, expected tensors"),
    (None, TypeError, "None, expected a tensor"),
]


def test_wrong_tables(way: Way) -> None:
    """One rank is refused without the others."""
    ranks = way.ranks(2, VOCAB, HIDDEN, num_added=ADDED)
    module = ranks.modules[0]
    before = ranks.whole()
    for weight, kind, text in WRONG_TABLES:
        with pytest.raises(kind, match=f"^TPEmbedding: weight: {re.escape(text)}$"):
            module.load_full(weight)
    for wrong in (torch.zeros(6, HIDDEN), [1]):
        with pytest.raises(RuntimeError, match="loading state_dict"):
            module.load_state_dict({"weight": wrong}, strict=False)
    assert torch.equal(ranks.whole(), before)
    ranks.each(lambda module: module.fence())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_state_dicts(way: Way, assign: bool, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dict of a model that is not split, and of a rank; the weight keeps its memory."""
    whole = torch.randn(FULL)
    table = {"a.weight": whole}
    ranks = way.ranks(2, VOCAB, HIDDEN, num_added=ADDED)
    at = [module.weight.data_ptr() for module in ranks.modules]

    def load(module: TPEmbedding) -> None:
        model = torch.nn.ModuleDict({"a": module})
        keys = model.load_state_dict(table, assign=assign)
        assert not keys.missing_keys and not keys.unexpected_keys
        mine = {key: value.clone() for key, value in model.state_dict().items()}
        assert mine["a.weight"].shape == module.weight.shape
        module.load_full(torch.zeros(FULL))
        model.load_state_dict(mine, assign=assign)
        model.load_state_dict(model.state_dict(), assign=assign)  # its own
        keys = model.load_state_dict({"a.more": whole}, strict=False)
        assert keys.missing_keys == ["a.weight"] and keys.unexpected_keys == ["a.more"]
        ids = torch.arange(VOCAB + ADDED, device=module.weight.device)
        assert same_bits(module(ids).cpu(), whole)

    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        ranks.each(load)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert table["a.weight"] is whole and torch.equal(ranks.whole(), whole)
    if way.algorithm == "peer":
        assert [module.weight.data_ptr() for module in ranks.modules] == at


# -- tracers, transforms and autograd -----------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, embedding: TPEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids + 1) * 2 + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1, 2])
def test_compiled(device: torch.device, size: int) -> None:
    """One rank is in the graph; of two, each separately: their graphs differ."""
    ids = torch.tensor([-1, 2, 13, 27, 13], device=device)
    torch.compiler.reset()
    for rank in range(size):
        comm = SilentComm(rank, size)
        model = Model(TPEmbedding(29, 4, comm=comm, device=device))
        expected = model(ids)
        comm.sent.clear()
        options: Any = {"backend": "aot_eager", "fullgraph": size == 1}
        run: Callable[[Tensor], Tensor] = torch.compile(model, **options)
        for num_calls in (1, 2):
            assert torch.equal(run(ids), expected)
            assert len(comm.sent) == (num_calls if size > 1 else 0)


def _fake(module: TPEmbedding, ids: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module(ids)


def _of_weight(module: TPEmbedding, ids: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: torch.func.functional_call(module, {"weight": weight}, (ids,)).sum()


TRACERS: dict[str, Callable[[TPEmbedding, Tensor], object]] = {
    "make_fx": lambda m, i: make_fx(m)(i),
    "export": lambda m, i: torch.export.export(m, (i,), strict=False),
    "jit.trace": lambda m, i: torch.jit.trace(m, (i,)),
    "vmap": lambda m, i: torch.vmap(m)(i.unsqueeze(0)),
    "func.grad": lambda m, i: torch.func.grad(_of_weight(m, i))(m.weight.detach()),
    "func.jvp": lambda m, i: torch.func.jvp(_of_weight(m, i), (m.weight,), (m.weight,)),
    "fake": _fake,
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_would_lose_the_sum_is_refused(tracer: str) -> None:
    comm = SilentComm()
    module = TPEmbedding(29, 4, comm=comm)
    text = "^(TPEmbedding|indexing): "
    with pytest.raises(RuntimeError, match=text):
        TRACERS[tracer](module, torch.tensor([1, 20]))
    assert comm.sent == []
