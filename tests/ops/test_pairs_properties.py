"""h2d_gather and d2h_scatter against their reference on calls that hypothesis thinks up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from buffers import make_buffer, raised_by
from contract import (
    check_call,
    counts,
    gaps,
    index_dtypes,
    offsets,
    row_numbers,
    row_types,
    seeds,
    store_bits,
    ways,
)
from hypothesis import given
from hypothesis import strategies as st
from ref import ref_h2d_gather

from jitkern import d2h_scatter, h2d_gather


@given(data=st.data())
@pytest.mark.parametrize(
    ("op", "methods"),
    [(h2d_gather, ["auto", "sm", "cpu", "both"]), (d2h_scatter, ["auto", "sm", "cpu"])],
    ids=["gather", "scatter"],
)
def test_any_call(device: torch.device, op: Any, methods: list[str], data: st.DataObject) -> None:
    draw = data.draw
    row, num_src, num_dst = draw(row_types()), draw(counts), draw(counts)
    index_dtype = draw(index_dtypes)
    count = draw(st.integers(0, num_dst))
    sources = draw(row_numbers(count, num_src, index_dtype))
    targets = draw(st.permutations(range(num_dst)))[:count]
    if count > 0 and draw(st.integers(0, 7)) == 0:
        targets[draw(st.integers(0, count - 1))] = draw(st.sampled_from([-1, num_dst, 2**31 - 1]))
    seed, way = draw(seeds), draw(ways(device, methods))
    of_host, of_gpu = {"pinned": way.pinned}, {"device": device}
    of_src, of_dst = (of_host, of_gpu) if op is h2d_gather else (of_gpu, of_host)
    src, dst = (
        make_buffer(
            (number, *row.shape), row.dtype, gap=draw(gaps), offset=draw(offsets), seed=seed + i,
            **where,
        )
        for i, (number, where) in enumerate([(num_src, of_src), (num_dst, of_dst)])
    )  # fmt: skip
    listed = [*zip(sources, targets, strict=True)]
    pairs = torch.tensor(listed, dtype=index_dtype, device=way.pairs_on)
    pairs = pairs.reshape(count, 2)
    twin = dst.twin()
    written = [(dst, twin)]
    map_twin, how = None, dict(way.options)
    if op is h2d_gather and draw(st.booleans()) and len(set(sources)) == count:
        map_dtype = draw(index_dtypes)
        buffer = make_buffer((num_src,), map_dtype, device, seed=seed + 2)
        how["slot_map"], map_twin = buffer.view, buffer.twin()
        written.append((buffer, map_twin))

    padding = (pairs < 0).any(dim=1)
    bad_src, bad_dst = pairs[:, 0] >= num_src, pairs[:, 1] >= num_dst
    bad = (~padding & (bad_src | bad_dst)).nonzero().flatten().tolist()
    choices = [
        rf"{c}\]: index {int(pairs[i, c])} at position {i},"
        for i in bad[: 1 if way.pairs_on.type == "cpu" else None]
        for c in (0, 1)
        if (bad_src, bad_dst)[c][i]
    ]
    fault = rf"{op.__name__}: pairs\[\.\.\., ({'|'.join(choices)})" if bad else None
    kept = pairs.clone()
    kept[bad] = -1
    error = check_call(
        lambda: op(src.view, dst.view, pairs, num_sms=draw(st.sampled_from([None, 1, 5])), **how),
        lambda: ref_h2d_gather(src.view, twin.view, kept, map_twin and map_twin.view),
        fault,
        device,
        written,
        indices_on=way.pairs_on,
    )
    assert (error is None) == (not bad)


@given(data=st.data())
def test_any_call_with_resident_rows(device: torch.device, data: st.DataObject) -> None:
    """Some source rows are in `dst` already, behind the rows that the call writes."""
    draw = data.draw
    row, num_src, num_dst = draw(row_types()), draw(st.integers(1, 40)), draw(counts)
    index_dtype, map_dtype, seed = draw(index_dtypes), draw(index_dtypes), draw(seeds)
    count = draw(st.integers(0, num_dst))
    sources = draw(st.lists(st.integers(-1, num_src - 1), min_size=count, max_size=count))
    targets = draw(st.permutations(range(num_dst)))[:count]
    is_resident = draw(st.lists(st.booleans(), min_size=num_src, max_size=num_src))
    src = make_buffer((num_src, *row.shape), row.dtype, seed=seed, pinned=device.type == "cuda")
    dst = make_buffer((num_dst + num_src, *row.shape), row.dtype, device, seed=seed + 1)
    slots = [num_dst + i if here else -1 for i, here in enumerate(is_resident)]
    slot_map = torch.tensor(slots, dtype=map_dtype, device=device)
    pairs = torch.tensor([*zip(sources, targets, strict=True)], dtype=index_dtype, device=device)
    twin, expected_map = dst.twin(), list(slots)
    for source, target in zip(sources, targets, strict=True):
        if source >= 0:
            here = is_resident[source]
            store_bits(twin.view[target], dst.view[slots[source]] if here else src.view[source])
            expected_map[source] = target
    error = raised_by(
        lambda: h2d_gather(
            src.view, dst.view, pairs.reshape(-1, 2), slot_map=slot_map, reuse_resident=True
        ),
        device,
    )
    assert error is None
    assert dst.same(twin)
    for source, slot in enumerate(slot_map.tolist()):
        if source in sources:  # one of its targets
            assert slot in [t for s, t in zip(sources, targets, strict=True) if s == source]
        else:
            assert slot == expected_map[source]
