"""No test of an op may leave a fault behind for the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_fault_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("cuda") is None:
        return
    import jitkern

    for ordinal in range(torch.cuda.device_count()):
        torch.cuda.synchronize(ordinal)
        jitkern.check(ordinal)
