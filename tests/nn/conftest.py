"""Ranks of the tests of communicators, with an embedding of their own; see embedding_child.py."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "comm"))  # where only this folder is collected

from comm_ranks import Pool  # noqa: E402
from nccl_ranks import CUDA  # noqa: E402
from shared_gpu import num_gpus  # noqa: E402

from jitkern.host import module as host  # noqa: E402


@pytest.fixture(scope="session")
def embedding_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    base, numbers = tmp_path_factory.mktemp("embeddings"), itertools.count()

    def folder() -> Path:
        new = base / str(next(numbers))
        new.mkdir()
        return new

    host.module()  # built once, and not by each rank
    pool = Pool(folder, HERE / "embedding_child.py")
    yield pool
    pool.close()


@pytest.fixture(params=["cpu", CUDA])
def make_ranks(request: pytest.FixtureRequest, embedding_pool: Pool) -> Callable[[int], list]:
    """Processes that have a group and a communicator, on the CPU or each on a GPU of its own."""

    def make(count: int) -> list:
        if request.param == "cuda" and num_gpus() < count:
            pytest.skip(f"needs {count} GPUs")
        ranks = embedding_pool.join(count)
        for rank in ranks:
            rank.tell("be_on", kind=request.param)
        for rank in ranks:
            rank.value()
        return ranks

    return make
