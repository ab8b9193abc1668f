"""merge_state and merge_states in PyTorch: their gradient, and in graphs. See test_tracing.py."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_reference import FP8, assert_same, partials
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
    for bad, text in ((Tensor.to_sparse, "layout sparse_coo"), (to_meta, "device meta")):
        outs, lses = given(torch.device("cpu"))
        partials = {"outs": list(outs.unbind()), "lses": list(lses.unbind())}
        partials[which][1] = bad(partials[which][1].detach())
        with pytest.raises(ValueError, match=re.escape(f"merge_states: {which}[1]: {text}")):
            merge_states(**partials)


def to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


# -- graphs ----------------------------------------------------------------------------------------


class Step(torch.nn.Module):
    """Each way to call the ops, of which all write to what a later one reads."""

    def forward(
        self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        first = merge_states(outs, lses, count=count)
        merge_states([*first[:1], out], [first[1], lse], output=out, lse=lse, base="2")
        merge_state(outs[0], lses[0], out, lse, output=out, lse=lse, prefill_tokens_with_context=3)
        small = torch.empty_like(out, dtype=FP8)
        scale = lse.new_full((1,), 0.5)
        merge_states([out, outs[1]], [lse, lses[1]], output=small, lse=False, scale=scale)
        alone, none = merge_state(out, lse.clone(), small.float(), lse, lse=False)
        assert none is None
        return alone + first[0], lse + 1


def inputs(device: torch.device, seed: int = 0, tokens: int = 5) -> tuple[Tensor, ...]:
    outs, lses = partials(device, 3, tokens, 2, 8, seed=seed)
    out, lse = partials(device, 1, tokens, 2, 8, seed=seed + 1)
    outs, out = outs.nan_to_num(0.5), out.nan_to_num(0.25)
    return outs, lses, out[0], lse[0], torch.arange(tokens, device=device) % 4


def assert_does_the_same(step: Callable[..., Any], device: torch.device, **how: int) -> None:
    ours, theirs = inputs(device, seed=9, **how), inputs(device, seed=9, **how)
    result, wanted = step(*ours), Step()(*theirs)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamic_shapes_compile_once(device: torch.device, backend: str) -> None:
    torch.compiler.reset()
    run = torch.compile(Step(), fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9, 17):
        with torch.compiler.set_stance("default" if tokens == 5 else "fail_on_recompile"):
            assert_does_the_same(run, device, tokens=tokens)


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
