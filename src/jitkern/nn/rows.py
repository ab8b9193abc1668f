"""Rows of a whole table that are a rank's, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jitkern.nn.args import OP
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    from jitkern.nn.layout import Part


def parts_of(whole: Any, part: Part, hidden_size: int) -> list[Tensor]:
    """Return a rank's rows of the whole table, those of each range that is not empty."""
    found = []
    for start, length in (part.vocab_range, part.added_range):
        if length == 0:
            continue
        one = whole[start : start + length]
        if not isinstance(one, Tensor):
            raise TypeError(f"{OP}: weight: slices are {type_text(one)}, expected tensors")
        if one.shape != (length, hidden_size):
            came = f"a slice of {length} rows has shape {[*one.shape]}"
            raise ValueError(f"{OP}: weight: {came}, expected {[length, hidden_size]}")
        found.append(one)
    return found


def write(to: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy `parts` to `to`, one behind the other, and write zeros behind them."""
    with torch.no_grad():
        row = 0
        for one in parts:
            to[row : row + len(one)].copy_(one)
            row += len(one)
        to[row:].zero_()
