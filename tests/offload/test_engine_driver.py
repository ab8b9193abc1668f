"""How few copies an OffloadEngine's calls are, on a driver that notes what it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks

CHILD = Path(__file__).resolve().parent / "mover_child.py"

pytestmark = needs_fake_gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from jitkern.host.module import module

    module()  # built here, where it may take a minute
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


@pytest.mark.parametrize("name", checks_of([CHILD], "check_"))
def test_copies(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]
