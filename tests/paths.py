"""Where a process that a test starts finds this tree, and what the test's own process was given."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SRC = TESTS.parent / "src"


def python_path(*more: Path) -> str:
    """Return a PYTHONPATH: jitkern's sources, more of this tree, and this process's own."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(SRC), *map(str, more), *given])
