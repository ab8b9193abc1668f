"""indexing of a table that holds two ranges of a vocabulary, and of a vocabulary of known size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from buffers import INT_DTYPES, host_buffer, make_buffer, out_of_range, to_index
from ref import ref_indexing, same_bits
from torch import Tensor

import jitkern
from jitkern import indexing

Range = tuple[int, int]
ROWS = 41
LAST = 2**63 - 1


def table(device: torch.device, row_bytes: int = 40, rows: int = ROWS) -> Tensor:
    return make_buffer((rows, row_bytes), torch.uint8, device).view


def around(*ranges: Range) -> list[int]:
    """Return what lies at the ends of ranges, and what no range holds."""
    near = {end + step for start, length in ranges for end in (start, start + length)
            for step in (-1, 0, 1)}  # fmt: skip
    return [*sorted(near), -1, -7, -(2**31)]


def fitting(values: list[int], dtype: torch.dtype) -> list[int]:
    limits = torch.iinfo(dtype)
    return [value for value in values if limits.min <= value <= limits.max]


@pytest.mark.parametrize("row_bytes", [1, 656, 8192])
@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab_range", "added_range"),
    [
        ((0, 30), (100, 11)),
        ((0, 30), (30, 11)),  # one behind the other
        ((100, 30), (3, 11)),  # and in front of it
        ((11, 30), (0, 11)),
        ((7, 20), (50, 5)),  # rows to spare
        ((7, 0), (3, 9)),  # one range only, around the start of no range
        ((7, 9), (10, 0)),
        ((7, 0), (7, 0)),
        ((0, 20), (2**31 - 9, 9)),
        ((0, 0), None),
        ((7, 20), None),
        ((LAST, 20), (0, 5)),  # the first goes on behind the last index
        ((0, 20), (LAST, 5)),
        ((LAST - 20, 20), (LAST, 5)),
        ((2**31 - 4, 20), (2**31 + 16, 20)),
        ((2**31 - 1, 1), (0, 1)),
        *(((start, ROWS), None) for start in (0, 20, 2**31 - ROWS, 2**40, 2**63 - ROWS, LAST)),
    ],
)  # fmt: skip
def test_one_range_and_two(
    device: torch.device,
    row_bytes: int,
    index_dtype: torch.dtype,
    vocab_range: Range,
    added_range: Range | None,
) -> None:
    weights = table(device, row_bytes)
    ends = around(vocab_range, added_range or vocab_range)
    lowest, highest = torch.iinfo(index_dtype).min, torch.iinfo(index_dtype).max
    extremes = [lowest, lowest + 1, lowest + ROWS, highest - ROWS, highest - 1, highest, 2**62]
    values = fitting([*ends, *extremes], index_dtype)
    indices = to_index(values, index_dtype, device)
    output = make_buffer((len(values), row_bytes), device=device, seed=1, gap=3)
    twin = output.twin()
    expected = ref_indexing(weights, indices, vocab_range, added_range)
    ranges: Any = {"vocab_range": vocab_range, "added_range": added_range}
    assert same_bits(indexing(weights, indices, **ranges), expected)
    assert indexing(weights, indices, output=output.view, **ranges) is output.view
    twin.view.copy_(expected)
    assert output.same(twin)
    jitkern.check(device)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("beyond", [0, 1, 2**31 - 1, 2**40, LAST])
@pytest.mark.parametrize("added_range", [None, (60, 4), (70, 0)])
def test_the_size_of_the_vocabulary(
    device: torch.device, index_dtype: torch.dtype, beyond: int, added_range: Range | None
) -> None:
    """Its last index is another rank's row, zeros here; the next one is a fault."""
    size, weights = 70, table(device)
    value = max(beyond, size + beyond) if beyond < 2 else beyond
    if value > torch.iinfo(index_dtype).max:
        pytest.skip("no such int32")
    ranges: Any = {"vocab_range": (7, 30), "added_range": added_range, "vocab_size": size}
    good = to_index([0, 6, 7, 36, 37, 59, 60, 63, 64, size - 1, -1, -5], index_dtype, device)
    expected = ref_indexing(weights, good, (7, 30), added_range)
    assert same_bits(indexing(weights, good, **ranges), expected)
    jitkern.check(device)
    bad = good.clone()
    bad[9] = value
    output = make_buffer((12, 40), device=device, seed=1)
    twin = output.twin()
    text = f"indexing: indices: index {value} at position 9, expected below {size}"
    with out_of_range(device, text):
        indexing(weights, bad, output=output.view, **ranges)
    if device.type == "cuda":  # that row is zeros
        twin.view.copy_(expected)
    assert output.same(twin)


def test_no_indices_no_rows_no_vocabulary(device: torch.device) -> None:
    empty: Any = {"vocab_range": (0, 0), "added_range": (0, 0), "vocab_size": 0}
    weights = table(device, rows=0)
    assert indexing(weights, to_index([-1, -9], torch.int32, device), **empty).eq(0).all()
    assert indexing(weights, to_index([], torch.int64, device), **empty).shape == (0, 40)
    with out_of_range(device, "index 0 at position 1, expected below 0"):
        indexing(weights, to_index([-1, 0], torch.int64, device), **empty)


@pytest.mark.parametrize("count", [65, 70_000])
def test_table_in_host_memory(device: torch.device, count: int) -> None:
    weights = host_buffer((ROWS, 5), torch.float32, device).view
    indices = torch.arange(count, device=device) * 7 % 80 - 3
    ranges: Any = {"vocab_range": (30, 20), "added_range": (5, 21), "vocab_size": 77}
    expected = ref_indexing(weights, indices.cpu(), (30, 20), (5, 21))
    assert same_bits(indexing(weights, indices, **ranges), expected)
    jitkern.check(device)
    with out_of_range(device, f"index 76 at position {count - 9}, expected below 76"):
        indices.fill_(-1)[count - 9] = 76
        indexing(weights, indices, **{**ranges, "vocab_size": 76})
