"""Random arguments of random kinds: a right result or a documented exception, never anything else.

Runs for `--fuzz-seconds` (default 5) from `--fuzz-seed`; a failure names the seed of its call.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from buffers import raised_by
from fuzzer import Call, Fuzzer
from stems import ON_GPU, STEMS, own_tests

from jitkern.host import module as host


def documented(error: Exception, call: Call) -> bool:
    """Whether the error says which op and argument, in our words or in the dispatcher's."""
    names, op = "|".join(call.arguments), call.function.__name__
    text = rf"{op}: ({names})\b|jitkern::{op}\(\) Expected a value of .+ for argument '({names})'"
    return re.match(text, str(error)) is not None


LEAST_CALLS = 30  # however slow the machine: on a GPU most calls compile a kernel


def one_call(op: str, seed: int, device: torch.device) -> str:
    """Make, perhaps break, run and judge one call; return what came of it."""
    fuzzer = Fuzzer(seed, device)
    call: Call = own_tests(STEMS[op]).fuzz(fuzzer)
    broken = fuzzer.rng.choice([0, 0, 1, 1, 1, 2, 3])
    for name in fuzzer.rng.sample(sorted(call.arguments), min(broken, len(call.arguments))):
        call.arguments[name] = fuzzer.wrong(call.arguments[name])
    results: list[Any] = []
    error = raised_by(lambda: results.append(call.function(**call.arguments)), device)
    if error is not None:
        assert broken > 0, f"a right call was refused: {error}"
        assert documented(error, call), f"{type(error).__name__}: {error}"
        return type(error).__name__
    if broken == 0:
        call.prove(results[0])
        return "right result"
    return "accepted"  # what was changed happened to be good, such as a Parameter for a tensor


@pytest.mark.parametrize("op", STEMS)
def test_random_calls(
    device: torch.device,
    op: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    if device.type == "cuda" and op not in ON_GPU:
        pytest.skip(f"{STEMS[op].function} has no kernels")
    outcomes: Counter[str] = Counter()
    seed = request.config.getoption("--fuzz-seed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch, of the rarer kinds of tensors
        host.module()  # built outside of the time, as is what the first call needs
        one_call(op, seed, device)
        end_s = time.monotonic() + request.config.getoption("--fuzz-seconds") / len(STEMS)
        while time.monotonic() < end_s or outcomes.total() < LEAST_CALLS:
            try:
                outcomes[one_call(op, seed, device)] += 1
            except BaseException as error:
                pytest.fail(f"{op}, --fuzz-seed {seed}: {type(error).__name__}: {error}")
            seed += 1
    for outcome, count in outcomes.items():
        record_property(outcome, count)
    print(f"\n{op} on {device}: {outcomes.total()} calls, {dict(outcomes.most_common())}")
    assert outcomes["right result"] > 0
    assert outcomes["TypeError"] > 0
