"""d2h_scatter against PyTorch, with every byte around the destination accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mistakes import Mistake, good_pair_arguments, not_words, pair_mistakes
from stems import OpCheck, Rows
from test_h2d_gather import DST_ROWS, SRC_ROWS, Gather
from torch import Tensor

from jitkern import d2h_scatter, h2d_gather


@pytest.mark.parametrize("order", ["given", "sorted"])
def test_gathered_rows_go_back_to_their_places(device: torch.device, order: Any) -> None:
    """What test_contract.py compares with a reference, here without one."""
    on_gpu = device.type == "cuda"
    pool = torch.randint(256, (41, 656), dtype=torch.uint8, pin_memory=on_gpu)
    back = torch.zeros(41, 656, dtype=torch.uint8, pin_memory=on_gpu)
    slots = torch.empty(41, 656, dtype=torch.uint8, device=device)
    pairs = torch.stack([torch.randperm(41), torch.randperm(41)], dim=1).to(device)
    h2d_gather(pool, slots, pairs)
    d2h_scatter(slots, back, pairs.flip(1), order=order)
    if on_gpu:
        torch.cuda.synchronize()
    assert torch.equal(back, pool)


class Scatter(Gather):
    function = staticmethod(d2h_scatter)
    rows, on_host = (DST_ROWS, SRC_ROWS), (1,)


class ScatterOfHostPairs(Scatter):
    indices_on_host = True
    ways = tuple({"method": method} for method in ("auto", "sm"))
    takes_num_sms = False


CASES = [Scatter(), ScatterOfHostPairs()]


def good_arguments() -> dict[str, Any]:
    return good_pair_arguments()


def mistakes() -> list[Mistake]:
    words = not_words("method", "'auto' or 'sm'", "both", "cpu", optional=True)
    return pair_mistakes(good_arguments(), "dst") + words


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    if where.is_cuda:
        return  # opcheck clones all arguments, and the clone of a pinned one is pageable
    pairs = torch.stack([where, where.flip(0)], dim=1)
    yield "default", (rows(slots), rows(slots), pairs), {}
    yield "default", (rows(slots), rows(slots), pairs), {"num_sms": 1, "method": "sm"}
