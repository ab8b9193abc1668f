"""What ``torch.compile`` leaves alone. Imported while it traces: it imports the compiler, 1 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[no-untyped-call,untyped-decorator]
    reason="a collective of ranks has no place in a graph"
)
def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` untraced: the graph ends before it, and another begins after it."""
    return function(*args)
