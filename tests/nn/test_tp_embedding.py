"""TPEmbedding against a plain look-up, bit for bit, on ranks that are threads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm, ThreadComm, embedding_of, on_ranks, whole_of
from hypothesis import given
from hypothesis import strategies as st
from ref import ref_indexing, same_bits
from torch import Tensor

import jitkern
from jitkern.nn import TPEmbedding

SIZES = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


def any_bits(rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a table of all there is: NaN payloads, -0.0, infinities, subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, hidden * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


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

    def body(comm: ThreadComm) -> Tensor:
        with torch.no_grad():
            rows: Tensor = embedding_of(table, comm, num_added=added)(ids)
        nbytes = rows.numel() * dtype.itemsize
        sent = [(torch.uint8, nbytes) if nbytes % 4 else (torch.int32, nbytes // 4)]
        assert comm.sent == (sent if size > 1 and nbytes > 0 else [])
        return rows

    for rows in on_ranks(size, body):
        assert same_bits(rows, ref_indexing(table, ids))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_nn_embedding(device: torch.device, size: int, dtype: torch.dtype) -> None:
    theirs = torch.nn.Embedding(37, 24, dtype=dtype, device=device)
    with torch.no_grad():
        theirs.weight[5] = -0.0
        theirs.weight[36] = torch.nan
    ids = torch.randint(0, 37, (3, 50), device=device)
    ids[0, :2] = torch.tensor([5, 36])
    for rows in on_ranks(size, lambda comm: embedding_of(theirs.weight.detach(), comm)(ids)):
        assert rows.requires_grad
        assert same_bits(rows.detach(), theirs(ids).detach())
        assert torch.equal(rows[0, 0].signbit(), torch.ones(24, dtype=torch.bool, device=device))


@pytest.mark.parametrize("size", SIZES)
def test_the_parts_are_the_table(device: torch.device, size: int) -> None:
    """Also where the vocabulary does not divide, and ranks have none of it."""
    for vocab, added in ((1, 0), (2, 1), (3, 0), (5, 3), (12, 4), (13, 1)):
        table = torch.randn(vocab + added, 3, device=device)
        modules = on_ranks(size, lambda comm: embedding_of(table, comm, num_added=added))  # noqa: B023
        each = -(-vocab // size) + -(-added // size)
        assert all(module.weight.shape == (each, 3) for module in modules)
        assert torch.equal(whole_of([module.weight for module in modules], modules), table)


def test_the_ranges_of_a_rank() -> None:
    module = TPEmbedding(10, 2, comm=SilentComm(rank=3, size=4), num_added=5)
    assert module.vocab_range == (9, 1)
    assert module.added_range == (15, 0)
    assert module.weight.shape == (5, 2)
    assert module.full_shape == (15, 2)
    assert repr(module) == "TPEmbedding(10, 2, num_added=5, rank=3, size=4)"
    last = TPEmbedding(5, 2, comm=SilentComm(rank=3, size=4), padding_idx=-1)
    assert last.vocab_range == (5, 0)
    assert repr(last) == "TPEmbedding(5, 2, padding_idx=4, rank=3, size=4)"


@pytest.mark.parametrize("size", [1, 2])
def test_strided_ids(device: torch.device, size: int) -> None:
    table = torch.randn(9, 4, device=device)
    ids = torch.arange(9, device=device).reshape(3, 3).t()[:, :2]
    for rows in on_ranks(size, lambda comm: embedding_of(table, comm)(ids)):
        assert torch.equal(rows, table[ids])


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


@pytest.mark.parametrize("size", [1, 2])
def test_under_inference_mode(device: torch.device, size: int) -> None:
    table = torch.randn(9, 4, device=device)

    def body(comm: ThreadComm) -> Tensor:
        module = embedding_of(table, comm)
        with torch.inference_mode():
            return module(torch.arange(9, device=device))  # type: ignore[no-any-return]

    for rows in on_ranks(size, body):
        assert torch.equal(rows, table) and not rows.requires_grad


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
    ({"vocab_size": True}, TypeError, "vocab_size: bool, expected an int"),
    ({"hidden_size": 0}, ValueError, "hidden_size: 0, expected at least 1"),
    ({"hidden_size": None}, TypeError, "hidden_size: None, expected an int"),
    ({"num_added": -1}, ValueError, "num_added: -1, expected at least 0"),
    ({"padding_idx": 11}, ValueError, "padding_idx: 11, expected -11 to 10"),
    ({"padding_idx": -12}, ValueError, "padding_idx: -12, expected -11 to 10"),
    ({"padding_idx": 1.0}, TypeError, "padding_idx: float, expected an int"),
    ({"dtype": torch.int32}, TypeError, "dtype: int32, expected a floating dtype"),
    ({"comm": None}, TypeError,
     "comm: None without rank, size, all_reduce, expected a Communicator"),
    ({"comm": torch.zeros(1)}, TypeError,
     "comm: Tensor without rank, all_reduce, expected a Communicator"),
    ({"comm": SilentComm(2, 2)}, ValueError,
     "comm: rank 2 of 2, expected a rank of 0 to size - 1"),
    ({"method": "nccl"}, ValueError,
     "method: 'nccl', expected 'auto', 'peer' or 'all_reduce'"),
    ({"method": None}, TypeError, "method: None, expected a str"),
    ({"method": "peer"}, ValueError,
     "group: None, expected the ranks' gloo group or store for method='peer'"),
    ({"method": "peer", "group": object(), "device": "meta"}, ValueError,
     "device: meta, expected a GPU or the CPU for method='peer'"),
    ({"timeout_s": 0}, ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
    ({"timeout_s": "1"}, TypeError, "timeout_s: str, expected seconds"),
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
def test_wrong_ids(device: torch.device, size: int) -> None:
    comm = SilentComm(0, size)
    module = TPEmbedding(10, 4, comm=comm, device=device, padding_idx=1)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.zeros(3, device=device), TypeError, "dtype float32, expected int32 or int64"),
        ([1, 2], TypeError, "list, expected a tensor"),
        (torch.zeros(3, dtype=torch.int16, device=device), TypeError, "dtype int16, expected"),
    ]
    if device.type == "cuda":
        wrong.append((torch.zeros(3, dtype=torch.int64), ValueError, "device cpu, expected cuda:0"))
    for ids, kind, text in wrong:
        with pytest.raises(kind, match=re.escape(f"indexing: indices: {text}")):
            module(ids)
    assert comm.sent == []
