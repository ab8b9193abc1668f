"""Random arguments of random kinds: right ones, and what to put in their place."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from buffers import INT_DTYPES
from torch import Tensor

DTYPES = [
    torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.uint8, torch.bool,
    torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.complex64,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float64,
]  # fmt: skip
SIZES = [0, 1, 1, 2, 3, 4, 5, 8]
NUM_CORES = len(os.sched_getaffinity(0))


@dataclass
class Call:
    """One call: its arguments, and what it should have done where it succeeds."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    prove: Callable[[Any], None]


class Fuzzer:
    """Makes calls that are right, then breaks some of their arguments."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    # -- arguments that are right --------------------------------------------------------------

    def tensor(self, shape: list[int], dtype: torch.dtype, *, host: bool = False) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        high = 2 if dtype == torch.bool else 256  # clone() makes any other bool a 1
        raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=self.generator)
        tensor = raw.view(dtype).reshape(shape)
        if not host:
            return tensor.to(self.device)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def rows(self, shape: list[int], dtype: torch.dtype, *, host: bool = False) -> Tensor:
        """Return rows that may lie apart, and begin at any item of their memory."""
        count, *row = shape
        gap, offset = self.rng.choice([0, 0, 1, 16]) if row else 0, self.rng.choice([0, 0, 1, 4])
        stride = torch.Size(row).numel() + gap
        whole = self.tensor([offset + count * stride], dtype, host=host)
        return whole.as_strided(shape, (stride, *torch.empty(row).stride()), offset)

    def integers(self, shape: list[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
        values = torch.randint(low, max(high, low + 1), shape, generator=self.generator)
        return values.to(dtype).to(self.device)

    def distinct(self, count: int, below: int, dtype: torch.dtype) -> Tensor:
        values = torch.randperm(max(below, count), generator=self.generator)[:count]
        values[values >= below] = -1
        return values.to(dtype).to(self.device)

    def row(self) -> tuple[list[int], torch.dtype]:
        shape = [self.rng.choice([0, *SIZES[1:], 20, 33]) for _ in range(self.rng.randrange(3))]
        return shape, self.rng.choice(DTYPES)

    def maybe_on_host(self, pairs: Tensor) -> Tensor:
        """Return them as they are, or on the CPU, from where they may say what a GPU copies."""
        return pairs.cpu() if self.rng.random() < 0.5 else pairs

    def way(self, pairs: Tensor, methods: list[str]) -> dict[str, Any]:
        """Draw one of the `methods` that go with such pairs, and a number of threads."""
        method = self.rng.choice(["auto", "sm"] if pairs.is_cuda else methods)
        return {"method": method, "num_threads": self.rng.choice([None, 1, NUM_CORES])}

    # -- arguments that are wrong --------------------------------------------------------------

    def wrong(self, value: Any) -> Any:
        """Return something else than `value`, often close to it."""
        if torch.is_tensor(value) and self.rng.random() < 0.7:
            return self.wrong_tensor(value)
        if isinstance(value, list) and value and self.rng.random() < 0.7:  # of tensors
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
            lambda: good.to(self.rng.choice([torch.int16, torch.float16, torch.float32])),
            lambda: good.to("meta"),
            lambda: good.clone().to_sparse(),
            lambda: good.float().to_mkldnn(),
            lambda: torch.quantize_per_tensor(good.float().cpu(), 0.1, 0, torch.quint8),
            lambda: torch.nn.Parameter(good, requires_grad=good.is_floating_point()),
            lambda: (good.float().requires_grad_() * 2).to(good.dtype),
            lambda: good.t() if good.dim() == 2 else good.flip(0),
            lambda: good[..., ::2],
            lambda: good[::2],
            lambda: good.unsqueeze(self.rng.randrange(good.dim() + 1)),
            lambda: good.reshape(-1),
            lambda: good.reshape(-1)[0],
            lambda: good.expand(3, *good.shape),
            lambda: good[:0],
            lambda: torch.cat([good, good]),
            lambda: torch._efficientzerotensor(good.shape, dtype=good.dtype),
            lambda: self.without_storage(good),
            lambda: torch.nested.nested_tensor([good, good]),
            lambda: torch.empty(0),
            lambda: torch.tensor(7),
            lambda: torch.zeros(1, dtype=good.dtype).expand(good.shape),
            lambda: torch.zeros([1] * 60, dtype=good.dtype),
            lambda: torch.empty(2**20, 0, 2**40, dtype=good.dtype),
            lambda: torch.empty(good.shape, dtype=torch.bits8),
            lambda: good.cpu() if good.is_cuda else good.as_subclass(torch.nn.Buffer),
            lambda: good + 2**30 if not good.is_floating_point() else good,
            *[lambda: self.one_too_large(good)] * 3,
            lambda: torch.full(good.shape, 2**62),
            lambda: torch.full(good.shape, torch.iinfo(torch.int64).min),
        ]
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
