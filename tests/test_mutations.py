"""The sweeps of test_kernels_on_cpu.py, held to kernels that are wrong: they see each mistake.

Of the long tables every third is made, which takes two minutes; all with TEST_ALL_MUTANTS=1.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from emulate.mutant import Mutant
from emulate.runner import CSRC, HERE, Runner, Sweep, compiler

MODULES = [import_module(f"emulate.{path.stem}") for path in sorted(HERE.glob("*.py"))]
_MANY = 60
_ALL = bool(os.environ.get("TEST_ALL_MUTANTS"))


def made_of(table: Sequence[Mutant]) -> Sequence[Mutant]:
    return table if _ALL or len(table) <= _MANY else table[::3]


MUTANTS = [one for module in MODULES for one in made_of(getattr(module, "MUTANTS", ()))]


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> Path:
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return Path(request.config.cache.mkdir("kernels_on_cpu"))


@pytest.mark.parametrize("sweep", dict.fromkeys(mutant.sweep for mutant in MUTANTS), ids=str)
def test_right_kernels_pass(store: Path, sweep: Sweep) -> None:
    done = Runner(store).run(sweep)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.mistake}"
)
def test_mutant_is_caught(store: Path, tmp_path: Path, mutant: Mutant) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    mutant.apply(csrc)
    runner = Runner(store, csrc)
    program = runner.build(mutant.sweep)
    done = runner.start(program)
    program.unlink()
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    # Noticed by a check, not by a crash of something else.
    noticed = ("FAILED:", "AddressSanitizer", "runtime error:", "emulate:")
    assert any(text in done.stderr for text in noticed), done.stderr
