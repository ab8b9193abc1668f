"""store_cache against its reference on calls that hypothesis thinks up."""

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
    rows_by_slot,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st
from ref import ref_store

from jitkern import store_cache


@given(data=st.data())
def test_any_call(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, slots, count = draw(row_types()), draw(counts), draw(counts)
    index_dtype = draw(index_dtypes)
    values = draw(row_numbers(count, slots, index_dtype))
    seed = draw(seeds)
    if draw(st.booleans()):
        kv = make_buffer((slots, 2, *row.shape), row.dtype, device, seed=seed)
        k_cache, v_cache = kv.part(kv.view[:, 0]), kv.part(kv.view[:, 1])
        twin = kv.twin()
        k_twin, v_twin = twin.view[:, 0], twin.view[:, 1]
        written = [(kv, twin)]
    else:
        k_cache, v_cache = (
            make_buffer(
                (slots, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets), seed=s
            )
            for s in (seed, seed + 1)
        )
        twins = k_cache.twin(), v_cache.twin()
        k_twin, v_twin = (t.view for t in twins)
        written = [(k_cache, twins[0]), (v_cache, twins[1])]
    k, v = (
        make_buffer(
            (count, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets), seed=s
        )
        for s in (seed + 2, seed + 3)
    )
    rows_by_slot(k, values)
    rows_by_slot(v, values)
    indices = torch.tensor(values, dtype=index_dtype, device=device)
    kept = torch.where(indices < slots, indices, -1)
    bad = bad_position(values, slots)
    error = check_call(
        lambda: store_cache(k_cache.view, v_cache.view, indices, k.view, v.view),
        lambda: ref_store(k_twin, v_twin, kept, k.view, v.view),
        bad if bad is None else rf"store_cache: indices: index {values[bad]} at position {bad},",
        device,
        written,
    )
    assert (error is None) == (bad is None)
