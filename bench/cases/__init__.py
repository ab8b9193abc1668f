"""One module per benchmark: the ops', by their stems, and those of what several ops share.

`run(ctx)` yields rows of jitkern beside its peers. `cases(ctx)`, where there is one, yields what
the CI guard measures. `NEEDS_GPU` skips the benchmark without one.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from jitkern.ops._ops import OPS

MORE = ("lists", "ring", "comm", "peer", "pools", "pipeline", "beside", "host_overhead")
NAMES = (*(op.stem for op in OPS), *MORE, "first_call")
GUARDED = (*(op.stem for op in OPS), "host_overhead")


def module(name: str) -> Any:
    return import_module(f"bench.cases.{name}")


def guarded() -> list[Path]:
    return [Path(__file__).with_name(f"{name}.py") for name in GUARDED]
