"""Times of a SlotPipeline without a GPU, on a driver whose streams are clocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks

from jitkern.host.module import module

HERE = Path(__file__).resolve().parent
CHILDREN = [HERE / "slot_times_child.py", HERE / "slot_sampling_child.py"]
DRIVERS = {"new": [], "old": ["-DOLD_DRIVER"]}  # without cuEventElapsedTime_v2

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module", params=DRIVERS)
def found(request: pytest.FixtureRequest, tmp_path_factory: Any) -> dict[str, str]:
    module()  # built here, and not against the child's limit of time
    folder, flags = tmp_path_factory.mktemp("driver"), DRIVERS[request.param]
    known: dict[str, str] = {}
    for child in CHILDREN:
        known.update(run_checks(child, folder, "check_", *flags))
    return known


@pytest.mark.parametrize("name", checks_of(CHILDREN, "check_"))
def test_times(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]
