"""What earlier calls have left, without a GPU: fault_child.py on a driver that notes launches."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks

CHILD = Path(__file__).resolve().parent / "fault_child.py"

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


@pytest.mark.parametrize("name", checks_of([CHILD], "check_"))
def test_on_the_fake_driver(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]
