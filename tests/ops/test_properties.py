"""Every op against its PyTorch reference on calls that hypothesis thinks up.

`--hypothesis-profile thorough` runs 2,000 random examples of each instead of 200 fixed ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from buffers import Buffer, make_buffer, raised_by
from hypothesis import given
from hypothesis import strategies as st
from ref import ref_h2d_gather, ref_indexing, ref_store
from torch import Tensor

from jitkern import d2h_scatter, h2d_gather, indexing, store_cache

# Few enough that a GPU compiles all of them in seconds, each with up to five vector widths.
ROW_BYTES = [1, 6, 16, 40, 656, 657, 1024]
DTYPES = {
    1: [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
    2: [torch.bfloat16, torch.float16, torch.int16],
    4: [torch.float32, torch.int32],
    8: [torch.int64, torch.complex64],
}


@dataclass(frozen=True)
class Row:
    dtype: torch.dtype
    shape: tuple[int, ...]


@st.composite
def row_types(draw: st.DrawFn) -> Row:
    row_bytes = draw(st.sampled_from(ROW_BYTES))
    dtype = draw(st.sampled_from([t for n in DTYPES if row_bytes % n == 0 for t in DTYPES[n]]))
    items = row_bytes // dtype.itemsize
    inner = draw(st.sampled_from([n for n in (1, 2, 4, items) if items % n == 0]))
    return Row(dtype, draw(st.sampled_from([(items,), (items // inner, inner)])))


gaps = st.sampled_from([0, 0, 1, 2, 16])
offsets = st.sampled_from([0, 0, 1, 2, 4])
seeds = st.integers(0, 2**31)
counts = st.integers(0, 40)
index_dtypes = st.sampled_from([torch.int32, torch.int64])


@st.composite
def row_numbers(draw: st.DrawFn, count: int, bound: int, dtype: torch.dtype) -> list[int]:
    """Draw indices: mostly good ones, in some calls padding, in a few one that is too large."""
    good = st.integers(0, bound - 1) if bound > 0 else st.just(-1)
    some_padding = draw(st.booleans())
    value = st.one_of(good, good, st.integers(-3, -1)) if some_padding else good
    values = draw(st.lists(value, min_size=count, max_size=count))
    if count > 0 and draw(st.integers(0, 7)) == 0:
        highest = torch.iinfo(dtype).max
        extremes = st.sampled_from([bound, bound + 1, highest, highest - 1, torch.iinfo(dtype).min])
        values[draw(st.integers(0, count - 1))] = draw(extremes)
    return values


def bad_position(values: list[int], bound: int) -> int | None:
    return next((i for i, value in enumerate(values) if value >= bound), None)


def run(
    call: Callable[[], object],
    reference: Callable[[], object],
    fault: str | None,
    device: torch.device,
    written: list[tuple[Buffer, Buffer]],
) -> None:
    """Call, then compare every byte: on the CPU a fault means that nothing was written."""
    error = raised_by(call, device)
    if fault is None:
        assert error is None
    else:
        assert isinstance(error, IndexError)
        assert re.match(fault, str(error)), str(error)
    if fault is None or device.type == "cuda":
        reference()
    for buffer, twin in written:
        assert buffer.same(twin)


def rows_by_slot(rows: Buffer, values: list[int]) -> None:
    """Make rows that go to one slot equal, as any of them may win."""
    first: dict[int, int] = {}
    for i, value in enumerate(values):
        j = first.setdefault(value, i)
        if j != i:
            store_bits(rows.view[i], rows.view[j])


@given(data=st.data())
def test_store_cache(device: torch.device, data: st.DataObject) -> None:
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
    run(
        lambda: store_cache(k_cache.view, v_cache.view, indices, k.view, v.view),
        lambda: ref_store(k_twin, v_twin, kept, k.view, v.view),
        bad if bad is None else rf"store_cache: indices: index {values[bad]} at position {bad},",
        device,
        written,
    )


@given(data=st.data())
def test_indexing(device: torch.device, data: st.DataObject) -> None:
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
    run(call, reference, fault, device, [(flat, twin)])
    assert all(result is output for result in results)


def store_bits(target: Tensor, values: Tensor) -> None:
    """Copy without a conversion: a bool of 7 stays 7."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = integers[target.dtype.itemsize]
    if target.numel() > 0:
        target.view(width).copy_(values.view(width))


