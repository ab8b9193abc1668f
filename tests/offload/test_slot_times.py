"""Times of a SlotPipeline without a GPU, on a driver whose streams are clocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks

from jitkern.host.module import module

HERE = Path(__file__).resolve().parent
CHILD = HERE / "slot_times_child.py"

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    module()  # built here, and not against the child's limit of time
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


@pytest.mark.parametrize("name", checks_of([CHILD], "check_"))
def test_times(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]
