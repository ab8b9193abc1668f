"""Ops that undo each other."""

from __future__ import annotations

import pytest
import torch
from buffers import make_buffer

from jitkern import indexing, store_cache


@pytest.mark.parametrize("row_bytes", [1, 6, 16, 40, 656, 657, 1024])
def test_what_goes_in_comes_out(device: torch.device, row_bytes: int) -> None:
    """Store, then gather from the same slots: the rows again, whatever they hold."""
    rows = make_buffer((40, row_bytes), device=device).view
    cache = torch.zeros(2, 64, row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(64, device=device)[:40]
    store_cache(cache[0], cache[1], slots, rows, rows)
    assert torch.equal(indexing(cache[0], slots), rows)
    assert torch.equal(indexing(cache[1], slots.int()), rows)
