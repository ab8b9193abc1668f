"""indexing against its reference on calls that hypothesis thinks up."""

from __future__ import annotations

import torch
from buffers import make_buffer
from contract import (
    bad_position,
    check_call,
    counts,
    gaps,
    index_dtypes,
    offsets,
    row_numbers,
    row_types,
    seeds,
    store_bits,
)
from hypothesis import given
from hypothesis import strategies as st
from ref import ref_indexing
from torch import Tensor

from jitkern import indexing


@given(data=st.data())
def test_any_call(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, vocab = draw(row_types()), draw(counts)
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    count = torch.Size(shape).numel()
    index_dtype = draw(index_dtypes)
    seed = draw(seeds)
    vocab_range = None
    if draw(st.booleans()):
        vocab_range = (draw(st.integers(0, 60)), draw(st.integers(0, vocab)))
        value = st.integers(-5, 110)
        values = draw(st.lists(value, min_size=count, max_size=count))
        bad = None
    else:
        values = draw(row_numbers(count, vocab, index_dtype))
        bad = bad_position(values, vocab)
    weights = make_buffer(
        (vocab, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets), seed=seed
    )
    flat = make_buffer(
        (count, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets), seed=seed + 1
    )
    indices = torch.tensor(values, dtype=index_dtype, device=device).reshape(shape)
    kept = indices if vocab_range else torch.where(indices < vocab, indices, -1)
    twin = flat.twin()
    output = flat.view.unflatten(0, shape) if shape else flat.view[0]
    results: list[Tensor] = []

    def call() -> None:
        results.append(indexing(weights.view, indices, output=output, vocab_range=vocab_range))

    def reference() -> None:
        expected = ref_indexing(weights.view, kept, vocab_range).reshape(twin.view.shape)
        store_bits(twin.view, expected)

    fault = None if bad is None else rf"indexing: indices: index {values[bad]} at position {bad},"
    check_call(call, reference, fault, device, [(flat, twin)])
    assert all(result is output for result in results)
