"""What orders the streams of a SlotPipeline is enough, and nothing of it can be left out.

Without a GPU: slot_order.py on a driver that notes what it is told. It is then held to host modules
that are wrong, of which it has to find each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import build_driver, environment, needs_fake_gpu
from needs import needs_cxx
from proved import HOST, unproved
from slot_mutants import MUTANTS, Mutant
from threads.program import Builder

from jitkern.host.module import module

pytestmark = [needs_cxx, *needs_fake_gpu]

PROGRAM = Path(__file__).resolve().parent / "slot_order.py"
# Of the host module what SlotStreams needs.
SOURCES = ("host/[!u]*.cc", "offload/slot*.cc")
of_these_sources = unproved(
    "slot_order",
    *(*HOST, "tests/offload/test_slot_order.py", "tests/offload/slot_*.py", "tests/fake_driver.c"),
    "tests/threads/program.py",
    *(f"src/jitkern/offload/{name}.py" for name in ("pipeline", "monitor", "depth")),
)


class Library(Builder):
    """Builds a part of the host module as a library that Python loads."""

    def link(self, target: Path) -> Path:
        self._compile_header()
        sources = sorted(path for pattern in SOURCES for path in self.csrc.glob(pattern))
        objects = [str(self._object(path)) for path in sources]
        libraries = [f"-L{self.library}", "-ltvm_ffi", "-ldl", "-pthread"]
        self._run("-shared", *objects, *libraries, "-o", str(target))
        return target


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    build_driver(folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


def run(driver: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    env = environment(driver)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_random_runs_are_in_order(driver: Path) -> None:
    module()  # built here, and not against the child's limit of time
    done = run(driver, "", "2000")
    assert done.stdout == "in order\n", done.stdout + done.stderr


@of_these_sources
def test_the_part_that_mutants_are_made_of_is_right(
    driver: Path, store: Path, tmp_path: Path
) -> None:
    library = Library(store, ("-O0",)).link(tmp_path / "host.so")
    done = run(driver, str(library))
    assert done.stdout == "in order\n", done.stdout + done.stderr


@of_these_sources
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.mistake.replace(" ", "-"))
def test_mutant_is_caught(driver: Path, store: Path, tmp_path: Path, mutant: Mutant) -> None:
    library = Library(store, ("-O0",), mutant.apply(tmp_path / "csrc")).link(tmp_path / "host.so")
    done = run(driver, str(library))
    assert done.returncode == 1, f"nobody noticed: {mutant.old} -> {mutant.new}; {done.stderr}"
    # Noticed by the order, or by the driver, which refuses a wait; not by a crash.
    noticed = ("is not before", "cuStreamWaitEvent", "could not wait", "cuEvent")
    assert any(text in done.stdout for text in noticed), done.stdout + done.stderr
