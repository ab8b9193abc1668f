"""What the tests of ``TPEmbedding`` have in common."""

from __future__ import annotations

import pytest
from embedding_ranks import Way

CUDA = [
    pytest.param(("all_reduce", "cuda"), marks=pytest.mark.cuda),
    pytest.param(("peer", "cuda"), marks=pytest.mark.multigpu),
]


@pytest.fixture(params=[("all_reduce", "cpu"), ("peer", "cpu"), *CUDA], ids="-".join)
def way(request: pytest.FixtureRequest) -> Way:
    return Way(*request.param)
