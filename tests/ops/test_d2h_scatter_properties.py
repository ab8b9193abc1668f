"""d2h_scatter against its reference on calls that hypothesis thinks up."""

from __future__ import annotations

import torch
from buffers import make_buffer
from hypothesis import given
from hypothesis import strategies as st
from properties import (
    bad_position,
    check_call,
    counts,
    gaps,
    index_dtypes,
    offsets,
    row_numbers,
    row_types,
    seeds,
    ways,
)
from ref import ref_h2d_gather

from jitkern import d2h_scatter


@given(data=st.data())
def test_any_call(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, num_src, num_dst = draw(row_types()), draw(counts), draw(counts)
    index_dtype, seed = draw(index_dtypes), draw(seeds)
    way = draw(ways(device, ["auto", "sm", "cpu"]))
    count = draw(st.integers(0, num_dst))
    sources = draw(row_numbers(count, num_src, index_dtype))
    targets = draw(st.permutations(range(num_dst)))[:count]
    src = make_buffer(
        (num_src, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets), seed=seed
    )
    dst = make_buffer(
        (num_dst, *row.shape), row.dtype, gap=draw(gaps), offset=draw(offsets), seed=seed + 1,
        pinned=way.pinned,
    )  # fmt: skip
    listed = [*zip(sources, targets, strict=True)]
    pairs = torch.tensor(listed, dtype=index_dtype, device=way.pairs_on)
    pairs = pairs.reshape(count, 2)
    twin, bad = dst.twin(), bad_position(sources, num_src)
    kept = pairs.clone()
    kept[kept[:, 0] >= num_src] = -1
    where = "" if bad is None else f"index {sources[bad]} at position {bad},"
    error = check_call(
        lambda: d2h_scatter(
            src.view, dst.view, pairs, num_sms=draw(st.sampled_from([None, 1, 5])), **way.options
        ),
        lambda: ref_h2d_gather(src.view, twin.view, kept),
        None if bad is None else rf"d2h_scatter: pairs\[\.\.\., 0\]: {where}",
        device,
        [(dst, twin)],
        indices_on=way.pairs_on,
    )
    assert (error is None) == (bad is None)
