"""What may be wrong with the ranges of a call of indexing, on a table of 50 rows."""

from __future__ import annotations

import torch
from mistakes import Mistake, index_text

_EXPECTED = "expected (start, length) with start >= 0 and 0 <= length <= "
_OF_50 = f"{_EXPECTED}50, the rows of weights"
_OF_20 = f"{_EXPECTED}20, the rows of weights behind those of vocab_range"
_PART = {"vocab_range": (10, 30)}


def _no_ranges(name: str, change: dict[str, object]) -> list[Mistake]:
    pair = "expected (start, length)"
    return [
        ({**change, name: 5}, TypeError, f"{name}: 5, {pair}"),
        ({**change, name: (5,)}, TypeError, f"{name}: (5,), {pair}"),
        ({**change, name: (1, 2, 3)}, TypeError, f"{name}: (1, 2, 3), {pair}"),
        ({**change, name: (None, 5)}, TypeError, f"{name}: (None, 5), expected two ints"),
        ({**change, name: (None, None)}, TypeError, f"{name}: (None, None), expected two ints"),
        ({**change, name: (0, None)}, TypeError, f"{name}: (0, None), expected two ints"),
        ({**change, name: (0.0, 5)}, TypeError, f"{name}[0]: float, expected an int"),
        ({**change, name: (0, 5.0)}, TypeError, f"{name}[1]: float, expected an int"),
        ({**change, name: (True, 5)}, TypeError, f"{name}[0]: bool, expected an int"),
        ({**change, name: ("0", 5)}, TypeError, f"{name}[0]: str, expected an int"),
        ({**change, name: (2**63, 5)}, TypeError,
         f"{name}[0]: int of more than 64 bits, expected an int"),
    ]  # fmt: skip


def mistakes_of_ranges() -> list[Mistake]:
    table = _no_ranges("vocab_range", {}) + _no_ranges("added_range", _PART)
    table += [
        ({"vocab_range": (0, 51)}, ValueError, f"vocab_range: (0, 51), {_OF_50}"),
        ({"vocab_range": (-1, 5)}, ValueError, f"vocab_range: (-1, 5), {_OF_50}"),
        ({"vocab_range": (5, -1)}, ValueError, f"vocab_range: (5, -1), {_OF_50}"),
        ({**_PART, "added_range": (40, 21)}, ValueError, f"added_range: (40, 21), {_OF_20}"),
        ({**_PART, "added_range": (-1, 5)}, ValueError, f"added_range: (-1, 5), {_OF_20}"),
        ({**_PART, "added_range": (90, -1)}, ValueError, f"added_range: (90, -1), {_OF_20}"),
        ({"added_range": (50, 0)}, ValueError,
         "added_range: given without vocab_range, expected both"),
        ({"vocab_size": 50}, ValueError, "vocab_size: given without vocab_range, expected both"),
        ({"vocab_size": 39, **_PART}, ValueError,
         "vocab_size: 39, expected at least 40, the end of vocab_range"),
        ({"vocab_size": -1, "vocab_range": (0, 0)}, ValueError,
         "vocab_size: -1, expected at least 0, the end of vocab_range"),
        ({"vocab_size": 64, **_PART, "added_range": (60, 5)}, ValueError,
         "vocab_size: 64, expected at least 65, the end of added_range"),
        ({"vocab_size": 2**63 - 1, "vocab_range": (2**63 - 1, 3)}, ValueError,
         f"vocab_size: {2**63 - 1}, expected at least {2**63 + 2}, the end of vocab_range"),
        ({"vocab_size": 40.0, **_PART}, TypeError, "vocab_size: float, expected an int"),
        ({"vocab_size": True, **_PART}, TypeError, "vocab_size: bool, expected an int"),
        ({"vocab_size": 2**63, **_PART}, TypeError,
         "vocab_size: int of more than 64 bits, expected an int"),
        ({"vocab_size": 40, **_PART, "indices": torch.tensor([-3, 40, 39])}, IndexError,
         index_text("indices", 40, 1, 40)),
    ]  # fmt: skip
    for added in ((39, 1), (10, 1), (0, 11), (0, 20), (20, 5), (39, 20)):
        text = f"added_range: {added}, expected no index of vocab_range (10, 30)"
        table.append(({**_PART, "added_range": added}, ValueError, text))
    return table
