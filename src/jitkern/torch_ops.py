"""The ops as PyTorch operators, for ``torch.compile`` and ``torch.export``.

Importing this module registers ``torch.ops.jitkern.*`` and has ``torch.compile`` put them in the
place of the public functions, so that one call serves in eager mode and in a compiled function. The
eager functions do not know of it: they cost what they cost without it.

What an op is for PyTorch is said in its own module: ``TORCH_OVERLOADS``, and ``torch_traced`` where
the compiler cannot simply trace the operator of the same name. An op without them, which returns
other things than tensors, stays outside of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from jitkern.ops._ops import OPS
from jitkern.ops.common import TorchOverload

# Not torch.library.custom_op: its wrappers add 12 to 15 us to a call, this 1.2 us.
_LIBRARY: Any = vars(torch.library)["Library"]("jitkern", "FRAGMENT")


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    """Say that an op has no result. Wrong arguments are left to the op itself, when it runs."""


def _register(overload: TorchOverload) -> None:
    name = overload.schema.partition("(")[0]
    _LIBRARY.define(overload.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, overload.function, "CompositeExplicitAutograd")
    # No op has a gradient, compiled or not; without this PyTorch invents one that only warns.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    fake = overload.fake or _fake_nothing
    torch.library.register_fake(f"jitkern::{name}", fake, lib=_LIBRARY)


def _traced(operator: Any) -> Callable[..., None]:
    """Return what is traced in the place of a function that returns nothing."""

    def traced(*args: Any, **kwargs: Any) -> None:
        operator(*args, **kwargs)

    return traced


for _op in OPS:
    _module = import_module(f"jitkern.ops.{_op.stem}")
    if _overloads := getattr(_module, "TORCH_OVERLOADS", ()):
        for _overload in _overloads:
            _register(_overload)
        _make = getattr(_module, "torch_traced", _traced)
        _operator = getattr(torch.ops.jitkern, _op.function)
        torch.compiler.substitute_in_graph(getattr(_module, _op.function))(_make(_operator))
