"""swap_rows in graphs, of PyTorch and of CUDA, and what PyTorch is told of what it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ref import same_bits
from test_swap import (
    GPU_SLOTS,
    HOST_ROWS,
    TRIPLES,
    buffers_for,
    good_arguments,
    ref_swap,
    triples_of,
)
from torch import Tensor

from jitkern import swap_rows


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph_of_pytorch(backend: str) -> None:
    """Later reads see both of what is written."""

    def step(host: Tensor, gpu: Tensor, triples: Tensor) -> Tensor:
        swap_rows(host, gpu, triples, num_sms=1, order="host")
        return host.sum() + 2 * gpu.sum()

    torch.compiler.reset()
    host, gpu = torch.randn(HOST_ROWS, 8), torch.randn(GPU_SLOTS, 8)
    expected = [host.clone(), gpu.clone()]
    triples = triples_of(torch.device("cpu"))
    ref_swap(*expected, gpu.clone(), triples)
    found = torch.compile(step, fullgraph=True, backend=backend)(host, gpu, triples)
    assert same_bits(host, expected[0])
    assert same_bits(gpu, expected[1])
    assert torch.equal(found, expected[0].sum() + 2 * expected[1].sum())


@pytest.mark.parametrize("argument", ["host", "gpu"])
def test_both_count_as_changed(argument: str) -> None:
    """A backward pass that has kept the old content raises; a gradient is refused."""
    good = good_arguments()
    with pytest.raises(RuntimeError, match=f"^swap_rows: {argument}: requires a gradient"):
        swap_rows(**{**good, argument: good[argument].requires_grad_()})
    good = good_arguments()
    weight = torch.ones_like(good[argument], requires_grad=True)
    result = (weight * good[argument]).sum()
    swap_rows(**good)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("row_bytes", "how"), [(1712, {}), (1728, {"num_sms": 4}), (1744, {"order": "host"})], ids=str
)
def test_the_first_call_in_a_capture(row_bytes: int, how: dict[str, Any]) -> None:
    """A row size of no other test, so that it compiles while it is captured."""
    cuda = torch.device("cuda")
    host, gpu = buffers_for(cuda, (row_bytes,))
    triples = torch.full((TRIPLES, 3), -1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap_rows(host.view, gpu.view, triples, **how)
    for turn in range(3):
        triples.copy_(triples_of(cuda).roll(turn, 0))
        host_twin, gpu_twin, before = host.twin(), gpu.twin(), gpu.twin()
        graph.replay()
        torch.cuda.synchronize()
        ref_swap(host_twin.view, gpu_twin.view, before.view, triples)
        assert host.same(host_twin)
        assert gpu.same(gpu_twin)
