"""What copies between host and GPU have a driver do, that of fake_driver.c."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import needs_fake_gpu, run_checks

pytestmark = needs_fake_gpu

CHILDREN = sorted(Path(__file__).resolve().parent.glob("*_child.py"))


@pytest.fixture(scope="module", params=CHILDREN, ids=lambda child: child.stem)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return run_checks(request.param, tmp_path_factory.mktemp("driver"), "check_")


def test_calls(found: dict[str, str]) -> None:
    failed = {name: text for name, text in found.items() if text}
    assert found and not failed, "\n".join(failed.values())


def test_pitches_beyond_the_limit(tmp_path: Path) -> None:
    child = Path(__file__).resolve().parent / "memcpy_2d_child.py"
    narrow = run_checks(child, tmp_path, "narrow_", FAKE_MAX_PITCH="256")
    assert set(narrow.values()) == {""}, narrow
