"""TPEmbedding bit for bit as a plain look-up, its layout and loading, on ranks that are threads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm, ThreadComm, embedding_of, on_ranks, whole_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ref import ref_indexing, same_bits
from torch import Tensor

import jitkern
from jitkern.nn import TPEmbedding, tp_embedding

PAGE_BYTES = 2 << 20
SIZES = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


def any_bits(rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a table of all there is: NaN payloads, -0.0, infinities, subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, hidden * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


@settings(max_examples=40)
@given(data=st.data())
def test_any_look_up(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    size, dtype = draw(st.sampled_from(SIZES)), draw(st.sampled_from(DTYPES))
    vocab, added = draw(st.integers(1, 40)), draw(st.sampled_from([0, 0, 1, 3, 9]))
    hidden = draw(st.sampled_from([1, 2, 3, 5, 8, 33, 64]))
    table = any_bits(vocab + added, hidden, dtype, draw(st.integers(0, 99))).to(device)
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel()
    values = draw(st.lists(st.integers(-3, vocab + added - 1), min_size=count, max_size=count))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = torch.tensor(values, dtype=index_dtype, device=device).reshape(shape)
    ids = ids.repeat_interleave(2, -1)[..., ::2] if shape and draw(st.booleans()) else ids
    mode = draw(st.sampled_from([torch.no_grad, torch.inference_mode]))

    def body(comm: ThreadComm) -> Tensor:
        module = embedding_of(table, comm, num_added=added)
        with mode():
            rows: Tensor = module(ids)
        nbytes = rows.numel() * dtype.itemsize
        sent = [(torch.uint8, nbytes) if nbytes % 4 else (torch.int32, nbytes // 4)]
        assert comm.sent == (sent if size > 1 and nbytes > 0 else [])
        return rows

    for rows in on_ranks(size, body):
        assert same_bits(rows, ref_indexing(table, ids))


def test_the_ranges_of_a_rank() -> None:
    module = TPEmbedding(10, 2, comm=SilentComm(rank=3, size=4), num_added=5, padding_idx=-1)
    assert (module.vocab_range, module.added_range) == ((9, 1), (15, 0))
    assert module.weight.shape == (5, 2) and module.full_shape == (15, 2)
    assert repr(module) == (
        "TPEmbedding(10, 2, num_added=5, padding_idx=14, method='all_reduce', rank=3, size=4)"
    )


@pytest.mark.parametrize("size", [1, 3])
def test_an_id_that_no_rank_has(size: int) -> None:
    """Every rank raises before it has sent anything."""
    table = torch.randn(10, 4)
    text = "index 10 at position 1, expected below 10"

    def body(comm: ThreadComm) -> None:
        module = embedding_of(table, comm, num_added=2)
        with pytest.raises(IndexError, match=text):
            module(torch.tensor([9, 10]))
        assert comm.sent == []

    on_ranks(size, body)


@pytest.mark.cuda
@pytest.mark.parametrize("rank", [0, 1])
def test_an_id_that_no_rank_has_on_a_gpu(rank: int) -> None:
    module = TPEmbedding(10, 4, comm=SilentComm(rank), device="cuda")
    assert not module(torch.tensor([-1, 10], device="cuda")).any()
    with pytest.raises(IndexError, match="index 10 at position 1, expected below 10"):
        jitkern.check("cuda")


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_one_seed_draw_different_rows(size: int) -> None:
    def draw(rank: int) -> tuple[TPEmbedding, Tensor]:
        torch.manual_seed(7)
        options: Any = {"padding_idx": 4, "num_added": 3}
        module = TPEmbedding(20, 5, comm=SilentComm(rank, size), **options)
        return module, torch.rand(4)

    modules, behind = zip(*map(draw, range(size)), strict=True)
    whole = whole_of([module.weight.detach() for module in modules], modules)
    assert not whole[4].any()
    assert len(whole.unique(dim=0)) == 23
    assert all(torch.equal(one, behind[0]) for one in behind)


def test_one_rank_draws_as_nn_embedding_does() -> None:
    torch.manual_seed(3)
    ours = TPEmbedding(11, 5, comm=SilentComm(0, 1), padding_idx=2)
    torch.manual_seed(3)
    assert torch.equal(ours.weight, torch.nn.Embedding(11, 5, padding_idx=2).weight)


def test_on_the_meta_device_and_from_there() -> None:
    module = TPEmbedding(11, 5, comm=SilentComm(1), device="meta", dtype=torch.bfloat16)
    assert module.weight.is_meta
    module.to_empty(device="cpu").reset_parameters()
    assert module.weight[:5].any() and not module.weight[5:].any()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"vocab_size": 0}, ValueError, "vocab_size: 0, expected at least 1"),
    ({"vocab_size": 4.0}, TypeError, "vocab_size: float, expected an int"),
    ({"hidden_size": 0}, ValueError, "hidden_size: 0, expected at least 1"),
    ({"num_added": -1}, ValueError, "num_added: -1, expected at least 0"),
    ({"padding_idx": 11}, ValueError, "padding_idx: 11, expected -11 to 10"),
    ({"padding_idx": 1.0}, TypeError, "padding_idx: float, expected an int"),
    ({"dtype": torch.int32}, TypeError, "dtype: int32, expected a floating dtype"),
    ({"comm": None}, TypeError,
     "comm: None without rank, size, all_reduce, expected a Communicator"),
    ({"comm": SilentComm(2, 2)}, ValueError,
     "comm: rank 2 of 2, expected a rank of 0 to size - 1"),
    ({"method": "nccl"}, ValueError,
     "method: 'nccl', expected one of auto, peer, all_reduce"),
    ({"method": "peer"}, ValueError,
     "group: None, expected the ranks' gloo group or store for method='peer'"),
    ({"timeout_s": 0}, ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), WRONG)
def test_wrong_arguments(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    good = {"vocab_size": 10, "hidden_size": 3, "num_added": 1, "comm": SilentComm()}
    arguments = {**good, **change}
    sizes = arguments.pop("vocab_size"), arguments.pop("hidden_size")
    with pytest.raises(kind) as caught:
        TPEmbedding(*sizes, **arguments)
    assert str(caught.value) == f"TPEmbedding: {text}"


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_ids_are_refused_before_a_sum(device: torch.device, size: int) -> None:
    comm = SilentComm(0, size)
    module = TPEmbedding(10, 4, comm=comm, device=device, padding_idx=1)
    for ids in (torch.zeros(3, device=device), [1, 2]):
        with pytest.raises(TypeError, match=r"indexing: indices: (dtype float32|list), expected"):
            module(ids)
    assert comm.sent == []


# -- layout ----------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 40), st.integers(1, 9), st.integers(0, 60))
def test_each_row_has_one_rank(vocab: int, added: int, size: int, more: int) -> None:
    needed = -(-(vocab + added) // size)
    for each in (None, needed, needed + more):
        parts = [tp_embedding.part_of(vocab, added, rank, size, each) for rank in range(size)]
        base = [one.vocab_range for one in parts]
        behind = [one.added_range for one in parts]
        for ranges, begin, end in ((base, 0, vocab), (behind, vocab, vocab + added)):
            assert [row for at, n in ranges for row in range(at, at + n)] == [*range(begin, end)]
            assert all(begin <= at <= end for at, _ in ranges)
        assert len({one.num_rows for one in parts}) == 1
        held = [first[1] + second[1] for first, second in zip(base, behind, strict=True)]
        assert all(0 <= one <= parts[0].num_rows for one in held)
        if each is not None:  # the table is what the ranks hold, in their order
            assert held == [min(max(vocab + added - rank * each, 0), each) for rank in range(size)]


@given(st.integers(1, 300_000), st.integers(1, 9), st.integers(1, 40_000))
def test_whole_pages(rows: int, size: int, row_bytes: int) -> None:
    each = tp_embedding.rows_in_pages(rows, size, row_bytes)
    assert each * size >= rows and each * row_bytes % PAGE_BYTES == 0
    smaller = range(max(each - PAGE_BYTES // (row_bytes & -row_bytes), 0) + 1, each)
    assert all(one * row_bytes % PAGE_BYTES for one in smaller[:100])


@pytest.mark.parametrize("options", [
    {"comm": SilentComm(0, 1), "method": "peer", "group": object()},
    {"comm": SilentComm(0, 2), "device": "meta", "group": object()},
])  # fmt: skip
def test_no_peer_memory_for_one_rank_or_on_the_meta_device(options: dict[str, Any]) -> None:
    module = TPEmbedding(10, 4, **options)
    assert module.method == "all_reduce"
    module.fence()


def test_by_sums_it_is_copied_and_moved_as_any_module() -> None:
    module = TPEmbedding(10, 4, comm=SilentComm(), num_added=1)
    rows = module.weight.detach()
    for one in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(one.weight, rows) and one.vocab_range == module.vocab_range
    module.half()
    assert module.weight.dtype == torch.float16
    assert module(torch.tensor([1])).dtype == torch.float16


def test_as_torch_has_it() -> None:
    table = torch.randn(11, 4, dtype=torch.float64)
    theirs = torch.nn.Embedding.from_pretrained(table, padding_idx=2)
    ours = TPEmbedding.from_pretrained(table, comm=SilentComm(0, 1), padding_idx=2, num_added=3)
    assert (ours.num_embeddings, ours.embedding_dim) == (11, 4) == ours.full_shape
    assert (theirs.num_embeddings, theirs.embedding_dim) == (11, 4)
    assert ours.vocab_size == 8 and not ours.weight.requires_grad
    ids = torch.tensor([[0, 10], [2, 3]])
    assert torch.equal(ours(ids), theirs(ids))
    free = TPEmbedding.from_pretrained(table, freeze=False, comm=SilentComm(0, 1), dtype=torch.half)
    assert free.weight.requires_grad and free.weight.dtype == torch.half
    assert torch.equal(free.weight, table.half())


# -- loading ---------------------------------------------------------------------------------------

VOCAB, ADDED, HIDDEN = 11, 3, 5
FULL = (VOCAB + ADDED, HIDDEN)


class Slice:
    """As ``safe_open(...).get_slice(name)`` returns it; notes what is read."""

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


def ranks_of(size: int, **options: Any) -> list[TPEmbedding]:
    given = {"num_added": ADDED, **options}
    return [TPEmbedding(VOCAB, HIDDEN, comm=SilentComm(r, size), **given) for r in range(size)]


def table_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(FULL).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_only_the_rows_of_a_rank_are_read(size: int) -> None:
    table = table_of()
    modules, read = ranks_of(size), []
    for module in modules:
        source = Slice(table)
        module.load_full(source)
        ranges = [module.vocab_range, module.added_range]
        assert source.read == [one for one in ranges if one[1] > 0]
        read += source.read
    assert torch.equal(whole_of([module.weight for module in modules], modules), table)
    rows = [row for start, length in read for row in range(start, start + length)]
    assert sorted(rows) == list(range(VOCAB + ADDED))  # each by one rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_and_devices(device: torch.device, tmp_path: Path, dtype: torch.dtype) -> None:
    """And a tensor that is mapped from a file."""
    torch.save({"embed": table_of(dtype)}, tmp_path / "weights.pt")
    table = torch.load(tmp_path / "weights.pt", mmap=True)["embed"]
    modules = ranks_of(3, device=device)
    for module in modules:
        module.load_full(table)
    whole = whole_of([module.weight for module in modules], modules)
    assert whole.device.type == device.type
    assert same_bits(whole.detach(), table.float())


class Lists(Slice):
    def __getitem__(self, rows: slice) -> Any:
        return super().__getitem__(rows).tolist()


WRONG_TABLES: list[tuple[Any, type[Exception], str]] = [
    (torch.zeros(VOCAB, HIDDEN), ValueError, f"shape [{VOCAB}, {HIDDEN}], expected {[*FULL]}"),
    (torch.zeros(14 * HIDDEN), ValueError, f"shape [70], expected {[*FULL]}"),
    (Slice(torch.zeros(13, HIDDEN)), ValueError, f"shape [13, {HIDDEN}], expected {[*FULL]}"),
    (Lists(torch.zeros(FULL)), TypeError, "slices are list, expected tensors"),
    (None, TypeError, "None, expected a tensor"),
]


@pytest.mark.parametrize(
    ("weight", "kind", "text"), WRONG_TABLES, ids=lambda value: type(value).__name__
)
def test_wrong_tables(weight: Any, kind: type[Exception], text: str) -> None:
    module = ranks_of(2)[0]
    before = module.weight.detach().clone()
    with pytest.raises(kind) as caught:
        module.load_full(weight)
    assert str(caught.value) == f"TPEmbedding: weight: {text}"
    assert torch.equal(module.weight, before)


# -- state dicts -----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, embed: torch.nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.norm = torch.nn.LayerNorm(HIDDEN)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(size: int, assign: bool) -> None:
    """Of a model that is not split, and of ranks, which keep what is theirs."""
    whole = Model(torch.nn.Embedding(*FULL)).state_dict()
    models = [Model(module) for module in ranks_of(size)]
    for model in models:
        keys = model.load_state_dict(whole, assign=assign)
        assert not keys.missing_keys and not keys.unexpected_keys
    assert whole["embed.weight"].shape == FULL  # what was given is as it was
    modules: list[Any] = [model.embed for model in models]
    parts = [model.state_dict()["embed.weight"] for model in models]
    assert all(
        part.shape == module.weight.shape for part, module in zip(parts, modules, strict=True)
    )
    assert torch.equal(whole_of(parts, modules), whole["embed.weight"])
    fresh = [Model(module) for module in ranks_of(size)]
    for new, old in zip(fresh, models, strict=True):
        new.load_state_dict(old.state_dict(), assign=assign)
        assert torch.equal(new.embed.weight, old.embed.weight)  # type: ignore[arg-type]


def test_a_state_dict_of_another_shape_or_without_it() -> None:
    model = Model(ranks_of(4)[1])
    before = model.state_dict()["embed.weight"].clone()
    wrong = {**model.state_dict(), "embed.weight": torch.zeros(6, HIDDEN)}
    with pytest.raises(RuntimeError, match=r"size mismatch for embed\.weight"):
        model.load_state_dict(wrong, strict=False)
    assert torch.equal(model.state_dict()["embed.weight"], before)
    keys = model.load_state_dict({"norm.bias": torch.ones(HIDDEN)}, strict=False)
    assert keys.missing_keys == ["embed.weight", "norm.weight"]
