"""Random arguments of random kinds: a right result or a documented exception, never anything else.

Runs for `--fuzz-seconds` (default 5) from `--fuzz-seed`; a failure names the seed of its call.
"""

from __future__ import annotations

import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from buffers import INT_DTYPES, raised_by
from ref import ref_h2d_gather, ref_indexing, ref_store, same_bits
from torch import Tensor

import jitkern

DTYPES = [
    torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.uint8, torch.bool,
    torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.complex64,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float64,
]  # fmt: skip
SIZES = [0, 1, 1, 2, 3, 4, 5, 8]


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

    def integers(self, shape: list[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
        values = torch.randint(low, max(high, low + 1), shape, generator=self.generator)
        return values.to(dtype).to(self.device)

    def distinct(self, count: int, below: int, dtype: torch.dtype) -> Tensor:
        values = torch.randperm(max(below, count), generator=self.generator)[:count]
        values[values >= below] = -1
        return values.to(dtype).to(self.device)

    def store(self) -> Call:
        row, dtype = self.row()
        slots, rows = self.rng.choice(SIZES), self.rng.choice(SIZES)
        caches = [self.tensor([slots, *row], dtype) for _ in "kv"]
        new = [self.tensor([rows, *row], dtype) for _ in "kv"]
        indices = self.distinct(rows, slots, self.rng.choice(INT_DTYPES))
        expected = [cache.clone() for cache in caches]
        ref_store(*expected, indices, *new)

        def prove(result: Any) -> None:
            assert result is None
            assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))

        names = ["k_cache", "v_cache", "indices", "k", "v"]
        return Call(
            jitkern.store_cache, dict(zip(names, [*caches, indices, *new], strict=True)), prove
        )

    def indexing(self) -> Call:
        row, dtype = self.row()
        vocab = self.rng.choice(SIZES)
        weights = self.tensor([vocab, *row], dtype)
        shape = [self.rng.choice(SIZES) for _ in range(self.rng.randrange(3))]
        vocab_range, highest = None, vocab
        if self.rng.random() < 0.4:
            vocab_range, highest = (self.rng.randrange(9), self.rng.randint(0, vocab)), 20
        low = -2 if self.rng.random() < 0.5 or highest == 0 else 0
        indices = self.integers(shape, low, highest, self.rng.choice(INT_DTYPES))
        if highest == 0:
            indices.fill_(-1)
        expected = ref_indexing(weights, indices, vocab_range)
        output = torch.empty_like(expected) if self.rng.random() < 0.5 else None

        def prove(result: Any) -> None:
            assert output is None or result is output
            assert same_bits(result, expected)

        arguments = {"weights": weights, "indices": indices, "output": output}
        return Call(jitkern.indexing, {**arguments, "vocab_range": vocab_range}, prove)

    def h2d_gather(self) -> Call:
        row, dtype = self.row()
        num_src, num_dst, count = (self.rng.choice(SIZES) for _ in range(3))
        src = self.tensor([num_src, *row], dtype, host=True)
        dst = self.tensor([num_dst, *row], dtype)
        index_dtype = self.rng.choice(INT_DTYPES)
        sources = self.distinct(count, num_src, index_dtype)
        pairs = torch.stack([sources, self.distinct(count, num_dst, index_dtype)], dim=1)
        slot_map, reuse_resident = None, False
        if self.rng.random() < 0.5:
            reuse_resident = self.rng.random() < 0.5
            highest = 0 if reuse_resident else 9  # nothing is resident
            slot_map = self.integers([num_src], -9, highest, self.rng.choice(INT_DTYPES))
        expected, expected_map = dst.clone(), None if slot_map is None else slot_map.clone()
        if 0 not in row:  # rows of no bytes: nothing to do
            ref_h2d_gather(src, expected, pairs, expected_map)

        def prove(result: Any) -> None:
            assert result is None
            assert same_bits(dst, expected)
            assert slot_map is None or torch.equal(slot_map, expected_map)

        return Call(
            jitkern.h2d_gather,
            {"src": src, "dst": dst, "pairs": pairs, "slot_map": slot_map,
             "num_sms": self.rng.choice([None, 1, 2, 7]), "dedup": self.rng.random() < 0.5,
             "reuse_resident": reuse_resident},
            prove,
        )  # fmt: skip

    def d2h_scatter(self) -> Call:
        row, dtype = self.row()
        num_src, num_dst, count = (self.rng.choice(SIZES) for _ in range(3))
        src = self.tensor([num_src, *row], dtype)
        dst = self.tensor([num_dst, *row], dtype, host=True)
        index_dtype = self.rng.choice(INT_DTYPES)
        sources = self.distinct(count, num_src, index_dtype)
        pairs = torch.stack([sources, self.distinct(count, num_dst, index_dtype)], dim=1)
        expected = dst.clone()
        ref_h2d_gather(src, expected, pairs)

        def prove(result: Any) -> None:
            assert result is None
            assert same_bits(dst, expected)

        arguments = {"src": src, "dst": dst, "pairs": pairs, "num_sms": self.rng.choice([None, 3])}
        return Call(jitkern.d2h_scatter, arguments, prove)

    def compare_key(self) -> Call:
        dtype = self.rng.choice(INT_DTYPES)
        x, y = (
            torch.randint(0, 2, (self.rng.choice([*SIZES, 100]),), generator=self.generator)
            for _ in "xy"
        )
        start, page_size = self.rng.randint(0, len(x)), self.rng.choice([1, 1, 2, 16])
        length = min(len(x) - start, len(y))
        differ = (x[start : start + length] != y[:length]).nonzero().flatten().tolist()
        common = differ[0] if differ else length

        def prove(result: Any) -> None:
            assert result == common // page_size * page_size

        return Call(
            jitkern.fast_compare_key,
            {"x": x.to(dtype), "y": y.to(dtype), "start": start, "page_size": page_size},
            prove,
        )

    def row(self) -> tuple[list[int], torch.dtype]:
        shape = [self.rng.choice([0, *SIZES[1:], 20, 33]) for _ in range(self.rng.randrange(3))]
        return shape, self.rng.choice(DTYPES)

    # -- arguments that are wrong --------------------------------------------------------------

    def wrong(self, value: Any) -> Any:
        """Return something else than `value`, often close to it."""
        if torch.is_tensor(value) and self.rng.random() < 0.7:
            return self.wrong_tensor(value)
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


def documented(error: Exception, call: Call) -> bool:
    """Whether the error is one of the three kinds and says which op and argument."""
    names = "|".join(call.arguments)
    return re.match(rf"{call.function.__name__}: ({names})\b", str(error)) is not None


OPS = ["store", "indexing", "h2d_gather", "d2h_scatter", "compare_key"]


def one_call(op: str, seed: int, device: torch.device) -> str:
    """Make, perhaps break, run and judge one call; return what came of it."""
    fuzzer = Fuzzer(seed, device)
    call: Call = getattr(fuzzer, op)()
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


@pytest.mark.parametrize("op", OPS)
def test_random_calls(
    device: torch.device,
    op: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    if op == "compare_key" and device.type == "cuda":
        pytest.skip("fast_compare_key runs on the CPU only")
    outcomes: Counter[str] = Counter()
    seed = request.config.getoption("--fuzz-seed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch, of the rarer kinds of tensors
        one_call(op, seed, device)  # builds what is to be built, outside of the time
        end_s = time.monotonic() + request.config.getoption("--fuzz-seconds") / len(OPS)
        while time.monotonic() < end_s:
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
