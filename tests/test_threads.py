"""Threads of the host module, under sanitizers: programs of tests/threads, and mutants of sources.

``ops`` calls every op on the CPU from two threads; ``staging`` those whose rows go through the CPU
to and from a GPU, of which a late one is made of threads. Each of its cases is a test here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from needs import needs_cxx
from threads.mutants import MUTANTS, Mutant
from threads.program import ASAN, CPU_OPS, HERE, STAGING, TSAN, Builder, Program

from jitkern.compilers.sources import CSRC

pytestmark = [needs_cxx, pytest.mark.slow]

CASES = re.findall(r"CASE\((\w+)\)[,}]", (HERE / "staging.cc").read_text())
# Of times and of memory, in which no thread meets another.
NOT_UNDER_TSAN = ("asleep", "no_memory", "uploads")
UNDER_TSAN = [
    *((STAGING, case) for case in CASES if case not in NOT_UNDER_TSAN),
    (CPU_OPS, ""),
]


@pytest.fixture(scope="module")
def store(session_cache: Path) -> Path:
    return session_cache.parent / "threads"  # one for all workers


@pytest.mark.parametrize("case", CASES)
def test_case(store: Path, case: str) -> None:
    """Also that waiting threads sleep: AddressSanitizer makes nothing of sleep."""
    done = Builder(store, ASAN).run(STAGING, case)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{case} passed\n"


@pytest.mark.parametrize(("program", "case"), UNDER_TSAN)
def test_is_free_of_races(store: Path, program: Program, case: str) -> None:
    done = Builder(store, TSAN).run(program, *filter(None, [case]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one.case}-{one.old}")
def test_mutant_is_caught(store: Path, tmp_path: Path, mutant: Mutant) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    mutant.apply(csrc)
    builder = Builder(store, mutant.flags, csrc)
    done = builder.run(STAGING, mutant.case, STAGING_LIMIT_S="4")
    shutil.rmtree(builder.build(STAGING).parent)
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    # Noticed by a check, not by a crash of something else.
    noticed = ("FAILED:", "AddressSanitizer", "ThreadSanitizer", "runtime error:")
    assert any(text in done.stderr for text in noticed), done.stderr
