"""What a ring has CUDA do, without a GPU: ring_child.py on a driver that notes what it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import build_driver, checks_of, environment, needs_fake_gpu, run_checks

CHILD = Path(__file__).resolve().parent / "ring_child.py"

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


@pytest.mark.parametrize("name", checks_of([CHILD], "check_"))
def test_ring(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]


def test_a_server_is_told_before_the_process_waits_for_it(tmp_path: Path) -> None:
    """Pools are unregistered at exit, which waits for the GPU."""
    build_driver(tmp_path)
    script = str(CHILD.with_name("ring_exit_child.py"))
    done = subprocess.run(
        [sys.executable, script], env=environment(tmp_path), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "pools are closed: stop is 1\n"), done.stderr
