"""fast_compare_key, for the guard: the common prefix of two equal keys, on the CPU."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import jitkern
from bench.case import Case, Context, Impl, Run
from bench.cases.common import call_case

LONG = 131_072


def cases(ctx: Context) -> Iterator[Case]:
    if ctx.device == "cuda":
        return
    keys = _equal_keys(16)
    call = partial(jitkern.fast_compare_key, *keys)
    yield call_case("compare_key", "call, 16 tokens", call, keys)
    keys = _equal_keys(LONG)

    def impl(name: str, role: str, compare: Callable[..., Any]) -> Impl:
        def build() -> Run:
            if (length := compare(*keys)) != LONG:
                raise ValueError(f"a common prefix of {length}, expected {LONG}")
            return lambda b: compare(*b)

        return Impl(name, role, build, check=False)

    yield Case(
        op="compare_key",
        name=f"{LONG} equal int32 tokens",
        bytes_moved=8 * LONG,
        make=lambda _: keys,
        impls=[
            impl("jitkern", "ours", jitkern.fast_compare_key),
            impl("torch (x == y).cumprod", "peer", _torch),
        ],
    )


def _equal_keys(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 150_000, (length,), dtype=torch.int32)
    return x, x.clone()


def _torch(x: torch.Tensor, y: torch.Tensor) -> int:
    return int((x == y).to(torch.int32).cumprod(0).sum())
