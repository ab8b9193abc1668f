"""What the tests of communicators have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from comm_ranks import Pool
from nccl_ranks import (  # noqa: F401
    fake_gpus,
    gpus,
    nccl_pools,
)
from peer_ranks import any_ranks, cpu_ranks, gpu_ranks, servers  # noqa: F401


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    base, numbers = tmp_path_factory.mktemp("ranks"), itertools.count()

    def folder() -> Path:
        new = base / str(next(numbers))
        new.mkdir()
        return new

    pool = Pool(folder)
    yield pool
    pool.close()
