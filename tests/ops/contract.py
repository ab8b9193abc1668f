"""What an op on tables of rows gives test_contract.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from buffers import Buffer, distinct, make_buffer
from ref import as_integers
from torch import Tensor


def views(buffers: Sequence[Buffer]) -> list[Tensor]:
    return [buffer.view for buffer in buffers]


class Case:
    """An op on tables of rows, as test_contract.py calls it: `CASES` in the op's own tests."""

    function: Callable[..., Any]
    argument: str  # its indices
    rows: tuple[int, ...]  # numbers of rows
    tables: tuple[int | None, ...]  # in order: which number of rows each has, or one for each index
    columns: tuple[int, ...]  # for each column of the indices: which number of rows it is below
    distinct_columns: tuple[int, ...] = ()
    on_host: tuple[int, ...] = ()  # tables in host memory, pinned for a GPU
    indices_on_host = False  # whatever the device of the tables
    count = 23  # number of indices
    ways: tuple[dict[str, Any], ...] = ({},)  # keyword arguments, each of which changes no result
    takes_num_sms = False
    line_gap = 0  # bytes between host rows, where their places in lines matter
    large: tuple[tuple[int, ...], int, int] | None = None  # rows, indices, bytes of a row

    def call(self, tables: Sequence[Tensor], indices: Tensor, **how: Any) -> None:
        assert self.function(*tables, indices, **how) is None

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        raise NotImplementedError

    def check_more(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        """Check after a right call what only this op has."""

    def run_and_compare(self, buffers: Sequence[Buffer], indices: Tensor, **how: Any) -> None:
        twins, before = [buffer.twin() for buffer in buffers], indices.clone()
        self.call(views(buffers), indices, **how)
        if any(buffer.view.is_cuda for buffer in buffers):
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
        return made.squeeze(1).to(dtype).to("cpu" if self.indices_on_host else device)

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


def store_bits(target: Tensor, values: Tensor) -> None:
    """Copy without a conversion: a bool of 7 stays 7."""
    if target.numel() > 0:
        as_integers(target).copy_(as_integers(values))
