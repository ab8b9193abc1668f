"""What pools, engines, rings and pipelines ask of CUDA: children on a driver that only notes it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from fake_gpu import build_driver, checks_of, environment, needs_fake_gpu, run_checks

from jitkern.host.module import module

HERE = Path(__file__).resolve().parent
NAMES = ("pool", "engine", "ring", "slot_times")
CHECKS = [(one, check) for one in NAMES for check in checks_of([HERE / f"{one}_child.py"], "check")]

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> object:
    @cache
    def found(name: str) -> dict[str, str]:
        module()  # built here, and not against the child's limit of time
        folder = tmp_path_factory.mktemp(name)
        # The times also on a driver without cuEventElapsedTime_v2.
        flags = ["-DOLD_DRIVER"] if name == "slot_times" else []
        return run_checks(HERE / f"{name}_child.py", folder, "check_", *flags)

    return found


@pytest.mark.parametrize(("name", "check"), CHECKS)
def test_checks(found: object, name: str, check: str) -> None:
    text = found(name)[check]  # type: ignore[operator]
    assert text == "", text


def test_a_server_is_told_before_the_process_waits_for_it(tmp_path: Path) -> None:
    """Pools are unregistered at exit, which waits for the GPU."""
    build_driver(tmp_path)
    command = [sys.executable, str(HERE / "ring_child.py"), "exit"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "pools are closed: stop is 1\n"), done.stderr
