"""TPEmbedding between processes: gloo of torch.distributed, and what a model does with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ref import same_bits
from torch import Tensor

from jitkern.nn import TPEmbedding

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


class Gloo:
    """The communicator of the default group."""

    rank = property(lambda self: dist.get_rank())
    size = property(lambda self: dist.get_world_size())

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        assert op == "sum"
        dist.all_reduce(x)


def table_of(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Return a table of any bits, among them -0.0 and NaN payloads."""
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, hidden * dtype.itemsize)
    table = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    table[0] = -0.0
    return table


def run(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    for dtype, hidden in ((torch.float32, 8), (torch.bfloat16, 6), (torch.float16, 3)):
        table = table_of(101, hidden, dtype)
        module = TPEmbedding(97, hidden, comm=Gloo(), dtype=dtype, num_added=4)
        module.load_full(table)
        ids = torch.arange(101).flip(0)
        with torch.no_grad():
            assert same_bits(module(ids), table[ids])
            assert same_bits(module(ids[:1]), table[ids[:1]])  # of one row, of any bytes
    theirs = torch.nn.Embedding(53, 4, padding_idx=1)
    with torch.no_grad():
        theirs.weight.copy_(table_of(53, 4, torch.int32))
    ours = TPEmbedding(53, 4, comm=Gloo(), padding_idx=1)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.tensor([[1, 5, 52], [5, 30, 1]])
    for module in (ours, theirs):
        (module(ids) * torch.arange(24.0).reshape(2, 3, 4)).sum().backward()
    start, length = ours.vocab_range
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    assert torch.equal(ours.weight.grad[:length], theirs.weight.grad[start : start + length])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_processes(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Children of `spawn` find this module, and what it imports, where the parent does.
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    mp.spawn(run, (size, str(tmp_path)), nprocs=size)
