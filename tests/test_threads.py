"""The ops on the CPU and faults under ThreadSanitizer: tests/threads/ops.cc."""

from __future__ import annotations

from pathlib import Path

import pytest
from needs import needs_cxx
from threads.program import race_ops


@needs_cxx
@pytest.mark.slow
def test_ops_are_free_of_races(tmp_path: Path) -> None:
    done = race_ops(tmp_path)
    assert done.returncode == 0, done.stderr
