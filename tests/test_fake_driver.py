"""Calls to CUDA, without a GPU: scripts on a driver that records what it is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_gpu import build_driver, checks_of, environment, needs_fake_gpu, run_checks
from paths import TESTS

from jitkern.host.library import module


class Script(NamedTuple):
    """A script, the prefix of its checks, flags of the driver and variables."""

    path: str
    prefix: str = "check_"
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


OLD = (("FAKE_ARCH", "80"), ("FAKE_DRIVER", "12000"))
SCRIPTS = {
    "launch on an H200": Script("launch_child.py"),
    "launch on an A100 with an old driver": Script(
        "launch_child.py", "old_", ("-DOLD_DRIVER",), OLD
    ),
    "faults": Script("fault_child.py"),
    "offload": Script("offload/offload_child.py"),
    "times of slots": Script("offload/slot_times_child.py"),
    "copy_blocks": Script("ops/copy_blocks_child.py"),
    "memcpy_2d": Script("ops/memcpy_2d_child.py"),
    "memcpy_2d of pitches beyond the limit": Script(
        "ops/memcpy_2d_child.py", "narrow_", env=(("FAKE_MAX_PITCH", "256"),)
    ),
    "unpack": Script("ops/unpack_child.py"),
}


def checks(script: Script) -> list[str]:
    files = [TESTS / script.path]
    if script.path == "launch_child.py":
        files.append(TESTS / "launch_users.py")
    return checks_of(files, script.prefix)


pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Run a script once for all of its checks."""

    @cache
    def run(name: str) -> dict[str, str]:
        module()  # built here, outside the child's time limit
        script, folder = SCRIPTS[name], tmp_path_factory.mktemp("driver")
        return run_checks(
            TESTS / script.path, folder, script.prefix, *script.flags, **dict(script.env)
        )

    return run


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check}")
        for name, script in SCRIPTS.items()
        for check in checks(script)
    ],
)
def test_on_the_fake_driver(failed: Callable[[str], dict[str, str]], name: str, check: str) -> None:
    assert failed(name)[check] == "", failed(name)[check]


def test_a_server_is_told_before_the_process_waits_for_it(tmp_path: Path) -> None:
    """Pools are unregistered at exit, which waits for the GPU."""
    build_driver(tmp_path)
    command = [sys.executable, str(TESTS / "offload" / "offload_child.py"), "exit"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "pools are closed: stop is 1\n"), done.stderr
