"""What is asked of CUDA, without a GPU: scripts on a driver that notes what it is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fake_gpu import build_driver, checks_of, environment, needs_fake_gpu, run_checks
from paths import TESTS

from jitkern.host.module import module

LAUNCH, OFFLOAD = TESTS / "launch_child.py", TESTS / "offload"
# Script, the prefix of its checks, flags of the driver.
RUNS: dict[str, tuple[Path, str, tuple[str, ...]]] = {
    "launch on an H200": (LAUNCH, "check_", ()),
    "launch on an A100 with an old driver": (LAUNCH, "old_", ("-DOLD_DRIVER",)),
    "faults": (TESTS / "fault_child.py", "check_", ()),
    "ranks in step": (TESTS / "comm" / "in_step_child.py", "check_", ()),
    "offload": (OFFLOAD / "offload_child.py", "check_", ()),
    "times of slots": (OFFLOAD / "slot_times_child.py", "check_", ()),
}
CHECKS = [
    pytest.param(run, check, id=f"{run}-{check}")
    for run, (script, prefix, _) in RUNS.items()
    for check in checks_of([script, *([TESTS / "launch_users.py"] * (script == LAUNCH))], prefix)
]

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Run a script once for all of its checks."""

    @cache
    def run(name: str) -> dict[str, str]:
        module()  # built here, and not against the child's limit of time
        script, prefix, flags = RUNS[name]
        folder, env = tmp_path_factory.mktemp("driver"), {}
        if prefix == "old_":
            env = {"FAKE_ARCH": "80", "FAKE_DRIVER": "12000"}
        return run_checks(script, folder, prefix, *flags, **env)

    return run


@pytest.mark.parametrize(("run", "check"), CHECKS)
def test_on_the_fake_driver(failed: Callable[[str], dict[str, str]], run: str, check: str) -> None:
    assert failed(run)[check] == "", failed(run)[check]


def test_a_server_is_told_before_the_process_waits_for_it(tmp_path: Path) -> None:
    """Pools are unregistered at exit, which waits for the GPU."""
    build_driver(tmp_path)
    command = [sys.executable, str(OFFLOAD / "offload_child.py"), "exit"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "pools are closed: stop is 1\n"), done.stderr
