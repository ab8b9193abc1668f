"""Which rows of a table a rank holds."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

# What whole pages may cost: a rank's memory is at most twice what its rows take, or this.
_SMALL_BYTES = 16 << 20


class Part(NamedTuple):
    """What one rank holds: ids of the vocabulary, added ones behind them, zeros behind those."""

    num_rows: int  # the same on all ranks
    vocab_range: tuple[int, int]  # (start, length)
    added_range: tuple[int, int]


def part_of(
    vocab_size: int, num_added: int, rank: int, size: int, rows_of_each: int | None = None
) -> Part:
    """Return a rank's part: the last ranks may have less than others, or none.

    With ``rows_of_each`` the ids follow one another through all ranks, so many on each, and the
    ranks' memory in a row is the table. Without, vocabulary and added ids are split by themselves.
    """
    end = vocab_size + num_added
    if rows_of_each is None:
        base, added = -(-vocab_size // size), -(-num_added // size)
        start = vocab_size + rank * added
        return Part(
            base + added,
            _clip(rank * base, (rank + 1) * base, 0, vocab_size),
            _clip(start, start + added, vocab_size, end),
        )
    first, last = rank * rows_of_each, (rank + 1) * rows_of_each
    return Part(
        rows_of_each,
        _clip(first, last, 0, vocab_size),
        _clip(first, last, vocab_size, end),
    )


def _clip(first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """Return (start, length) of what lies in both; a length of 0 has a start that is in range."""
    start = min(max(first, begin), end)
    return start, max(min(last, end) - start, 0)


def rows_in_pages(num_rows: int, size: int, row_bytes: int, page_bytes: int) -> int:
    """Return how many rows each rank holds where its memory is to be whole pages."""
    unit = page_bytes // math.gcd(page_bytes, row_bytes)
    return -(-_needed(num_rows, size) // unit) * unit


def is_wasteful(num_rows: int, size: int, row_bytes: int, page_bytes: int) -> bool:
    """Tell whether whole pages take far more than the rows: odd rows end with few of them."""
    taken_bytes = rows_in_pages(num_rows, size, row_bytes, page_bytes) * row_bytes
    return taken_bytes > max(2 * _needed(num_rows, size) * row_bytes, _SMALL_BYTES)


def next_hidden_size(
    num_rows: int, size: int, hidden_size: int, item_bytes: int, page_bytes: int
) -> int:
    """Return the next larger row that is not wasteful. A power of two never is."""
    more = itertools.count(hidden_size + 1)
    fits = (one for one in more if not is_wasteful(num_rows, size, one * item_bytes, page_bytes))
    return next(fits)


def _needed(num_rows: int, size: int) -> int:
    return -(-num_rows // size)
