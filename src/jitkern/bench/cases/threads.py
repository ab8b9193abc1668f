"""Large CPU copies on as many threads as torch would use, where other cases have one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from jitkern.bench.case import Case, Context
from jitkern.bench.cases import store


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures; nothing on a GPU, or where there is one core."""
    if ctx.device == "cuda" or len(os.sched_getaffinity(0)) < 2:
        return
    case = store.case_of(ctx, 2048, 8192)
    yield replace(case, name=f"{case.name}, torch's threads", threads=0)
