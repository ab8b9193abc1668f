"""The table of the ops, for tests that go over all of them, and what each op's own tests give."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from jitkern.ops._ops import OPS, Op

STEMS = {op.stem: op for op in OPS}
FUNCTIONS = {op.function: op for op in OPS}
ON_GPU = tuple(op.stem for op in OPS if op.has_kernels)

_HERE = str(Path(__file__).resolve().parent / "ops")


def own_tests(op: Op) -> Any:
    """Return ``tests/ops/test_<stem>.py``, in which an op says

    ==================== =========================================================================
    good_arguments()     arguments of a right call, each of them given
    mistakes()           what is wrong with one of them: (change, kind of exception, its text)
    UNCHECKED            arguments of which any value is right; optional
    MIXED_DEVICES        (argument on the CPU, what is expected); optional
    fuzz(fuzzer)         a right call at random
    opchecks(tensors)    calls of its PyTorch operators; if it has any
    MUTANTS              its kernel made wrong, for the sweeps of tests/emulate; optional
    ALLOWED_SPILL_BYTES  of registers that its kernels may spill; optional, 0
    ==================== =========================================================================
    """
    if _HERE not in sys.path:
        sys.path.insert(0, _HERE)
    return import_module(f"test_{op.stem}")
