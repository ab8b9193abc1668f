"""Wrong arguments of ``ResidencyMap``, each with the text of its error. On the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.mistakes import Mistake, apart_text, bad_indices, not_tensors, on_cuda, overlap_text, zeros
from ref import refusals
from torch import Tensor

from jitkern import BlockBuffers
from jitkern.offload import MissPlan, ResidencyMap


def longs_of(*values: int) -> Tensor:
    return torch.tensor(values)


PINNED = {"states": longs_of(0, 1), "rows": longs_of(1, 2), "slots": longs_of(7, 7)}


def pin(**arguments: Any) -> None:
    ResidencyMap(2, 8, 20, device="cpu", num_pinned=1).pin(**arguments)


pin.__name__ = "ResidencyMap.pin"
test_mistakes_of_pin = refusals(
    pin,
    PINNED,
    *(({name: [0, 1]}, TypeError, f"{name}: list, expected a tensor") for name in PINNED),
    ({"rows": longs_of(1, 2).float()}, TypeError, "rows: dtype torch.float32, expected torch.int"),
    ({"rows": longs_of(1)}, ValueError, "rows: shape [1], expected [2], as states"),
    ({"states": longs_of(0, 1).view(1, 2)}, ValueError, "states: shape [1, 2], expected [n]"),
    ({"states": longs_of(0, 2)}, IndexError, "states: index 2 at position 1, expected below 2"),
    ({"rows": longs_of(20, 0)}, IndexError, "rows: index 20 at position 0, expected below 20"),
    (
        {"slots": longs_of(7, 8)},
        IndexError,
        "slots: index 8 at position 1, expected a pinned slot, 7 to 7",
    ),
    (
        {"slots": longs_of(6, 7)},
        IndexError,
        "slots: index 6 at position 0, expected a pinned slot, 7 to 7",
    ),
)
test_mistakes_of_a_map = refusals(
    ResidencyMap,
    {"num_states": 2, "num_slots": 8, "num_rows": 20, "device": "cpu"},
    ({"num_states": 0}, ValueError, "num_states: 0, expected 1 to 2147483647"),
    ({"num_slots": 2**20 + 1}, ValueError, "num_slots: 1048577, expected 1 to 1048576"),
    ({"num_slots": 8.0}, TypeError, "num_slots: float, expected an int"),
    ({"num_rows": 2**31 - 1}, ValueError, "num_rows: 2147483647, expected 1 to 2147483646"),
    ({"num_pinned": 9}, ValueError, "num_pinned: 9, expected 0 to 8"),
    ({"num_pinned": True}, TypeError, "num_pinned: bool, expected an int"),
    ({"device": "meta"}, ValueError, "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
)


def swap_in(**arguments: Any) -> None:
    ResidencyMap(2, 8, 20, device="cpu").swap_in(**arguments)


def resolve(**arguments: Any) -> None:
    ResidencyMap(2, 8, 20, device="cpu").resolve(**arguments)


swap_in.__name__, resolve.__name__ = "ResidencyMap.swap_in", "ResidencyMap.resolve"


def longs(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


LISTS = {
    "rows": torch.tensor([[1, 2, 3], [4, 5, -1]]), "slots_out": longs(2, 3),
    "states": torch.tensor([1, 0]), "count": torch.tensor([2]), "pages": longs(2, 4),
}  # fmt: skip
SIDES = {"host": zeros(20, 8), "cache": zeros(16, 8)}
MEMORY, PLAN = longs(200), MissPlan.like(LISTS["rows"])
SHARED = MEMORY[1:7].view(2, 3)
LIST_MISTAKES: list[Mistake] = [
    *not_tensors(LISTS, "rows", "slots_out"),
    *not_tensors(LISTS, "states", optional="states"),
    *not_tensors(LISTS, "count", optional="count"),
    *not_tensors(LISTS, "pages", optional="pages"),
    *(case for name in LISTS if name != "count" for case in bad_indices(name, LISTS[name])),
    ({"count": longs(2)}, ValueError, "count: shape [2], expected 1 element"),
    ({"rows": longs(3)}, ValueError, "rows: shape [3], expected [num_lists, length]"),
    ({"rows": longs(2, 8193)}, ValueError,
     "rows: shape [2, 8193], expected lists of at most 8192 rows"),
    ({"rows": longs(3, 3), "slots_out": longs(3, 3), "states": None}, ValueError,
     "rows: shape [3, 3], expected at most 2 lists, one for each state"),
    *(({"slots_out": longs(*shape)}, ValueError,
       f"slots_out: shape {list(shape)}, expected [2, 3], as rows")
      for shape in ((2, 4), (6,), (2, 3, 1))),
    ({"slots_out": longs(2, 3).int()}, TypeError,
     "slots_out: dtype int32, expected int64 as in rows"),
    ({"states": longs(3)}, ValueError, "states: shape [3], expected [2], as rows"),
    ({"plan": (PLAN.pairs, PLAN.counts)}, TypeError, "plan: tuple, expected a MissPlan or None"),
    ({"plan": replace(PLAN, pairs=PLAN.pairs.int())}, TypeError,
     "plan.pairs: dtype int32, expected int64 as in rows"),
    ({"plan": replace(PLAN, pairs=longs(2, 3))}, ValueError,
     "plan.pairs: shape [2, 3], expected [2, 3, 2], as rows"),
    *(({"plan": replace(PLAN, counts=counts)}, ValueError,
       f"plan.counts: shape {list(counts.shape)}, expected [2], int32")
      for counts in (longs(2), longs(3).int())),
    *(({name: on_cuda(LISTS[name])}, ValueError, f"{name}: device cuda:0, expected cpu")
      for name in ("slots_out", "states", "count", "pages")),
    *(({"pages": longs(*shape)}, ValueError, f"pages: shape {list(shape)}, expected [2, num_pages],"
       " where num_pages divides the 20 rows of a state")
      for shape in ((3, 4), (8,), (2, 3), (2, 0), (2, 2, 2))),
    ({"rows": on_cuda(LISTS["rows"]), "count": None}, ValueError,
     "rows: device cuda:0, expected cpu, as the map"),
    ({"plan": replace(PLAN, pairs=MEMORY[4:16].view(2, 3, 2)), "slots_out": SHARED}, ValueError,
     overlap_text("plan.pairs", "slots_out")),
    *(({name: place, "slots_out": SHARED}, ValueError, overlap_text(name, "slots_out"))
      for name, place in (("rows", MEMORY[5:11].view(2, 3)), ("states", MEMORY[:2]),
                          ("count", MEMORY[3]), ("pages", MEMORY[6:14].view(2, 4)))),
]  # fmt: skip
SIDE_MISTAKES: list[Mistake] = [
    *not_tensors(SIDES, "host", "cache"),
    *(({name: [side]}, TypeError, f"{name}: list or tuple, expected a tensor, or "
       "BlockBuffers(list) for a list of tensors") for name, side in SIDES.items()),
    ({"cache": on_cuda(SIDES["cache"])}, ValueError,
     "cache: device cuda:0, expected cpu, as the map"),
    ({"host": on_cuda(SIDES["host"])}, ValueError, "host: device cuda:0, expected host memory"),
    ({"cache": zeros(15, 8)}, ValueError, "cache: 15 rows, expected 16, the slots of all states"),
    ({"host": zeros(19, 8), "pages": None}, ValueError,
     "host: 19 rows, expected the 20 of the map, or pages="),
    ({"host": zeros(21, 8), "pages": None}, ValueError,
     "host: 21 rows, expected the 20 of the map, or pages="),
    ({"host": zeros(20, 7)}, ValueError, "host: rows of 28 bytes, expected 32 as in cache"),
    ({"host": zeros(20, 8).int()}, TypeError, "cache: dtype float32, expected int32 as in host"),
    ({"cache": zeros(1, 8).expand(16, 8)}, ValueError, apart_text("cache", 0, [16, 8])),
    ({"cache": MEMORY[:128].view(16, 8), "host": longs(20, 8), "slots_out": SHARED}, ValueError,
     overlap_text("slots_out", "cache")),
    ({"host": MEMORY[:80].view(20, 4), "cache": MEMORY[40:104].view(16, 4)}, ValueError,
     overlap_text("cache", "host")),
]  # fmt: skip
test_mistakes_of_resolve = refusals(
    resolve,
    {**LISTS, "plan": PLAN},
    ({"plan": None}, TypeError, "plan: None, expected a MissPlan"),
    *LIST_MISTAKES,
)
test_mistakes_of_swap_in = refusals(
    swap_in, {**SIDES, **LISTS}, *LIST_MISTAKES[::7], *SIDE_MISTAKES
)


def test_mistakes_of_lists() -> None:
    host, cache = SIDES.values()
    for wrong, text in (
        ({"host": BlockBuffers([host] * 2)}, "host: 2 buffers, expected 1 as in cache"),
        ({"cache": BlockBuffers([cache] * 2), "host": BlockBuffers([host] * 2)},
         "cache: buffer 1, which overlaps buffer 0, expected memory of its own"),
        ({"cache": BlockBuffers([zeros(16, 2, 16)[:, :, :4]])},
         "cache: blocks of several pieces, expected contiguous blocks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^ResidencyMap.swap_in: {re.escape(text)}"):
            swap_in(**{**SIDES, **LISTS, **wrong})