@given(data=st.data())
def test_h2d_gather(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, num_src, num_dst = draw(row_types()), draw(counts), draw(counts)
    index_dtype = draw(index_dtypes)
    count = draw(st.integers(0, num_dst))
    sources = draw(row_numbers(count, num_src, index_dtype))
    targets = draw(st.permutations(range(num_dst)))[:count]
    if count > 0 and draw(st.integers(0, 7)) == 0:
        targets[draw(st.integers(0, count - 1))] = draw(st.sampled_from([-1, num_dst, 2**31 - 1]))
    seed = draw(seeds)
    src = make_buffer(
        (num_src, *row.shape), row.dtype, gap=draw(gaps), offset=draw(offsets), seed=seed,
        pinned=device.type == "cuda",
    )  # fmt: skip
    dst = make_buffer(
        (num_dst, *row.shape),
        row.dtype,
        device,
        gap=draw(gaps),
        offset=draw(offsets),
        seed=seed + 1,
    )
    pairs = torch.tensor([*zip(sources, targets, strict=True)], dtype=index_dtype, device=device)
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
        for i in bad[: 1 if device.type == "cpu" else None]
        for c in (0, 1)
        if (bad_src, bad_dst)[c][i]
    ]
    fault = rf"h2d_gather: pairs\[\.\.\., ({'|'.join(choices)})" if bad else None
    kept = pairs.clone()
    kept[bad] = -1
    run(
        lambda: h2d_gather(
            src.view,
            dst.view,
            pairs,
            slot_map=slot_map,
            num_sms=draw(st.sampled_from([None, 1, 5])),
        ),
        lambda: ref_h2d_gather(src.view, twin.view, kept, map_twin and map_twin.view),
        fault,
        device,
        written,
    )


@given(data=st.data())
def test_h2d_gather_of_resident_rows(device: torch.device, data: st.DataObject) -> None:
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


@given(data=st.data())
def test_d2h_scatter(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, num_src, num_dst = draw(row_types()), draw(counts), draw(counts)
    index_dtype, seed = draw(index_dtypes), draw(seeds)
    count = draw(st.integers(0, num_dst))
    sources = draw(row_numbers(count, num_src, index_dtype))
    targets = draw(st.permutations(range(num_dst)))[:count]
    src = make_buffer(
        (num_src, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets), seed=seed
    )
    dst = make_buffer(
        (num_dst, *row.shape), row.dtype, gap=draw(gaps), offset=draw(offsets), seed=seed + 1,
        pinned=device.type == "cuda",
    )  # fmt: skip
    pairs = torch.tensor([*zip(sources, targets, strict=True)], dtype=index_dtype, device=device)
    pairs = pairs.reshape(count, 2)
    twin, bad = dst.twin(), bad_position(sources, num_src)
    kept = pairs.clone()
    kept[kept[:, 0] >= num_src] = -1
    where = "" if bad is None else f"index {sources[bad]} at position {bad},"
    run(
        lambda: d2h_scatter(src.view, dst.view, pairs, num_sms=draw(st.sampled_from([None, 1, 5]))),
        lambda: ref_h2d_gather(src.view, twin.view, kept),
        None if bad is None else rf"d2h_scatter: pairs\[\.\.\., 0\]: {where}",
        device,
        [(dst, twin)],
    )


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_what_goes_in_comes_out(device: torch.device, row_bytes: int) -> None:
    """Store, then gather from the same slots: the rows again, whatever they hold."""
    rows = make_buffer((40, row_bytes), device=device).view
    cache = torch.zeros(2, 64, row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(64, device=device)[:40]
    store_cache(cache[0], cache[1], slots, rows, rows)
    assert torch.equal(indexing(cache[0], slots), rows)
    assert torch.equal(indexing(cache[1], slots.int()), rows)
