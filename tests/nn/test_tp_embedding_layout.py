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
from jitkern.nn import TPEmbedding, layout

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
    needed_bytes = -(-rows // size) * row_bytes
    wasteful = layout.is_wasteful(rows, size, row_bytes, PAGE_BYTES)
    assert wasteful == (each * row_bytes > max(2 * needed_bytes, 16 << 20))


@pytest.mark.parametrize("hidden", [64, 768, 1024, 2048, 2880, 4096, 5120, 7168, 8192, 18432])
def test_models_waste_little(hidden: int) -> None:
    for size in (2, 4, 8):
        assert not layout.is_wasteful(128_256, size, 2 * hidden, PAGE_BYTES)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 9), (1000, 131), (5000, 4097), (3, 1_000_003)])
def test_the_next_hidden_size_fits(rows: int, hidden: int) -> None:
    assert layout.is_wasteful(rows, 2, 2 * hidden, PAGE_BYTES)
    more = layout.next_hidden_size(rows, 2, hidden, 2, PAGE_BYTES)
    assert hidden < more <= 1 << hidden.bit_length()
    assert not layout.is_wasteful(rows, 2, 2 * more, PAGE_BYTES)


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
