"""merge_states and merge_state in graphs: traced, compiled, exported, and under modes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_reference import BF16, F16, FP8, assert_merged, assert_same, partials
from needs import needs_cxx
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

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


NAMES = ["default", "out", "out", "out", "default"]


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


def ops_in(graph: torch.fx.Graph) -> list[str]:
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[2] for name in targets if name.startswith("jitkern.merge_states.")]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(device: torch.device, mode: str) -> None:
    traced = make_fx(Step(), tracing_mode=mode)(*inputs(device))
    assert ops_in(traced.graph) == NAMES
    assert_does_the_same(traced, device)


@pytest.mark.parametrize("strict", [False, True])
def test_export(device: torch.device, strict: bool) -> None:
    program = torch.export.export(Step(), inputs(device), strict=strict)
    assert ops_in(program.graph) == NAMES
    assert_does_the_same(program.module(), device)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_cxx)])
def test_compile(device: torch.device, backend: str) -> None:
    assert_does_the_same(compiled(Step(), backend), device)


@backends
def test_dynamic_shapes_compile_once(device: torch.device, backend: str) -> None:
    run = compiled(Step(), backend, dynamic=True)
    for tokens in (5, 9, 17):
        with torch.compiler.set_stance("default" if tokens == 5 else "fail_on_recompile"):
            assert_does_the_same(run, device, tokens=tokens)


@backends
def test_lists_and_no_results_given(device: torch.device, backend: str) -> None:
    outs, lses = partials(device, 3, 5, 2, 8, BF16, F16, lse_layout="heads_tokens")

    def merge(outs: list[Tensor], lses: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        return merge_states(outs, lses, base="2", lse_layout="heads_tokens")

    result = compiled(merge, backend)(list(outs), tuple(lses))
    assert_same(result, merge(list(outs), tuple(lses)))
    assert_merged(result, outs, lses, base="2", lse_layout="heads_tokens")


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


def test_fake_tensors(device: torch.device) -> None:
    """In their mode and, as a compiler keeps them, outside of it."""
    mode = FakeTensorMode()
    outs, lses = (mode.from_tensor(one) for one in partials(device, 3, 5, 2, 8, BF16))

    def check() -> None:
        for out, lse in (merge_states(outs, lses), merge_states(list(outs), list(lses))):
            assert (out.shape, out.dtype, out.device) == ((5, 2, 8), BF16, outs.device)
            assert (lse.shape, lse.dtype) == ((5, 2), torch.float32)
        assert merge_state(outs[0], lses[0], outs[1], lses[1], lse=False)[1] is None

    with mode:
        check()
    check()


MISTAKES: dict[str, dict[str, Any]] = {
    "number": {"lses": torch.zeros(2, 5, 2).unbind(0)},
    "stack": {"lses": torch.zeros(3, 5, 2)},
    "dtype": {"outs": [torch.zeros(5, 2, 8, dtype=torch.int32)] * 3},
    "shape": {"outs": [torch.zeros(5, 2, 8), torch.zeros(5, 2, 9), torch.zeros(5, 2, 8)]},
    "layout": {"lse_layout": "heads_tokens"},
    "base": {"base": "10"},
    "scale": {"scale": torch.ones(1)},
    "count": {"count": torch.ones(4, dtype=torch.int32)},
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_that_of_eager(mistake: str, backend: str) -> None:
    """But that a stacked tensor is no other than a list there."""
    good = {"outs": [torch.zeros(5, 2, 8)] * 3, "lses": [torch.zeros(5, 2)] * 3}
    arguments = {**good, **MISTAKES[mistake]}
    if mistake == "stack":
        merged, _ = compiled(lambda **given: merge_states(**given), backend)(**arguments)
        assert merged.eq(0).all()
        return
    with pytest.raises((TypeError, ValueError)) as eager:
        merge_states(**arguments)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
        compiled(lambda **given: merge_states(**given), backend)(**arguments)


def test_a_batch_of_what_writes_is_an_error_that_says_so(device: torch.device) -> None:
    outs, lses = partials(device, 2, 5, 2, 8)
    out, lse = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])
    batch = torch.stack([outs[1]] * 3)

    def merge(one: Tensor) -> None:
        merge_states([outs[0], one], list(lses), output=out, lse=lse)

    text = "merge_states: outs[1]: batched by torch.vmap, expected a plain tensor: the op writes"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        torch.vmap(merge)(batch)
