"""d2h_scatter against PyTorch, with every byte around the destination accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from contract import Case
from mistakes import Mistake, good_pair_arguments, not_words, pair_mistakes
from ref import ref_h2d_gather as ref_copy_pairs
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import d2h_scatter

SRC_ROWS = 29
DST_ROWS = 43


class Scatter(Case):
    function, argument = staticmethod(d2h_scatter), "pairs"
    rows, tables, columns, distinct_columns = (SRC_ROWS, DST_ROWS), (0, 1), (0, 1), (1,)
    on_host = (1,)
    ways = ({}, {"order": "host"})
    takes_num_sms = True
    large = (20_011, 20_000), 19_999, 656

    def call(self, tables: Sequence[Tensor], indices: Tensor, **how: Any) -> None:
        assert d2h_scatter(*tables, indices, **how) is None

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        ref_copy_pairs(*tables, indices)


class ScatterOfHostPairs(Scatter):
    indices_on_host = True
    ways = tuple({"method": method} for method in ("auto", "sm"))
    takes_num_sms = False


CASES = [Scatter(), ScatterOfHostPairs()]


def good_arguments() -> dict[str, Any]:
    return good_pair_arguments()


def mistakes() -> list[Mistake]:
    words = not_words("method", '"auto" or "sm"', "both", "cpu", optional=True)
    return pair_mistakes(good_arguments(), "dst") + words


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    if where.is_cuda:
        return  # opcheck clones all arguments, and the clone of a pinned one is pageable
    pairs = torch.stack([where, where.flip(0)], dim=1)
    yield "default", (rows(slots), rows(slots), pairs), {}
    yield "default", (rows(slots), rows(slots), pairs), {"num_sms": 1, "method": "sm"}
