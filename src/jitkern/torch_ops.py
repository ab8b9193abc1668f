"""The ops as PyTorch operators, for ``torch.compile`` and ``torch.export``.

Importing this module registers ``torch.ops.jitkern.*`` and has ``torch.compile`` put them in the
place of ``jitkern.store_cache`` and the others, so that one call serves in eager mode and in a
compiled function. The eager functions do not know of it: they cost what they cost without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jitkern.ops.d2h_scatter import d2h_scatter
from jitkern.ops.h2d_gather import h2d_gather
from jitkern.ops.index import indexing
from jitkern.ops.store import store_cache


def _indexing(weights: Tensor, indices: Tensor, *, vocab_range: Any = None) -> Tensor:
    return indexing(weights, indices, vocab_range=_as_given(vocab_range))


def _indexing_out(
    weights: Tensor, indices: Tensor, *, output: Tensor, vocab_range: Any = None
) -> None:
    indexing(weights, indices, output=output, vocab_range=_as_given(vocab_range))


def _as_given(vocab_range: list[int] | None) -> Any:
    """Return the tuple that the dispatcher has made a list: error messages quote it."""
    return None if vocab_range is None else tuple(vocab_range)


def _fake_indexing(weights: Tensor, indices: Tensor, *, vocab_range: Any = None) -> Tensor:
    return weights.new_empty((*indices.shape, *weights.shape[1:]))


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    """Say that an op has no result. Wrong arguments are left to the op itself, when it runs."""


# Not torch.library.custom_op: its wrappers add 12 to 15 us to a call, this 1.2 us.
_LIBRARY: Any = vars(torch.library)["Library"]("jitkern", "FRAGMENT")


def _register(name: str, schema: str, function: Callable[..., Any], fake: Any) -> None:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    # No op has a gradient, compiled or not; without this PyTorch invents one that only warns.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"jitkern::{name}", fake, lib=_LIBRARY)


_register(
    "store_cache",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, Tensor k, Tensor v) -> ()",
    store_cache,
    _fake_nothing,
)
_register(
    "indexing",
    "(Tensor weights, Tensor indices, *, SymInt[]? vocab_range=None) -> Tensor",
    _indexing,
    _fake_indexing,
)
_register(
    "indexing.out",  # not `-> Tensor(a!)`: functionalization refuses to return what is written to
    "(Tensor weights, Tensor indices, *, Tensor(a!) output, SymInt[]? vocab_range=None) -> ()",
    _indexing_out,
    _fake_nothing,
)
_register(
    "h2d_gather",
    "(Tensor src, Tensor(a!) dst, Tensor pairs, *, Tensor(b!)? slot_map=None, bool dedup=True,"
    " bool reuse_resident=False, SymInt? num_sms=None, bool record_source=False) -> ()",
    h2d_gather,
    _fake_nothing,
)
_register(
    "d2h_scatter",
    "(Tensor src, Tensor(a!) dst, Tensor pairs, *, SymInt? num_sms=None) -> ()",
    d2h_scatter,
    _fake_nothing,
)


def _substitute(function: Callable[..., None]) -> None:
    """Have ``torch.compile`` trace the operator of the same name where it meets ``function``."""
    operator = getattr(torch.ops.jitkern, function.__name__)

    def traced(*args: Any, **kwargs: Any) -> None:
        operator(*args, **kwargs)

    torch.compiler.substitute_in_graph(function)(traced)


for _function in (store_cache, h2d_gather, d2h_scatter):
    _substitute(_function)


@torch.compiler.substitute_in_graph(indexing)
def _traced_indexing(
    weights: Tensor,
    indices: Tensor,
    *,
    output: Tensor | None = None,
    vocab_range: tuple[int, int] | None = None,
) -> Tensor:
    if output is None:
        result: Tensor = torch.ops.jitkern.indexing(weights, indices, vocab_range=vocab_range)
        return result
    torch.ops.jitkern.indexing(weights, indices, output=output, vocab_range=vocab_range)
    return output
