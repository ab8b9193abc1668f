"""write_twice against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from buffers import make_buffer
from mistakes import Mistake, not_rows, not_tensors, zeros
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import write_twice


def ref_twice(rows: Tensor) -> Tensor:
    return rows[torch.arange(2 * rows.shape[0], device=rows.device) // 2]


@pytest.mark.parametrize("row_bytes", [1, 16, 100, 656])
def test_row_sizes(device: torch.device, row_bytes: int) -> None:
    rows = make_buffer((19, row_bytes), device=device).view
    output = make_buffer((38, row_bytes), device=device, seed=1)
    twin = output.twin()
    assert write_twice(rows, output.view) is None
    twin.view.copy_(ref_twice(rows))
    assert output.same(twin)


# -- for the tests that go over all ops ------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    return {"rows": zeros(3, 8), "output": zeros(6, 8)}


def mistakes() -> list[Mistake]:
    return [
        *not_tensors(good_arguments(), "rows", "output"),
        *not_rows("rows", [3, 8]),
        ({"output": zeros(5, 8)}, ValueError,
         "output: 5 rows, expected 6, two for each of rows"),
        ({"output": zeros(6, 8, dtype=torch.int32)}, TypeError,
         "output: dtype int32, expected float32 as in rows"),
    ]  # fmt: skip


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    yield "default", (rows(slots), rows(2 * slots)), {}
