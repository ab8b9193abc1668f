"""One module per benchmark: one for each op, by its stem, and those of several ops.

`run(ctx)` yields rows of jitkern beside its peers. `cases(ctx)` yields the cases of the CI guard. A
module has one of them or both. `NEEDS_GPU` skips the benchmark without a GPU.
"""

import runpy
from importlib import import_module
from typing import Any

from bench.case import Case, Context
from jitkern.ops._ops import OPS

ONLY_GUARDED = ("memcpy_2d", "compare_key")
MORE = (
    "residency",
    "sparse",
    "lists",
    "ring",
    "peer",
    "pools",
    "pipeline",
    "beside",
    "host_overhead",
)
NAMES = (*(op.stem for op in OPS if op.stem not in ONLY_GUARDED), *MORE, "first_call")
GUARDED = (*(op.stem for op in OPS), "residency", "host_overhead")


def module(name: str) -> Any:
    return import_module(f"bench.cases.{name}")


def cases_of(source: str, ctx: Context) -> list[Case]:
    """Return the guard's cases of a module of this package, or of a file FOLDER/NAME.py."""
    if source in GUARDED:
        return list(module(source).cases(ctx))
    return list(runpy.run_path(source)["cases"](ctx))
