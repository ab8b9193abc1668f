"""TPEmbedding under tracers, transforms and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm
from needs import needs_cxx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from jitkern.nn import TPEmbedding

pytestmark = needs_cxx
VOCAB = 29


def test_a_gradient_is_refused() -> None:
    """Nothing was sent: the others raise as well."""
    table, ids = torch.randn(VOCAB, 4), torch.tensor([3, 28])
    for size in (1, 2):
        module = TPEmbedding.from_pretrained(table, comm=(comm := SilentComm(0, size)))
        assert not module(ids).requires_grad
        comm.sent.clear()
        module.weight.requires_grad_()
        text = "^TPEmbedding: weight: requires a gradient, .* torch.nn.functional.embedding"
        with pytest.raises(RuntimeError, match=text):
            module(ids)
        assert comm.sent == []
        with torch.no_grad():
            assert torch.equal(module(ids)[0], table[3])


class Model(torch.nn.Module):
    def __init__(self, embedding: TPEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids + 1) * 2 + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1, 2])
def test_compiled(device: torch.device, size: int) -> None:
    """One rank is in the graph; of two, each separately: their graphs differ."""
    ids = torch.tensor([-1, 2, 13, 27, 13], device=device)
    torch.compiler.reset()
    for rank in range(size):
        comm = SilentComm(rank, size)
        model = Model(TPEmbedding(VOCAB, 4, comm=comm, device=device))
        expected = model(ids)
        comm.sent.clear()
        options: Any = {"backend": "aot_eager", "fullgraph": size == 1}
        run: Callable[[Tensor], Tensor] = torch.compile(model, **options)
        for num_calls in (1, 2):
            assert torch.equal(run(ids), expected)
            assert len(comm.sent) == (num_calls if size > 1 else 0)


def test_several_ranks_have_no_full_graph() -> None:
    comm = SilentComm()
    run = torch.compile(TPEmbedding(VOCAB, 4, comm=comm), backend="eager", fullgraph=True)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="collective of ranks has no place"):
        run(torch.tensor([1]))
    assert comm.sent == []


def _fake(module: TPEmbedding, ids: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module(ids)


def _of_weight(module: TPEmbedding, ids: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: torch.func.functional_call(module, {"weight": weight}, (ids,)).sum()


TRACERS: dict[str, Callable[[TPEmbedding, Tensor], object]] = {
    "make_fx": lambda m, i: make_fx(m)(i),
    "export": lambda m, i: torch.export.export(m, (i,), strict=False),
    "jit.trace": lambda m, i: torch.jit.trace(m, (i,)),
    "vmap": lambda m, i: torch.vmap(m)(i.unsqueeze(0)),
    "func.grad": lambda m, i: torch.func.grad(_of_weight(m, i))(m.weight.detach()),
    "func.jvp": lambda m, i: torch.func.jvp(_of_weight(m, i), (m.weight,), (m.weight,)),
    "fake": _fake,
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_would_lose_the_sum_is_refused(tracer: str) -> None:
    comm = SilentComm()
    module = TPEmbedding(VOCAB, 4, comm=comm)
    text = "^(TPEmbedding|indexing): .* expected "
    with pytest.raises(RuntimeError, match=text):
        TRACERS[tracer](module, torch.tensor([1, 20]))
    assert comm.sent == []
