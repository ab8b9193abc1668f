"""The cases of the CI guard: one file per op, and what the loader and the launcher cost.

The benchmarks beside every peer take their sizes further, from the same buffers and references.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from jitkern.bench.case import Case, Context
from jitkern.ops._ops import OPS

# Threads last: those of torch go on spinning for a while.
MODULES = (*(op.stem for op in OPS), "wings", "launch", "threads")


def builtin_cases(ctx: Context) -> Iterator[Case]:
    """Yield jitkern's own cases for a device."""
    for name in MODULES:
        yield from import_module(f"jitkern.bench.cases.{name}").cases(ctx)
