"""Where tensors of merge_states lie: every stride and base, stacked, in place.

What overlaps is in the table of errors, and to the byte in test_copy_blocks.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from merge_reference import BF16, F32, LAYOUTS, TYPES, assert_merged, assert_same, call_of, partials
from torch import Tensor

from jitkern import merge_states

LSE_LAYOUTS = ["tokens_heads", "heads_tokens"]


@pytest.mark.parametrize("out_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layouts(device: torch.device, dtype: torch.dtype, layout: str, out_layout: str) -> None:
    """Of all partials, which makes vectors narrow, and of one alone."""
    outs, lses = partials(device, 3, 9, 4, 64, dtype, seed=3)
    for layouts in ([layout], ["contiguous", layout, "contiguous"]):
        lse_layouts = layouts[::-1]
        call = call_of(outs, lses, layouts=layouts, lse_layouts=lse_layouts, out_layout=out_layout)
        call.run_and_compare()


def stacks(outs: Tensor, lses: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The same values stacked in other ways: the partials' dimension is anywhere in memory."""

    def in_order(tensor: Tensor, *order: int) -> Tensor:
        back = [order.index(d) for d in range(tensor.ndim)]
        return tensor.permute(order).contiguous().permute(back)

    wide = torch.zeros(2 * len(outs), *outs.shape[1:-1], outs.shape[-1] + 24, dtype=outs.dtype)
    wide = wide.to(outs.device)
    wide[::2, ..., 8:-16] = outs
    return [
        (outs, lses),
        (in_order(outs, 1, 0, 2, 3), in_order(lses, 1, 2, 0)),  # [tokens, n, heads, dim]
        (in_order(outs, 1, 2, 0, 3), in_order(lses, 1, 0, 2)),  # [tokens, heads, n, dim]
        (in_order(outs, 2, 1, 0, 3), in_order(lses, 2, 1, 0)),
        (in_order(outs, 2, 0, 1, 3), in_order(lses, 0, 2, 1)),
        (wide[::2, ..., 8:-16], lses.repeat_interleave(3, 0)[::3]),
    ]


@pytest.mark.parametrize("n", [1, 2, 5, 17])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_stacked_tensors(device: torch.device, dtype: torch.dtype, n: int) -> None:
    outs, lses = partials(device, n, 6, 3, 40, dtype)
    wanted = merge_states(list(outs), list(lses))
    ways = stacks(outs, lses)
    for (stack, _), (_, logs) in itertools.product(ways, ways):
        assert_same(merge_states(stack, logs), wanted)
    turned = merge_states(ways[1][0], ways[2][1].mT, lse_layout="heads_tokens")
    assert_same((turned[0], turned[1].t()), wanted)
    repeated = merge_states(outs[:1].expand(n, -1, -1, -1), lses[:1].expand(n, -1, -1))
    assert_merged(repeated, outs[:1].expand(n, -1, -1, -1), lses[:1].expand(n, -1, -1))


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "odd", "heads_first"])
@pytest.mark.parametrize("dim", [8, 576, 5000])
@pytest.mark.parametrize("n", [2, 12])
def test_in_place(device: torch.device, n: int, dim: int, layout: str) -> None:
    """`out` as one of `outs`, `lse` as one of `lses`, and both: the bits of a call that is not."""
    for dtype, lse_layout in zip((F32, BF16), LSE_LAYOUTS, strict=True):
        outs, lses = partials(device, n, 3, 2, dim, dtype, lse_layout=lse_layout)
        how = {"lse_layout": lse_layout, "base": "2"}
        wanted = merge_states(outs, lses, **how)
        for of_out, of_lse in ((0, None), (None, n - 1), (n - 1, 0), (1, 1)):
            call = call_of(outs, lses, layouts=[layout], lse_layouts=[layout])
            if of_out is not None:
                call.out = call.outs[of_out]
            if of_lse is not None:
                call.lse = call.lses[of_lse]
            every = [*call.outs, *call.lses, call.out, call.lse]
            twins = [buffer.twin() for buffer in every]
            result = merge_states(
                [one.view for one in call.outs], [one.view for one in call.lses],
                output=call.out.view, lse=call.lse.view, **how,
            )  # fmt: skip
            assert_same(result, wanted)
            for buffer, twin in zip(every, twins, strict=True):
                for written in (call.out, call.lse):
                    if buffer.whole is written.whole:
                        twin.view.copy_(buffer.view)
                assert buffer.same(twin)


def test_one_tensor_several_times(device: torch.device) -> None:
    """Among the partials, and then in place of all of them."""
    outs, lses = partials(device, 1, 9, 2, 40)
    out, lse = outs[0].clone(), lses[0].clone()
    merge_states([out] * 4, [lse] * 4, output=out, lse=lse, base="2")
    assert_merged((out, lse), outs.expand(4, -1, -1, -1), lses.expand(4, -1, -1), base="2")
