"""Ranks make all of each call, also where only some hear of an earlier fault; order of streams.

Without a GPU by in_step_child.py on a fake driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import checks_of, needs_fake_gpu, run_checks
from needs import needs_cxx
from rows_ranks import Ranks

import jitkern
from jitkern.host import module as host
from jitkern.nn import TPEmbedding, tp_embedding

CUDA = torch.device("cuda")
CHILD = Path(__file__).with_name("in_step_child.py")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    host.module()  # the child has not the time to build it
    return run_checks(CHILD, tmp_path_factory.mktemp("driver"), "check_")


class Counting:
    """A rank of two, whose other one has zeros only."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> None:
        self.num_sums += 1


@needs_cxx
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=needs_fake_gpu) for one in checks_of([CHILD], "check_")]
)
def test_without_a_gpu(failed: dict[str, str], name: str) -> None:
    assert failed[name] == "", failed[name]


def test_an_embedding_makes_its_sum_over_any_fault_of_an_earlier_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its type, and no other error."""
    earlier = [RuntimeError("unpack: ... (found by an earlier call on cuda:0; nothing was copied)")]
    real = tp_embedding.indexing

    def indexing(*args: Any, **how: Any) -> torch.Tensor:
        if earlier:
            raise earlier.pop()
        return real(*args, **how)

    monkeypatch.setattr(tp_embedding, "indexing", indexing)
    comm = Counting()
    module = TPEmbedding(10, 8, comm=comm, device="cpu", method="all_reduce")
    with pytest.raises(RuntimeError, match="unpack"):
        module(torch.arange(10))
    assert comm.num_sums == 1
    earlier.append(RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        module(torch.arange(10))
    assert comm.num_sums == 1


def leave_a_fault() -> None:
    jitkern.indexing(torch.ones(5, 8, device=CUDA), torch.tensor([5], device=CUDA))
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_over_what_another_op_has_left() -> None:
    """One rank hears of it, and has made its sum."""
    ranks = Ranks(2, CUDA, deadline_s=5.0)
    tensors = [torch.full((5,), rank + 1.0, device=CUDA) for rank in range(2)]
    call: Any = lambda rank: ranks.reducers[rank].all_reduce(tensors[rank])  # noqa: E731
    for number in range(3):
        leave_a_fault()
        errors = ranks.errors(call)
        assert [type(error) for error in errors] == [IndexError, type(None)]
        for x in tensors:
            assert x.tolist() == [3.0 * 2**number] * 5
    jitkern.check()
