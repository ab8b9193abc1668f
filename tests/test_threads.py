"""Threads of the host module, under sanitizers: programs of tests/threads, and mutants of sources.

``ops`` calls every op on the CPU from two threads; ``uploads`` calls h2d_gather with pairs on the
host, on a late GPU made of threads. Each of its cases is a test here.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from needs import needs_cxx
from threads.mutants import MUTANTS, Mutant
from threads.program import ASAN, CPU_OPS, HERE, TSAN, UPLOADS, Builder, Program

from jitkern.compilers.sources import CSRC

pytestmark = [needs_cxx, pytest.mark.slow]

CASES = re.findall(r"CASE\((\w+)\)[,}]", (HERE / "uploads.cc").read_text())
# `uploads` is about memory: no two threads meet in it.
UNDER_TSAN = [*((UPLOADS, case) for case in CASES if case != "uploads"), (CPU_OPS, "")]


@pytest.fixture(scope="module")
def store(session_cache: Path) -> Path:
    return session_cache.parent / "threads"  # one for all workers


@pytest.mark.parametrize("case", CASES)
def test_case(store: Path, case: str) -> None:
    done = Builder(store, ASAN).run(UPLOADS, case)
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
    done = builder.run(UPLOADS, mutant.case, UPLOADS_LIMIT_S="4")
    shutil.rmtree(builder.build(UPLOADS).parent)
    assert done.returncode != 0, f"unnoticed: {mutant.old} -> {mutant.new}"
    # Noticed by a check, not by an unrelated crash.
    noticed = ("FAILED:", "AddressSanitizer", "ThreadSanitizer", "runtime error:")
    assert any(text in done.stderr for text in noticed), done.stderr
