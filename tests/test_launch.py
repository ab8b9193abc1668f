"""Launches without a GPU: scripts on a driver that notes what it is told.

launch_child.py: the way to a launch, on an H200 and on an A100 with an old driver. fault_child.py:
what earlier calls have left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks

HERE = Path(__file__).resolve().parent
CHILD, FAULTS = HERE / "launch_child.py", HERE / "fault_child.py"
OLD = {"FAKE_ARCH": "80", "FAKE_DRIVER": "12000"}
# Script, the prefix of its checks, where they are, flags of the driver, environment.
RUNS = {
    "hopper": (CHILD, "check_", [CHILD, HERE / "launch_users.py"], (), {}),
    "ampere": (CHILD, "old_", [CHILD], ("-DOLD_DRIVER",), OLD),
    "faults": (FAULTS, "check_", [FAULTS], (), {}),
}

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Run a script once for all of its checks."""

    @functools.cache
    def run(name: str) -> dict[str, str]:
        script, prefix, _, flags, env = RUNS[name]
        return run_checks(script, tmp_path_factory.mktemp("driver"), prefix, *flags, **env)

    return run


@pytest.mark.parametrize(
    ("run", "check"),
    [
        (run, one)
        for run, (_, prefix, files, *_) in RUNS.items()
        for one in checks_of(files, prefix)
    ],
)
def test_on_the_fake_driver(failed: Callable[[str], dict[str, str]], run: str, check: str) -> None:
    assert failed(run)[check] == "", failed(run)[check]
