"""Wrong arguments of merge_state: those of merge_states are in the table of all ops."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from merge_mistakes import FP8, LSE_SHAPE, SHAPE, mistakes_of_many, mistakes_of_two
from mistakes import zeros
from ref import same_bits
from test_merge import good_arguments as many_arguments

from jitkern import merge_state, merge_states

MISTAKES = mistakes_of_two()


def good_arguments() -> dict[str, Any]:
    partials = {"out_a": torch.ones(SHAPE), "lse_a": zeros(*LSE_SHAPE)}
    partials |= {"out_b": torch.ones(SHAPE), "lse_b": zeros(*LSE_SHAPE)}
    results = {"output": zeros(*SHAPE).to(FP8), "lse": zeros(*LSE_SHAPE), "scale": torch.ones(1)}
    how = {"base": "2", "lse_layout": "tokens_heads", "prefill_tokens_with_context": 2}
    return {**partials, **results, **how}


@pytest.mark.parametrize(("change", "kind", "text"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistake(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    good = good_arguments()
    before = {name: value.clone() for name, value in good.items() if torch.is_tensor(value)}
    with pytest.raises(kind) as caught:
        merge_state(**{**good, **change})
    assert type(caught.value) is kind
    assert str(caught.value) == f"merge_state: {text}"
    assert all(same_bits(good[name], value) for name, value in before.items())


def test_the_table_has_every_argument() -> None:
    assert set(inspect.signature(merge_state).parameters) == set(good_arguments())
    merge_state(**good_arguments())  # and is otherwise right
    named = {re.match(r"\w+", text)[0] for _, _, text in MISTAKES}  # type: ignore[index]
    assert named == set(good_arguments())


def test_without_results_the_messages_are_the_same() -> None:
    """There `out` and `lse` are made in Python, before the checks in C++ can run."""
    for change, kind, text in MISTAKES:
        if {"output", "lse", "scale"} & set(change):
            continue
        with pytest.raises(kind) as caught:
            merge_state(
                **{**good_arguments(), "output": None, "lse": None, "scale": None, **change}
            )
        assert str(caught.value) == f"merge_state: {text}"


def test_the_same_of_merge_states() -> None:
    for change, kind, text in mistakes_of_many(many_arguments()):
        if {"output", "lse", "scale"} & set(change):
            continue
        results = {"output": None, "lse": None, "scale": None}
        with pytest.raises(kind) as caught:
            merge_states(**{**many_arguments(), **results, **change})
        assert str(caught.value) == f"merge_states: {text}"


@pytest.mark.parametrize("name", ["out_a", "lse_b", "scale"])
def test_what_wants_a_gradient_is_refused(name: str) -> None:
    """By both functions, where there is a result to be written to."""
    good = good_arguments()
    good[name].requires_grad_()
    two = {key: good.pop(key) for key in ("out_a", "lse_a", "out_b", "lse_b")}
    with pytest.raises(RuntimeError, match=r"requires a gradient, expected none"):
        merge_state(**two, **good)
    good.pop("prefill_tokens_with_context")
    with pytest.raises(RuntimeError, match=r"requires a gradient, expected none"):
        merge_states([two["out_a"], two["out_b"]], [two["lse_a"], two["lse_b"]], **good)
    assert not good["lse"].any()
