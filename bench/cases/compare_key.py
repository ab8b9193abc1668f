"""fast_compare_key: the common prefix of two keys of a radix-tree prefix cache, on the CPU.

The keys stay in the cache, as the node that a request has just matched does; memcmp, which only
says equal or not, is the ceiling. Both keys are read once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row, Run
from bench.cases.common import call_case, no_op
from bench.measure import measure

LONG = 131_072


def run(ctx: Context) -> Iterator[Row]:
    for dtype in (torch.int32, torch.int64):
        for length in (1, 16, 1024, LONG):
            yield from measure(replace(ctx, device="cpu"), _case(dtype, length))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures; there is nothing of it on a GPU."""
    if ctx.device == "cuda":
        return
    x = torch.randint(0, 150_000, (16,), dtype=torch.int32)
    keys = (x, x.clone())
    call = partial(jitkern.fast_compare_key, *keys)
    yield call_case("compare_key", "call, 16 tokens", call, keys)
    case = _case(torch.int32, LONG)
    yield replace(case, impls=[case.ours(), case.impls[2]], clock="device")


def _case(dtype: torch.dtype, length: int) -> Case:
    x = torch.randint(0, 150_000, (length,), dtype=dtype)
    y = x.clone()

    def impl(name: str, role: str, compare: Callable[[], Any]) -> Impl:
        def build() -> Run:
            call = compare()
            if call(x, y) != length:
                raise ValueError(f"got {call(x, y)}, expected {length}")
            return lambda b: call(*b)

        return Impl(name, role, build)

    return Case(
        op="compare_key",
        name=f"{length} equal {str(dtype).removeprefix('torch.')} tokens",
        bytes_moved=2 * length * x.element_size(),
        clock="host",
        make=lambda _: (x, y),
        impls=[
            impl("jitkern", "ours", lambda: jitkern.fast_compare_key),
            impl("std::mismatch -O3", "peer", lambda: peers.host().common_prefix),
            impl("torch (x == y).cumprod", "peer", lambda: _torch),
            impl("memcmp", "ceiling", lambda: peers.host().same_bytes),
            no_op((x, y)),
        ],
    )


def _torch(x: torch.Tensor, y: torch.Tensor) -> int:
    return int((x == y).to(torch.int32).cumprod(0).sum())
