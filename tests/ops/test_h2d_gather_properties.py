"""h2d_gather against its reference on calls that hypothesis thinks up."""

from __future__ import annotations

import torch
from buffers import make_buffer, raised_by
from hypothesis import given
from hypothesis import strategies as st
from properties import (
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
from ref import ref_h2d_gather

from jitkern import h2d_gather


@given(data=st.data())
def test_any_call(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, num_src, num_dst = draw(row_types()), draw(counts), draw(counts)
    index_dtype = draw(index_dtypes)
    count = draw(st.integers(0, num_dst))
    sources = draw(row_numbers(count, num_src, index_dtype))
    targets = draw(st.permutations(range(num_dst)))[:count]
    if count > 0 and draw(st.integers(0, 7)) == 0:
        targets[draw(st.integers(0, count - 1))] = draw(st.sampled_from([-1, num_dst, 2**31 - 1]))
    seed, way = draw(seeds), draw(ways(device, ["auto", "sm", "cpu", "both"]))
    src = make_buffer(
        (num_src, *row.shape), row.dtype, gap=draw(gaps), offset=draw(offsets), seed=seed,
        pinned=way.pinned,
    )  # fmt: skip
    dst = make_buffer(
        (num_dst, *row.shape),
        row.dtype,
        device,
        gap=draw(gaps),
        offset=draw(offsets),
        seed=seed + 1,
    )
    listed = [*zip(sources, targets, strict=True)]
    pairs = torch.tensor(listed, dtype=index_dtype, device=way.pairs_on)
    pairs = pairs.reshape(count, 2)
    twin = dst.twin()
    written = [(dst, twin)]
    slot_map, map_twin = None, None
    if draw(st.booleans()) and len(set(sources)) == count:
        map_dtype = draw(index_dtypes)
        buffer = make_buffer((num_src,), map_dtype, device, seed=seed + 2)
        slot_map, map_twin = buffer.view, buffer.twin()
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
    fault = rf"h2d_gather: pairs\[\.\.\., ({'|'.join(choices)})" if bad else None
    kept = pairs.clone()
    kept[bad] = -1
    check_call(
        lambda: h2d_gather(
            src.view,
            dst.view,
            pairs,
            slot_map=slot_map,
            num_sms=draw(st.sampled_from([None, 1, 5])),
            **way.options,
        ),
        lambda: ref_h2d_gather(src.view, twin.view, kept, map_twin and map_twin.view),
        fault,
        device,
        written,
        indices_on=way.pairs_on,
    )


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
