"""Which rank of a TPEmbedding has which rows, and where no memory is made for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from embedding_ranks import SilentComm
from hypothesis import given
from hypothesis import strategies as st

from jitkern.comm import PeerMemory
from jitkern.nn import TPEmbedding
from jitkern.nn import tp_embedding as layout

PAGE_BYTES = 2 << 20
SIZES = st.integers(1, 9)


@given(st.integers(1, 300), st.integers(0, 40), SIZES, st.integers(0, 60))
def test_each_row_has_one_rank(vocab: int, added: int, size: int, more: int) -> None:
    needed = -(-(vocab + added) // size)
    for each in (None, needed, needed + more):
        parts = [layout.part_of(vocab, added, rank, size, each) for rank in range(size)]
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


@given(st.integers(1, 300_000), SIZES, st.integers(1, 40_000))
def test_whole_pages(rows: int, size: int, row_bytes: int) -> None:
    each = layout.rows_in_pages(rows, size, row_bytes, PAGE_BYTES)
    assert each * size >= rows and each * row_bytes % PAGE_BYTES == 0
    smaller = range(max(each - PAGE_BYTES // (row_bytes & -row_bytes), 0) + 1, each)
    assert all(one * row_bytes % PAGE_BYTES for one in smaller[:100])


def test_the_pages_of_peer_memory() -> None:
    assert PeerMemory.page_bytes(torch.device("cpu")) == PAGE_BYTES
    with pytest.raises(ValueError, match="device: meta, expected a GPU or the CPU"):
        PeerMemory.page_bytes(torch.device("meta"))


@pytest.mark.parametrize("method", ["auto", "peer", "all_reduce"])
@pytest.mark.parametrize("group", [None, object()])
def test_one_rank_has_no_memory(method: str, group: object) -> None:
    """Whatever is asked for: nobody looks at the group."""
    module = TPEmbedding(10, 4, comm=SilentComm(0, 1), method=method, group=group)  # type: ignore[arg-type]
    assert module.method == "all_reduce"
    module.fence()


def test_no_memory_on_the_meta_device() -> None:
    module = TPEmbedding(10, 4, comm=SilentComm(), device="meta", group=object())
    assert module.method == "all_reduce" and module.weight.is_meta


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
