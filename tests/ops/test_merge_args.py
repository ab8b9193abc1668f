"""Wrong arguments of merge_state: those of merge_states are in the table of all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from merge_mistakes import LSE_SHAPE, SHAPE, mistakes_of_many, mistakes_of_two
from mistakes import Mistake, zeros
from test_merge import good_arguments as many_arguments

from jitkern import merge_state, merge_states

RESULTS = {"output", "lse", "scale"}


def good_arguments() -> dict[str, Any]:
    partials = {"out_a": torch.ones(SHAPE), "lse_a": zeros(*LSE_SHAPE)}
    partials |= {"out_b": torch.ones(SHAPE), "lse_b": zeros(*LSE_SHAPE)}
    how = {"base": "2", "lse_layout": "tokens_heads", "prefill_tokens_with_context": 2}
    return {**partials, "output": zeros(*SHAPE), "lse": zeros(*LSE_SHAPE), **how}


def check(function: Any, good: dict[str, Any], mistake: Mistake) -> None:
    change, kind, text = mistake
    with pytest.raises(kind) as caught:
        function(**{**good, **change})
    assert type(caught.value) is kind
    assert str(caught.value) == f"{function.__name__}: {text}"


def test_mistakes_of_merge_state() -> None:
    for mistake in mistakes_of_two():
        good = good_arguments()
        check(merge_state, good, mistake)
        assert not good["output"].any() and not good["lse"].any()


def test_without_results_the_messages_are_the_same() -> None:
    """There they are made in Python, before the checks in C++ can run."""
    none = dict.fromkeys(RESULTS)
    for mistake in mistakes_of_two():
        if not RESULTS & set(mistake[0]):
            check(merge_state, {**good_arguments(), **none}, mistake)
    for mistake in mistakes_of_many(many_arguments()):
        if not RESULTS & set(mistake[0]):
            check(merge_states, {**many_arguments(), **none}, mistake)
