"""The table of the ops, for tests that go over all of them, and what each op's own tests give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from jitkern.ops._ops import OPS, Op

STEMS = {op.stem: op for op in OPS}
FUNCTIONS = {op.function: op for op in OPS}
Rows = Callable[[int], Tensor]
OpCheck = tuple[str, tuple[Any, ...], dict[str, Any]]  # overload, arguments, keyword arguments

ON_GPU = tuple(op.stem for op in OPS if op.has_kernels)

_HERE = str(Path(__file__).resolve().parent / "ops")


def own_tests(op: Op) -> Any:
    """Return ``tests/ops/test_<stem>.py``, in which an op says:

    - ``good_arguments()``: arguments of a right call, each of them given
    - ``mistakes()``: what may be wrong with one of them: change, kind of exception, its text
    - ``UNCHECKED``: the arguments that may have any value; optional
    - ``RESULTS``: what it makes itself unless it is given; optional
    - ``MIXED_DEVICES``: arguments that may not be on the CPU alone, and what the error expects;
      optional
    - ``opchecks(rows, slots, where)``: calls of its PyTorch operators on so many slots, of which
      `where` names some; if it has any
    - ``CASES``: how test_contract.py calls it, if it moves rows between tables; optional
    - ``ALLOWED_SPILL_BYTES``: of registers that its kernels may spill; optional
    """
    if _HERE not in sys.path:
        sys.path.insert(0, _HERE)
    return import_module(f"test_{op.stem}")
