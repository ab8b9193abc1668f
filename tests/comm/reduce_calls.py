"""Random calls of a PeerReducer, and what they come to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from jitkern.comm.peer_reduce import PeerReducer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = ("auto", "one_shot", "two_shot")
MOST_ITEMS = 3000  # beyond what the slots hold: several rounds


def values(rng: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits, among them NaN, infinity, and what a workspace holds where nothing has come."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    words = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    words[: rng.choice([0, 16])] = 0xFF
    return words.view(dtype)


@dataclass
class Made:
    """A call that is not made yet, what it writes, and what that comes to."""

    run: Callable[[], object]
    text: str
    out: torch.Tensor
    expected: torch.Tensor

    def check(self) -> None:
        assert is_same(self.out.cpu(), self.expected), self.text


def any_call(reducer: PeerReducer, rng: random.Random) -> Made:
    """One that all ranks make, from the same random numbers."""
    size, rank, dtype = reducer.size, reducer.rank, rng.choice(DTYPES)

    def unaligned(count: int) -> torch.Tensor:
        shift = rng.choice([0, 0, 1, 3])
        return torch.zeros(count + shift, dtype=dtype, device=reducer.device)[shift:]

    count = rng.choice([1, rng.randrange(64), rng.randrange(MOST_ITEMS)])
    op = rng.choice(["all_reduce", "all_reduce", "out", "reduce_scatter", "own part", "barrier"])
    if op == "barrier":
        return Made(reducer.device_barrier, op, torch.zeros(0), torch.zeros(0))
    whole = count * (size if op in ("reduce_scatter", "own part") else 1)
    given = [values(rng, whole, dtype) for _ in range(size)]
    x = unaligned(whole)
    x.copy_(given[rank])
    expected, text = summed(given), f"{op} of {count} {dtype}"
    if op in ("all_reduce", "out"):
        out = x if op == "all_reduce" else unaligned(whole)
        run = partial(reducer.all_reduce, x, output=out, algorithm=rng.choice(ALGORITHMS))
        return Made(run, text, out, expected)
    own = slice(rank * count, (rank + 1) * count)
    out = x[own] if op == "own part" else unaligned(count)
    return Made(partial(reducer.reduce_scatter, out, x), text, out, expected[own])


def summed(given: list[torch.Tensor]) -> torch.Tensor:
    """The plain sum in fp32, by rank, rounded once."""
    total = given[0].float()
    for one in given[1:]:
        total = total + one.float()
    return total.to(given[0].dtype)


def is_same(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """All bits of numbers; of a NaN that it is one."""
    are_nan = expected.isnan()
    as_integers = torch.int32 if out.dtype == torch.float32 else torch.int16
    bits = (one.clone().masked_fill_(are_nan, 0).view(as_integers) for one in (out, expected))
    return torch.equal(out.isnan(), are_nan) and torch.equal(*bits)
