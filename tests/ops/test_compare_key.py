"""fast_compare_key against a loop."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mistakes import COPY_FOR_READS, Mistake, bad_indices, not_ints, on_cuda, unreadable
from torch import Tensor

from jitkern import fast_compare_key
from jitkern.args import type_text

DTYPES = (torch.int32, torch.int64)


def ref_compare(x: Sequence[int], y: Sequence[int], start: int = 0, page_size: int = 1) -> int:
    length = 0
    for a, b in zip(x[start:], y, strict=False):
        if a != b:
            break
        length += 1
    return length // page_size * page_size


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_and_every_place_of_the_first_difference(dtype: torch.dtype) -> None:
    """The difference is any bit of an item."""
    longest, bits = 300, 8 * dtype.itemsize
    base = torch.randint(0, 150_000, (longest,), dtype=dtype)
    rows = base.repeat(longest, 1)  # a row of 300 items begins at a new alignment
    for place in range(longest):
        rows[place].view(torch.uint8)[dtype.itemsize * place + place % bits // 8] ^= 1 << place % 8
        if place % 2:
            rows[place, place + 1 :] = -1
    for length in range(longest + 1):
        x = base[:length]
        assert fast_compare_key(x, x.clone()) == length
        got = [fast_compare_key(x, row) for row in rows.unbind()]
        assert got == [min(place, length) for place in range(longest)]


def guarded_page() -> Tensor:
    """Return a page of int32 between two pages that end the process if they are read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for page in (0, 2):
        assert libc.mprotect(first + page * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    items = torch.frombuffer(pages, dtype=torch.int32).view(3, -1)[1]  # keeps `pages` alive
    return items.copy_(torch.arange(items.numel()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_is_read(dtype: torch.dtype) -> None:
    x, y = guarded_page().view(dtype), guarded_page().view(dtype)
    for length in [*range(1, 140), x.numel()]:
        assert fast_compare_key(x[-length:], y[-length:]) == length
        assert fast_compare_key(x[:length], y[:length]) == length
        assert fast_compare_key(x[-length:], torch.cat([y[-length:], y])) == length


@given(st.data())
def test_agrees_with_a_loop(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 2), max_size=80)
    shared = data.draw(tokens)
    x = data.draw(tokens) + shared + data.draw(tokens)
    y = shared + data.draw(tokens)
    start = data.draw(st.integers(0, len(x)))
    page_size = data.draw(st.integers(1, 20))
    dtype = data.draw(st.sampled_from(DTYPES))
    expected = ref_compare(x, y, start, page_size)
    tensors = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)
    assert fast_compare_key(*tensors, start=start, page_size=page_size) == expected


def test_a_read_only_key() -> None:
    key = torch.arange(5).numpy().copy()
    key.flags.writeable = False
    assert fast_compare_key(key, torch.arange(9)) == fast_compare_key(torch.arange(9), key) == 5


def good_arguments() -> dict[str, Any]:
    return {"x": torch.arange(9), "y": torch.arange(5), "start": 0, "page_size": 1}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table: list[Mistake] = []
    spread = f"expected a contiguous tensor{COPY_FOR_READS}"
    for argument, length in (("x", 9), ("y", 5)):
        table += bad_indices(argument, good[argument]) + unreadable(argument, good[argument])
        for value in (None, 7, 2**70, 1.5, "cache", [1, 2], (1, 2), array("q", [1, 2]), {}, len):
            text = f"{argument}: {type_text(value)}, expected a tensor"
            table.append(({argument: value}, TypeError, text))
        table += [
            ({argument: on_cuda(good[argument])}, ValueError,
             f"{argument}: device cuda:0, expected cpu"),
            ({argument: torch.tensor(3)}, ValueError,
             f"{argument}: shape [], expected 1 dimension"),
            ({argument: torch.zeros(3, 2, dtype=torch.int64)}, ValueError,
             f"{argument}: shape [3, 2], expected 1 dimension"),
            ({argument: torch.arange(1).expand(length)}, ValueError,
             f"{argument}: not contiguous (stride 0 in dimension 0 of shape [{length}]), {spread}"),
        ]  # fmt: skip
    table += not_ints("start", "page_size")
    table += [
        ({"y": torch.arange(5, dtype=torch.int32)}, TypeError,
         "y: dtype int32, expected int64 as in x"),
        ({"x": torch.arange(8).int()}, TypeError, "y: dtype int64, expected int32 as in x"),
        ({"x": good["x"][:0], "start": 1}, ValueError,
         "start: 1, expected 0 to 0, the length of x"),
        *(({"start": start}, ValueError, f"start: {start}, expected 0 to 9, the length of x")
          for start in (-1, 10, 2**63 - 1, -(2**63))),
        *(({"page_size": size}, ValueError, f"page_size: {size}, expected at least 1")
          for size in (0, -4, -(2**63))),
    ]  # fmt: skip
    return table
