"""PeerReducer and the streams of its calls, without a GPU: streams_child.py on a fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import checks_of, needs_fake_gpu, run_checks
from needs import needs_cxx

from jitkern.host import module as host

CHILD = Path(__file__).with_name("streams_child.py")

pytestmark = [*needs_fake_gpu, needs_cxx]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    host.module()  # the child has not the time to build it
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


@pytest.mark.parametrize("name", checks_of([CHILD], "check_"))
def test_order(failed: dict[str, str], name: str) -> None:
    assert failed[name] == "", failed[name]
