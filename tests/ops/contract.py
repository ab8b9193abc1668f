"""What an op on tables of rows gives test_contract.py; what hypothesis makes calls of.

`--hypothesis-profile thorough` runs 2,000 random examples of each test instead of 200 fixed ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from buffers import Buffer, distinct, make_buffer, raised_by
from fuzzer import NUM_CORES
from hypothesis import strategies as st
from torch import Tensor


def views(buffers: Sequence[Buffer]) -> list[Tensor]:
    return [buffer.view for buffer in buffers]


class Case:
    """An op on tables of rows, as test_contract.py calls it: `CASES` in the op's own tests."""

    function: Callable[..., Any]
    argument: str  # its indices
    rows: tuple[int, ...]  # numbers of rows
    tables: tuple[int | None, ...]  # in order: which number of rows each has, or one for each index
    columns: tuple[int, ...]  # of the indices: the number of rows that each is below
    distinct_columns: tuple[int, ...] = ()
    on_host: tuple[int, ...] = ()  # tables in host memory, pinned for a GPU
    count = 23  # of indices
    ways: tuple[dict[str, Any], ...] = ({},)  # keyword arguments, each of which changes no result
    takes_num_sms = False
    line_gap = 0  # bytes between host rows, where their places in lines matter
    large: tuple[tuple[int, ...], int, int] | None = None  # rows, indices, bytes of a row

    def call(self, tables: Sequence[Tensor], indices: Tensor, **how: Any) -> None:
        raise NotImplementedError

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        raise NotImplementedError

    def check_more(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        """Check after a right call what only this op has."""

    def run_and_compare(self, buffers: Sequence[Buffer], indices: Tensor, **how: Any) -> None:
        twins, before = [buffer.twin() for buffer in buffers], indices.clone()
        self.call(views(buffers), indices, **how)
        if indices.is_cuda:
            torch.cuda.synchronize()
        self.reference(views(twins), indices)
        assert all(map(Buffer.same, buffers, twins))
        assert torch.equal(indices, before)
        self.check_more(views(buffers), indices)

    def indices(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.int64,
        rows: Sequence[int] | None = None,
        count: int | None = None,
    ) -> Tensor:
        """Return indices with repeats where an op reads, and padding of each kind; 13 is good."""
        rows, count = rows or self.rows, count or self.count
        bounds = [rows[i] for i in self.columns]
        generator = torch.Generator().manual_seed(count)
        made = torch.empty(count, len(bounds), dtype=torch.int64)
        for column, bound in enumerate(bounds):
            if column in self.distinct_columns:
                made[:, column] = torch.tensor(distinct(count, bound, seed=column))
            else:
                made[:, column] = torch.randint(0, bound, (count,), generator=generator)
                made[:2, column] = torch.tensor([bound - 1, 0])
                made[5:7, column] = made[7, column]
        made[2, 0] = made[9, -1] = made[16::11, 0] = -1
        made[10] = -(2**31)
        if len(bounds) > 1:
            made[11, 0], made[11, -1] = bounds[0] + 5, -1  # padding counts before the bound
        return made.squeeze(1).to(dtype).to(device)

    def buffers(
        self,
        device: torch.device,
        row: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        *,
        rows: Sequence[int] | None = None,
        count: int | None = None,
        gaps: tuple[int, int] = (0, 0),
        offsets: Sequence[int] | None = None,
    ) -> list[Buffer]:
        """Make the tables; the first half of them has rows `gaps[0]` apart, the others `gaps[1]`.

        A table of one row for each index has `count` rows.
        """
        made = []
        for i, which in enumerate(self.tables):
            on_host = i in self.on_host
            number = (count or self.count) if which is None else (rows or self.rows)[which]
            where = {"pinned": device.type == "cuda"} if on_host else {"device": device}
            gap, offset = gaps[2 * i // len(self.tables)], offsets[i] if offsets else 0
            made.append(
                make_buffer((number, *row), dtype, gap=gap, offset=offset, seed=i + 1, **where)
            )
        return made


# Few enough that a GPU compiles all of them in seconds, each with up to five vector widths.
ROW_BYTES = [1, 6, 16, 40, 656, 657, 1024]
DTYPES = {
    1: [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
    2: [torch.bfloat16, torch.float16, torch.int16],
    4: [torch.float32, torch.int32],
    8: [torch.int64, torch.complex64],
}


@dataclass(frozen=True)
class Row:
    dtype: torch.dtype
    shape: tuple[int, ...]


@st.composite
def row_types(draw: st.DrawFn) -> Row:
    row_bytes = draw(st.sampled_from(ROW_BYTES))
    dtype = draw(st.sampled_from([t for n in DTYPES if row_bytes % n == 0 for t in DTYPES[n]]))
    items = row_bytes // dtype.itemsize
    inner = draw(st.sampled_from([n for n in (1, 2, 4, items) if items % n == 0]))
    return Row(dtype, draw(st.sampled_from([(items,), (items // inner, inner)])))


gaps = st.sampled_from([0, 0, 1, 2, 16])
offsets = st.sampled_from([0, 0, 1, 2, 4])
seeds = st.integers(0, 2**31)
counts = st.integers(0, 40)
index_dtypes = st.sampled_from([torch.int32, torch.int64])


@dataclass(frozen=True)
class Way:
    """How the rows of a call on pairs travel."""

    pairs_on: torch.device
    pinned: bool  # the host's rows
    options: dict[str, Any]


@st.composite
def ways(draw: st.DrawFn, device: torch.device, methods: list[str]) -> Way:
    """Draw one that is right for rows on `device`."""
    pairs_on = draw(st.sampled_from([device, torch.device("cpu")]))
    method = draw(st.sampled_from(["auto", "sm"] if pairs_on.type == "cuda" else methods))
    options = {"method": method, "num_threads": draw(st.sampled_from([None, 1, NUM_CORES]))}
    may_be_pageable = pairs_on.type == "cpu" and method in ("auto", "cpu")
    pinned = device.type == "cuda" and not (may_be_pageable and draw(st.booleans()))
    return Way(pairs_on, pinned, options)


@st.composite
def row_numbers(draw: st.DrawFn, count: int, bound: int, dtype: torch.dtype) -> list[int]:
    """Draw indices: mostly good ones, in some calls padding, in a few one that is too large."""
    good = st.integers(0, bound - 1) if bound > 0 else st.just(-1)
    some_padding = draw(st.booleans())
    value = st.one_of(good, good, st.integers(-3, -1)) if some_padding else good
    values = draw(st.lists(value, min_size=count, max_size=count))
    if count > 0 and draw(st.integers(0, 7)) == 0:
        highest = torch.iinfo(dtype).max
        extremes = st.sampled_from([bound, bound + 1, highest, highest - 1, torch.iinfo(dtype).min])
        values[draw(st.integers(0, count - 1))] = draw(extremes)
    return values


def bad_position(values: list[int], bound: int) -> int | None:
    return next((i for i, value in enumerate(values) if value >= bound), None)


def check_call(
    call: Callable[[], object],
    reference: Callable[[], object],
    fault: str | None,
    device: torch.device,
    written: list[tuple[Buffer, Buffer]],
    *,
    indices_on: torch.device | None = None,
) -> Exception | None:
    """Call, then compare every byte: of indices on the CPU a fault means that nothing was written.

    They are on `device` unless `indices_on` is given.

    Returns what was raised, which is of the right kind and text.
    """
    error = raised_by(call, device)
    if fault is None:
        assert error is None
    else:
        assert isinstance(error, IndexError)
        assert re.match(fault, str(error)), str(error)
    if fault is None or (indices_on or device).type == "cuda":
        reference()
    for buffer, twin in written:
        assert buffer.same(twin)
    return error


def rows_by_slot(rows: Buffer, values: list[int]) -> None:
    """Make rows that go to one slot equal, as any of them may win."""
    first: dict[int, int] = {}
    for i, value in enumerate(values):
        j = first.setdefault(value, i)
        if j != i:
            store_bits(rows.view[i], rows.view[j])


def store_bits(target: Tensor, values: Tensor) -> None:
    """Copy without a conversion: a bool of 7 stays 7."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = integers.get(target.dtype.itemsize, target.dtype)
    if target.numel() > 0:
        target.view(width).copy_(values.view(width))
