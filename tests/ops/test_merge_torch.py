"""merge_states and merge_state in graphs: traced, compiled, exported, and under modes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_reference import FP8, assert_same, partials
from torch import Tensor

import jitkern.torch_ops  # noqa: F401 - nothing has called an op yet
from jitkern import merge_state, merge_states

OPS = torch.ops.jitkern.merge_states
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    torch.compiler.reset()


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


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


@backends
def test_dynamic_shapes_compile_once(device: torch.device, backend: str) -> None:
    run = compiled(Step(), backend, dynamic=True)
    for tokens in (5, 9, 17):
        with torch.compiler.set_stance("default" if tokens == 5 else "fail_on_recompile"):
            assert_does_the_same(run, device, tokens=tokens)


def test_the_operators(device: torch.device) -> None:
    """As a graph that was exported calls them."""
    outs, lses = partials(device, 2, 5, 2, 8)
    wanted = merge_states(outs, lses)
    assert_same(OPS.default(list(outs), list(lses)), wanted)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    assert OPS.out(list(outs), list(lses), output=out, lse=lse) is None
    assert_same((out, lse), wanted)
    fewer = OPS.default(list(outs), list(lses), prefill_tokens_with_context=2)
    how = {"prefill_tokens_with_context": 2}
    assert_same(fewer, merge_state(outs[0], lses[0], outs[1], lses[1], **how))
    with pytest.raises(ValueError, match=re.escape("merge_states: outs: a list of 0, expected 1")):
        OPS.out([], [], output=out, lse=lse)
