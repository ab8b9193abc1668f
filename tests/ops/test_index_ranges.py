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


@pytest.mark.parametrize("row_bytes", [1, 5, 656, 1024, 8192])
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
        *(((start, ROWS), None) for start in (0, 20, 1000, 2**40)),
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
    values = fitting([*ends, 2**31 - 1, 2**62], index_dtype)
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
@pytest.mark.parametrize(
    ("vocab_range", "added_range"),
    [
        ((LAST, 20), (0, 5)),  # the first goes on behind the last index
        ((0, 20), (LAST, 5)),
        ((LAST - 20, 20), (LAST, 5)),
        ((LAST - 4, 20), (0, 5)),
        ((2**31 - 4, 20), (2**31 + 16, 20)),
        ((2**31 - 1, 1), (0, 1)),
        *(((start, ROWS), None)
          for start in (0, 5, 2**31 - ROWS, 2**31 - 1, 2**63 - ROWS, LAST)),
    ],
)  # fmt: skip
def test_ranges_with_the_extremes_of_both_types(
    device: torch.device, index_dtype: torch.dtype, vocab_range: Range, added_range: Range | None
) -> None:
    weights = table(device)
    lowest, highest = torch.iinfo(index_dtype).min, torch.iinfo(index_dtype).max
    values = [lowest, lowest + 1, lowest + ROWS, -1, 0, 4, 5]
    values += [highest - ROWS, highest - 20, highest - 1, highest]
    indices = to_index(values, index_dtype, device)
    ranges: Any = {"vocab_range": vocab_range, "added_range": added_range}
    expected = ref_indexing(weights, indices, vocab_range, added_range)
    assert same_bits(indexing(weights, indices, **ranges), expected)
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


def test_the_largest_size(device: torch.device) -> None:
    """Of int64 one index is left to be a fault."""
    weights = table(device)
    indices = torch.tensor([LAST - 1, LAST - 41, -1], device=device)
    ranges: Any = {"vocab_range": (LAST - 41, 41), "vocab_size": LAST}
    assert same_bits(indexing(weights, indices, **ranges),
                     ref_indexing(weights, indices, (LAST - 41, 41)))  # fmt: skip
    with out_of_range(device, f"index {LAST} at position 0, expected below {LAST}"):
        indexing(weights, indices[:1] + 1, **ranges)


def test_no_indices_no_rows_no_vocabulary(device: torch.device) -> None:
    empty: Any = {"vocab_range": (0, 0), "added_range": (0, 0), "vocab_size": 0}
    weights = table(device, rows=0)
    assert indexing(weights, to_index([-1, -9], torch.int32, device), **empty).eq(0).all()
    assert indexing(weights, to_index([], torch.int64, device), **empty).shape == (0, 40)
    with out_of_range(device, "index 0 at position 1, expected below 0"):
        indexing(weights, to_index([-1, 0], torch.int64, device), **empty)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_with_added_tokens_add_up_to_the_whole(device: torch.device, ranks: int) -> None:
    size, added = 30, 7
    whole = make_buffer((size + added, 24), torch.int32, device).view
    indices = torch.arange(-2, size + added, device=device)
    total = torch.zeros(len(indices), 24, dtype=torch.int32, device=device)
    for rank in range(ranks):
        first = (start := size * rank // ranks, size * (rank + 1) // ranks - start)
        second = (size + (start := added * rank // ranks), added * (rank + 1) // ranks - start)
        part = torch.cat([whole[start : start + length] for start, length in (first, second)])
        total += indexing(
            part, indices, vocab_range=first, added_range=second, vocab_size=size + added
        )
    assert torch.equal(total, ref_indexing(whole, indices))


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


@pytest.mark.parametrize("start", [0, 12, LAST])
def test_the_gradient(device: torch.device, start: int) -> None:
    """Also of the lowest index, which is as far from a range's end as numbers go."""
    indices = torch.tensor([start, 3, 3, 9, 5, 11, -1, -(2**63), 15], device=device)
    ranges: Any = {"vocab_range": (start, 3), "added_range": (3, 4)}
    weights = torch.randn(9, 2, dtype=torch.float64, device=device, requires_grad=True)
    rows = indexing(weights, indices, **ranges)
    factor = torch.randn_like(rows)
    (gradient,) = torch.autograd.grad((rows * factor).sum(), weights)
    one_hot = ref_indexing(
        torch.eye(9, dtype=torch.float64, device=device), indices, *ranges.values()
    )
    assert torch.equal(rows, one_hot @ weights)
    torch.testing.assert_close(gradient, one_hot.T @ factor)


def test_gradcheck(device: torch.device) -> None:
    indices = torch.tensor([3, -1, 29, 3, 5, 21], device=device)

    def lookup(weights: Tensor) -> Tensor:
        ranges: Any = {"vocab_range": (3, 4), "added_range": (20, 5), "vocab_size": 40}
        return indexing(weights * 2, indices, **ranges)

    weights = torch.randn(12, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lookup, weights, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda w: lookup(w) ** 3, weights)


WRONG = [
    ({"added_range": (3,), "vocab_range": (0, 1)}, TypeError,
     "added_range: (3,), expected (start, length)"),
    ({"added_range": (0, 1)}, ValueError, "added_range: given without vocab_range, expected both"),
    ({"vocab_size": 9}, ValueError, "vocab_size: given without vocab_range, expected both"),
    ({"added_range": (4, 1), "vocab_range": (0, 5)}, ValueError,
     "added_range: (4, 1), expected no index of vocab_range (0, 5)"),
    ({"vocab_size": 3, "vocab_range": (0, 5)}, ValueError,
     "vocab_size: 3, expected at least 5, the end of vocab_range"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "text"), WRONG)
@pytest.mark.parametrize("how", ["plain", "gradient", "compiled"])
def test_an_error_is_the_same_everywhere(
    given: dict[str, Any], kind: type[Exception], text: str, how: str
) -> None:
    weights = torch.zeros(ROWS, 4, requires_grad=how == "gradient")
    indices = torch.tensor([1])

    def call() -> object:
        return indexing(weights, indices, **given)

    torch.compiler.reset()
    run = torch.compile(call, backend="eager") if how == "compiled" else call
    with pytest.raises(kind) as caught:
        run()
    assert str(caught.value).startswith(f"indexing: {text}")
