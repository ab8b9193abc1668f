"""swap_rows against its reference on calls that hypothesis thinks up."""

from __future__ import annotations

import torch
from buffers import make_buffer
from contract import check_call, counts, gaps, index_dtypes, offsets, row_types, seeds
from hypothesis import given
from hypothesis import strategies as st
from test_swap import ORDERS, ref_swap

from jitkern import swap_rows


@given(data=st.data())
def test_any_call(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    row, num_host, num_slots = draw(row_types()), draw(counts), draw(counts)
    index_dtype, seed = draw(index_dtypes), draw(seeds)
    slots = draw(st.permutations(range(num_slots)))[: draw(st.integers(0, num_slots))]
    rows = draw(st.permutations(range(num_host)))
    written, free = rows[: num_host // 2], [-1, *rows[num_host // 2 :]]
    triples = []
    for i, slot in enumerate(slots):
        back = written[i] if i < len(written) else -1
        fetch = draw(st.sampled_from([*free, back]))
        padding = draw(st.integers(0, 5)) == 0
        triples.append([fetch, -1 if padding else slot, draw(st.sampled_from([back, back, -1]))])
    bad: int | None = None
    column = draw(st.integers(0, 2))
    if triples and draw(st.integers(0, 7)) == 0:
        bad = draw(st.integers(0, len(triples) - 1))
        bound = (num_host, num_slots, num_host)[column]
        triples[bad][1] = max(triples[bad][1], slots[bad])
        triples[bad][column] = draw(st.sampled_from([bound, torch.iinfo(index_dtype).max]))
    host = make_buffer(
        (num_host, *row.shape), row.dtype, gap=draw(gaps), offset=draw(offsets), seed=seed,
        pinned=device.type == "cuda",
    )  # fmt: skip
    gpu = make_buffer(
        (num_slots, *row.shape), row.dtype, device, gap=draw(gaps), offset=draw(offsets),
        seed=seed + 1,
    )  # fmt: skip
    given_triples = torch.tensor(triples, dtype=index_dtype, device=device).reshape(-1, 3)
    host_twin, gpu_twin, before = host.twin(), gpu.twin(), gpu.twin()
    kept = given_triples.clone()
    fault = None
    if bad is not None:
        kept[bad] = -1
        value = triples[bad][column]
        fault = rf"swap_rows: triples\[\.\.\., {column}\]: index {value} at position {bad},"
    num_sms, order = draw(st.sampled_from([None, 1, 5])), draw(st.sampled_from(ORDERS))
    error = check_call(
        lambda: swap_rows(host.view, gpu.view, given_triples, num_sms=num_sms, order=order),
        lambda: ref_swap(host_twin.view, gpu_twin.view, before.view, kept),
        fault,
        device,
        [(host, host_twin), (gpu, gpu_twin)],
    )
    assert (error is None) == (bad is None)
