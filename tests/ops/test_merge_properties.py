"""merge_states and merge_state against their reference on calls that hypothesis thinks up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from merge_reference import (
    EXPANDED,
    LAYOUTS,
    OUT_TYPES,
    TYPES,
    Call,
    assert_merged,
    assert_same,
    partials,
    placed,
    room,
    scale_for,
)

from jitkern import merge_state, merge_states

# Few, as of each a GPU compiles kernels for the widths of vectors that the layouts leave.
DIMS = [1, 7, 40, 64, 576]
NUMBERS = [1, 2, 3, 7, 12, 33]
sizes = st.sampled_from([0, 1, 2, 3, 5, 17])
layouts = st.sampled_from(LAYOUTS)
types = st.sampled_from(TYPES)
seeds = st.integers(0, 2**31)


@given(data=st.data())
@pytest.mark.parametrize("lse_layout", ["tokens_heads", "heads_tokens"])
def test_any_call(device: torch.device, lse_layout: str, data: st.DataObject) -> None:
    draw = data.draw
    n, dim = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(DIMS))
    tokens, heads = draw(sizes), draw(sizes)
    outs, lses = partials(
        device, n, tokens, heads, dim, draw(types), draw(types), lse_layout=lse_layout,
        seed=draw(seeds),
    )  # fmt: skip
    places = st.lists(st.sampled_from([*LAYOUTS, *EXPANDED]), min_size=n, max_size=n)
    out_dtype, lse_dtype = draw(st.sampled_from(OUT_TYPES)), draw(types)
    call = Call(
        [placed(out, layout) for out, layout in zip(outs, draw(places), strict=True)],
        [placed(lse, layout) for lse, layout in zip(lses, draw(places), strict=True)],
        room(outs.shape[1:], out_dtype, device, draw(layouts)),
        room(lses.shape[1:], lse_dtype, device, draw(layouts)),
    )
    how = {"base": draw(st.sampled_from(["e", "2"])), "lse_layout": lse_layout}
    numbers = st.integers(-2, n + 2)
    counts = draw(
        st.one_of(st.none(), numbers, st.lists(numbers, min_size=tokens, max_size=tokens))
    )
    if counts is not None:
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        how["count"] = torch.tensor(counts, dtype=dtype, device=device)
    call.run_and_compare(scale=scale_for(out_dtype, device), **how)


numbers = st.one_of(
    st.floats(-120, 120, width=32),
    st.sampled_from([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e-40]),
)


@given(data=st.data())
def test_any_lse(device: torch.device, data: st.DataObject) -> None:
    """Of each token another, beside values that are what an empty partial may hold."""
    n = data.draw(st.sampled_from(NUMBERS))
    tokens = 8
    logs = data.draw(st.lists(numbers, min_size=n * tokens, max_size=n * tokens))
    lses = torch.tensor(logs, dtype=torch.float32).view(n, tokens, 1).to(device)
    outs, _ = partials(device, n, tokens, 1, 40, seed=data.draw(seeds))
    outs = torch.where(lses[..., None].isinf(), float("nan"), outs.nan_to_num(0.5))
    result = merge_states(outs, lses)
    assert_merged(result, outs, lses)
    assert_same(merge_states(list(outs), list(lses)), result)
    first = data.draw(st.integers(0, tokens))
    if n == 2:
        two = merge_state(outs[0], lses[0], outs[1], lses[1], prefill_tokens_with_context=first)
        assert_same((two[0][:first], two[1][:first]), (result[0][:first], result[1][:first]))
        assert_same((two[0][first:], two[1][first:]), (outs[1, first:], lses[1, first:]))
