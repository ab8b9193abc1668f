"""Arguments of random kinds: a documented exception or none, never anything else.

Runs for `--fuzz-seconds` (default 5) from `--fuzz-seed`; a failure names the seed of its call.
"""

from __future__ import annotations

import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from buffers import INT_DTYPES
from stems import FUNCTIONS, own_tests
from torch import Tensor

import jitkern


class Fuzzer:
    """Puts something else in the place of right arguments."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def wrong(self, value: Any) -> Any:
        """Return something else than `value`, often close to it."""
        if torch.is_tensor(value) and self.rng.random() < 0.7:
            return self.wrong_tensor(value)
        if isinstance(value, list) and value and self.rng.random() < 0.7:  # a list of tensors
            i = self.rng.randrange(len(value))
            return [self.wrong(one) if j == i else one for j, one in enumerate(value)]
        return self.rng.choice(
            [None, True, 0, -1, 3, 2**31, -(2**63), 2**63, 2**100, 1.5, float("nan"), "cache", "",
             b"bytes", [], [1, 2], (0, 2), (0, 2**63), (None, 1), (0.5, 1), (1, 2, 3), {}, {"a": 1},
             {1, 2}, object(), torch.float32, torch.device("cpu"), len, range(3), Ellipsis, [[1.0]],
             slice(3), NotImplemented, iter([1, 2]), torch.Size([3]), ValueError("x")]
        )  # fmt: skip

    def wrong_tensor(self, good: Tensor) -> Tensor:
        choices: list[Callable[[], Tensor]] = [
            lambda: good.to("meta"), lambda: good[..., ::2], lambda: good[::2],
            lambda: good.reshape(-1), lambda: good.reshape(-1)[0], lambda: good[:0],
            lambda: torch.cat([good, good]), lambda: self.without_storage(good),
            lambda: torch.empty(0), lambda: torch.tensor(7), lambda: good.expand(3, *good.shape),
            lambda: torch.full(good.shape, 2**62), lambda: good.clone().to_sparse(),
            lambda: good.float().to_mkldnn(),
            lambda: good.to(self.rng.choice([torch.int16, torch.float16, torch.float32])),
            lambda: torch.quantize_per_tensor(good.float(), 0.1, 0, torch.quint8),
            lambda: torch.nn.Parameter(good, requires_grad=good.is_floating_point()),
            lambda: (good.float().requires_grad_() * 2).to(good.dtype),
            lambda: good.t() if good.dim() == 2 else good.flip(0),
            lambda: good.unsqueeze(self.rng.randrange(good.dim() + 1)),
            lambda: torch._efficientzerotensor(good.shape, dtype=good.dtype),
            lambda: torch.nested.nested_tensor([good, good]),
            lambda: torch.zeros(1, dtype=good.dtype).expand(good.shape),
            lambda: torch.zeros([1] * 60, dtype=good.dtype),
            lambda: torch.empty(2**20, 0, 2**40, dtype=good.dtype),
            lambda: torch.empty(good.shape, dtype=torch.bits8),
            lambda: good.as_subclass(torch.nn.Buffer),
            lambda: good + 2**30 if not good.is_floating_point() else good,
            *[lambda: self.one_too_large(good)] * 3,
            lambda: torch.full(good.shape, torch.iinfo(torch.int64).min),
        ]  # fmt: skip
        while True:
            try:
                return self.rng.choice(choices)()
            except (RuntimeError, NotImplementedError, IndexError, TypeError):
                pass  # PyTorch cannot make this one out of `good`

    def one_too_large(self, good: Tensor) -> Tensor:
        if good.dtype not in INT_DTYPES:
            raise TypeError("not an index")
        tensor = good.clone()
        highest = self.rng.choice([9, 2**31 - 1, torch.iinfo(good.dtype).max])
        tensor.view(-1)[self.rng.randrange(good.numel() or 1)] = highest
        return tensor

    def without_storage(self, good: Tensor) -> Tensor:
        tensor = good.clone()
        tensor.untyped_storage().resize_(0)
        return tensor


def one_call(op: str, seed: int) -> str:
    """Break some arguments of a right call, run and judge it; return what came of it."""
    fuzzer, arguments = Fuzzer(seed), own_tests(FUNCTIONS[op]).good_arguments()
    for name in fuzzer.rng.sample(sorted(arguments), fuzzer.rng.choice([1, 1, 1, 2])):
        arguments[name] = fuzzer.wrong(arguments[name])
    try:
        getattr(jitkern, op)(**arguments)
    except Exception as error:
        names = "|".join(arguments)
        ours = rf"{op}: ({names})\b"
        # The dispatcher's, and PyTorch's of an `output` that is an efficient zero tensor.
        theirs = (
            rf"jitkern::{op}\(\) Expected .+ for argument '({names})'|ZeroTensors are immutable"
        )
        assert re.match(f"{ours}|{theirs}", str(error)), f"{type(error).__name__}: {error}"
        return type(error).__name__
    return "accepted"  # what was changed happened to be good, such as a Parameter for a tensor


@pytest.mark.parametrize("op", FUNCTIONS)
def test_random_arguments(op: str, request: pytest.FixtureRequest) -> None:
    outcomes: Counter[str] = Counter()
    seed = request.config.getoption("--fuzz-seed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch, of the rarer kinds of tensors
        end_s = time.monotonic() + request.config.getoption("--fuzz-seconds") / len(FUNCTIONS)
        while time.monotonic() < end_s or outcomes.total() < 30:
            try:
                outcomes[one_call(op, seed)] += 1
            except BaseException as error:
                pytest.fail(f"{op}, --fuzz-seed {seed}: {type(error).__name__}: {error}")
            seed += 1
    assert outcomes["TypeError"] > 0
