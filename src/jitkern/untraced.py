"""What ``torch.compile`` is to leave alone: imported while it traces, as it is its compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[no-untyped-call,untyped-decorator]
    reason="a collective of ranks has no place in a graph"
)
def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with nothing of it traced: the graph ends before, and begins again behind."""
    return function(*args)
