"""fast_compare_key against a loop."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from buffers import INT_DTYPES
from fuzzer import SIZES, Call, Fuzzer
from hypothesis import given
from hypothesis import strategies as st
from mistakes import Mistake, bad_indices, not_ints, not_tensors, on_cuda, read_only
from torch import Tensor

from jitkern import fast_compare_key

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
    longest = 300
    base = torch.randint(0, 150_000, (longest,), dtype=dtype)
    rows = base.repeat(longest, 1)  # a row of 300 items begins at a new alignment
    for place in range(longest):
        rows[place, place] ^= 1 << (place % 31)
        if place % 2:
            rows[place, place + 1 :] = -1
    for length in range(longest + 1):
        x = base[:length]
        assert fast_compare_key(x, x.clone()) == length
        got = [fast_compare_key(x, row) for row in rows.unbind()]
        assert got == [min(place, length) for place in range(longest)]


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_any_bit_of_an_int64_is_a_difference(bit: int) -> None:
    x = torch.arange(40)
    for place in range(40):
        y = x.clone()
        y.view(torch.uint8)[8 * place + bit // 8] ^= 1 << (bit % 8)
        assert fast_compare_key(x, y) == fast_compare_key(y, x) == place


@pytest.mark.parametrize("dtype", DTYPES)
def test_starts_of_any_alignment_and_unequal_lengths(dtype: torch.dtype) -> None:
    x = torch.arange(400, dtype=dtype)
    for x_offset in range(20):
        for y_offset in range(0, 20, 3):
            y = torch.cat([torch.zeros(y_offset, dtype=dtype), x[x_offset:210]])[y_offset:]
            assert fast_compare_key(x[x_offset:], y) == 210 - x_offset
            assert fast_compare_key(y, x[x_offset:]) == 210 - x_offset
            assert fast_compare_key(x, y, start=x_offset) == 210 - x_offset


def test_a_key_of_megabytes() -> None:
    x = torch.randint(0, 150_000, (1 << 20,), dtype=torch.int32)
    y = x.clone()
    assert fast_compare_key(x, y) == 1 << 20
    for place in (1 << 20) - 1, 777_777, 131_072, 65:
        y[place] += 1
        assert fast_compare_key(x, y) == place


class GuardedPage:
    """A page between two that must not be touched: reading outside of it ends the process."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._map = mmap.mmap(-1, 3 * mmap.PAGESIZE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for page in (0, 2):
            if libc.mprotect(first + page * mmap.PAGESIZE, mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.items = torch.frombuffer(self._map, dtype=torch.int32)[
            mmap.PAGESIZE // 4 : 2 * mmap.PAGESIZE // 4
        ]


@pytest.fixture(scope="module")
def guarded() -> tuple[Tensor, Tensor]:
    """Two pages of int32 that end where memory ends; the maps live as long as the tensors."""
    first, second = GuardedPage().items, GuardedPage().items
    first.copy_(torch.arange(first.numel()))
    second.copy_(first)
    return first, second


def test_keys_that_are_rewritten_during_the_call() -> None:
    """Whatever is read, the result is within the shorter key."""
    x, y = torch.zeros(1000, dtype=torch.int32), torch.zeros(777, dtype=torch.int32)
    done = threading.Event()

    def rewrite() -> None:
        while not done.is_set():
            x.random_(0, 2)
            x.zero_()

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(300):
            assert 0 <= fast_compare_key(x, y) <= 777
    finally:
        done.set()
        writer.join()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_is_read(guarded: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    x, y = (page.view(dtype) for page in guarded)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_start_may_be_the_end_and_keys_may_be_empty(dtype: torch.dtype) -> None:
    x, empty = torch.arange(5, dtype=dtype), torch.empty(0, dtype=dtype)
    assert fast_compare_key(x, x, start=5) == 0
    assert fast_compare_key(x, empty, start=5) == 0
    assert fast_compare_key(x, empty) == 0
    assert fast_compare_key(empty, x) == 0
    assert fast_compare_key(empty, empty, page_size=16) == 0
    assert fast_compare_key(x, x, page_size=1 << 62) == 0
    assert fast_compare_key(x, x, page_size=6) == 0
    assert type(fast_compare_key(x, x)) is int


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stride_of_an_item_alone_or_of_none_is_no_matter(dtype: torch.dtype) -> None:
    x = torch.arange(8, dtype=dtype)
    assert fast_compare_key(x[::8], x) == fast_compare_key(x, x[::8]) == 1
    assert fast_compare_key(x[:0:2], x) == fast_compare_key(x, x[:0:2]) == 0


X = torch.arange(8)


# -- for the tests that go over all ops ------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    return {"x": torch.arange(9), "y": torch.arange(5), "start": 0, "page_size": 1}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table: list[Mistake] = []
    spread = "expected a contiguous tensor; call .contiguous()"
    for argument, length in (("x", 9), ("y", 5)):
        table += not_tensors(good, argument) + bad_indices(argument, good[argument])
        table += [
            ({argument: on_cuda(good[argument])}, ValueError,
             f"{argument}: device cuda:0, expected cpu"),
            ({argument: torch.tensor(3)}, ValueError,
             f"{argument}: shape [], expected 1 dimension"),
            ({argument: torch.zeros(3, 2, dtype=torch.int64)}, ValueError,
             f"{argument}: shape [3, 2], expected 1 dimension"),
            ({argument: X[3:4].expand(length)}, ValueError,
             f"{argument}: not contiguous (stride 0 in dimension 0 of shape [{length}]), {spread}"),
        ]  # fmt: skip
    table += not_ints("start", "page_size") + read_only(good, "x", "y")
    table += [
        ({"y": torch.arange(5, dtype=torch.int32)}, TypeError,
         "y: dtype int32, expected int64 as in x"),
        ({"x": X.int()}, TypeError, "y: dtype int64, expected int32 as in x"),
        ({"x": X[:0], "start": 1}, ValueError, "start: 1, expected 0 to 0, the length of x"),
        *(({"start": start}, ValueError, f"start: {start}, expected 0 to 9, the length of x")
          for start in (-1, 10, 2**63 - 1, -(2**63))),
        *(({"page_size": size}, ValueError, f"page_size: {size}, expected at least 1")
          for size in (0, -4, -(2**63))),
    ]  # fmt: skip
    return table


def fuzz(f: Fuzzer) -> Call:
    dtype = f.rng.choice(INT_DTYPES)
    x, y = (
        torch.randint(0, 2, (f.rng.choice([*SIZES, 100]),), generator=f.generator) for _ in "xy"
    )
    start, page_size = f.rng.randint(0, len(x)), f.rng.choice([1, 1, 2, 16])
    length = min(len(x) - start, len(y))
    differ = (x[start : start + length] != y[:length]).nonzero().flatten().tolist()
    common = differ[0] if differ else length

    def prove(result: Any) -> None:
        assert result == common // page_size * page_size

    return Call(
        fast_compare_key,
        {"x": x.to(dtype), "y": y.to(dtype), "start": start, "page_size": page_size},
        prove,
    )
