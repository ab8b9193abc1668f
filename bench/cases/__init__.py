"""One module per benchmark: the ops', by their stems, and those of what several ops share.

Each has `run(ctx)`, which yields rows, and `goals(figures)`, which yields what they should reach;
`PEERS` are what has to be compiled for it, `PLOTS` the names of the plots of its rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jitkern.ops._ops import OPS

NAMES = (
    *(op.stem for op in OPS),
    *(
        "ring",
        "comm",
        "peer",
        "pools",
        "ways",
        "pinned_pool",
        "pipeline",
        "offload",
        "beside",
        "checks",
        "host_overhead",
        "first_call",
    ),
)


def module(name: str) -> Any:
    """Return the module of one benchmark."""
    return import_module(f"bench.cases.{name}")
