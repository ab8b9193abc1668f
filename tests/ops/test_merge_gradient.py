"""merge_state and merge_states in PyTorch: their gradient, and their operators."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from merge_reference import assert_same, partials
from torch import Tensor

import jitkern.torch_ops  # noqa: F401 - nothing has called an op yet
from jitkern import merge_state, merge_states

N, TOKENS, HEADS, DIM = 3, 5, 2, 8


def given(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of token 4 none counts, of token 3 not the first; what does not count holds NaN."""
    outs = torch.randn(N, TOKENS, HEADS, DIM, device=device)
    lses = torch.randn(N, TOKENS, HEADS, device=device)
    for where in ((slice(None), 4), (0, 3)):
        outs[where], lses[where] = torch.nan, -torch.inf
        lses[where][..., 1] = torch.inf  # as well no keys
    return outs.requires_grad_(), lses.requires_grad_()


def gradients(out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """With weights that tell all elements apart; an lse of -inf has no part in it."""
    loss = (out * torch.arange(out.numel(), device=out.device).view(out.shape).cos()).sum()
    known = lse.where(lse > -1e20, 0)
    loss = loss + (known * torch.arange(lse.numel(), device=lse.device).view(lse.shape).sin()).sum()
    return torch.autograd.grad(loss, inputs)


def ref_gradients(
    outs: Tensor, lses: Tensor, counts: Tensor, base: str, prefill: int = TOKENS
) -> tuple[Tensor, ...]:
    log = math.log(2) if base == "2" else 1.0
    counts = counts & ~lses.detach().isinf()
    scaled = lses.double().where(counts, -1e30) * log
    values = outs.double().where(counts[..., None], 0)
    out = (scaled.softmax(0)[..., None] * values).sum(0)
    lse = scaled.logsumexp(0) / log
    out = torch.cat([out[:prefill], outs[1, prefill:]])
    lse = torch.cat([lse[:prefill], lses[1, prefill:]])
    return gradients(out, lse, outs, lses)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("layout", ["tokens_heads", "heads_tokens"])
@pytest.mark.parametrize("valid", [None, [2], [3, 0, 1, 2, 9]], ids=str)
def test_of_many(device: torch.device, base: Any, layout: Any, valid: list[int] | None) -> None:
    outs, lses = given(device)
    count = None if valid is None else torch.tensor(valid, device=device)
    counts = torch.ones_like(lses, dtype=torch.bool)
    if count is not None:
        counts &= torch.arange(N, device=device).view(N, 1, 1) < count.view(1, -1, 1)
    turned = lses.transpose(1, 2) if layout == "heads_tokens" else lses
    out, lse = merge_states(outs, turned, base=base, lse_layout=layout, count=count)
    assert lse is not None
    lse = lse.t() if layout == "heads_tokens" else lse
    found = gradients(out, lse, outs, lses)
    for one, wanted in zip(found, ref_gradients(outs, lses, counts, base), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefill", [None, 0, 2, TOKENS])
def test_of_two(device: torch.device, prefill: int | None) -> None:
    outs, lses = given(device)
    two = outs[0], lses[0], outs[1], lses[1]
    out, lse = merge_state(*two, prefill_tokens_with_context=prefill)
    assert lse is not None
    counts = torch.ones_like(lses, dtype=torch.bool)
    counts[2] = False
    found = gradients(out, lse, outs, lses)
    prefill = TOKENS if prefill is None else prefill
    for one, wanted in zip(found, ref_gradients(outs, lses, counts, "e", prefill), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


def test_what_counts_nothing_has_none_whatever_comes(device: torch.device) -> None:
    outs, lses = given(device)
    valid = torch.tensor([2], device=device)
    out, lse = merge_states(outs, lses, count=valid)
    assert lse is not None
    endless = torch.full_like(out, torch.inf), torch.full_like(lse, torch.inf)
    of_outs, of_lses = torch.autograd.grad((out, lse), (outs, lses), endless)
    for where in ((slice(None), 4), (0, 3), (2,)):
        assert not of_outs[where].any() and not of_lses[where].any()
    assert of_outs[:2, :3].isinf().all()


def test_counts_that_have_changed(device: torch.device) -> None:
    """The backward pass would look at others than the forward pass did."""
    outs, lses = given(device)
    count = torch.tensor([2], device=device)
    out, _ = merge_states(outs, lses, count=count)
    count.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", ["outs", "lses"])
def test_partials_that_cannot_be_read(which: str) -> None:
    """Named as without a gradient; for the meta device PyTorch would run nothing, silently."""
    for way, text in (("sparse", "layout sparse_coo"), ("meta", "device meta")):
        outs, lses = given(torch.device("cpu"))
        partials = {"outs": list(outs.unbind()), "lses": list(lses.unbind())}
        good = partials[which][1].detach()
        partials[which][1] = good.to("meta") if way == "meta" else good.to_sparse()
        with pytest.raises(ValueError, match=re.escape(f"merge_states: {which}[1]: {text}")):
            merge_states(**partials)


def test_the_operators(device: torch.device) -> None:
    """As a graph that was exported calls them."""
    outs, lses = partials(device, 2, 5, 2, 8)
    wanted = merge_states(outs, lses)
    assert_same(torch.ops.jitkern.merge_states.default(list(outs), list(lses)), wanted)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    assert torch.ops.jitkern.merge_states.out(list(outs), list(lses), output=out, lse=lse) is None
    assert_same((out, lse), wanted)
    fewer = torch.ops.jitkern.merge_states.default(
        list(outs), list(lses), prefill_tokens_with_context=2
    )
    how = {"prefill_tokens_with_context": 2}
    assert_same(fewer, merge_state(outs[0], lses[0], outs[1], lses[1], **how))
    with pytest.raises(ValueError, match=re.escape("merge_states: outs: a list of 0, expected 1")):
        torch.ops.jitkern.merge_states.out([], [], output=out, lse=lse)
