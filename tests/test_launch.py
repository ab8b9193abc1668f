"""The way to a launch, without a GPU: launch_child.py on a driver that notes what it is told.

What earlier calls have left: fault_child.py on the same driver.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks

HERE = Path(__file__).resolve().parent
CHILD = HERE / "launch_child.py"
SOURCES = [CHILD, HERE / "launch_users.py"]
FAULTS = HERE / "fault_child.py"

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def on_hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


@pytest.fixture(scope="module")
def on_ampere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    return run_checks(CHILD, folder, "old_", "-DOLD_DRIVER", FAKE_ARCH="80", FAKE_DRIVER="12000")


@pytest.mark.parametrize("name", checks_of(SOURCES, "check_"))
def test_on_hopper(on_hopper: dict[str, str], name: str) -> None:
    assert on_hopper[name] == "", on_hopper[name]


@pytest.mark.parametrize("name", checks_of(SOURCES, "old_"))
def test_on_ampere_with_an_old_driver(on_ampere: dict[str, str], name: str) -> None:
    assert on_ampere[name] == "", on_ampere[name]


@pytest.fixture(scope="module")
def after_faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(FAULTS, tmp_path_factory.mktemp("driver"), "check_")


@pytest.mark.parametrize("name", checks_of([FAULTS], "check_"))
def test_what_earlier_calls_have_left(after_faults: dict[str, str], name: str) -> None:
    assert after_faults[name] == "", after_faults[name]
