"""TPEmbedding where it trains, and where something traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm, Way
from needs import needs_cxx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from jitkern.nn import TPEmbedding

pytestmark = needs_cxx
VOCAB = 29


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("padding_idx", "num_added"), [(None, 0), (-1, 3), (13, 0)])
def test_the_gradient_is_that_of_nn_embedding(
    way: Way, size: int, padding_idx: int | None, num_added: int
) -> None:
    """Bit for bit where a row is asked for twice at most: a sum of more has another order.

    An optimizer's step between two fences is there for all ranks.
    """
    total = VOCAB + num_added
    theirs = torch.nn.Embedding(total, 6, padding_idx=padding_idx)
    start = theirs.weight.detach().clone()
    ranks = way.ranks_of(size, start, padding_idx=padding_idx, num_added=num_added)
    twice = torch.randperm(2 * total)[: total + 9] % total
    often = torch.randint(0, total, (4, 60), dtype=torch.int32)
    for ids in (often, twice):
        factor = torch.randn(*ids.shape, 6)
        theirs.weight.grad = None
        (theirs(ids) * factor).sum().backward()

        def train(module: TPEmbedding) -> Tensor:
            device = module.weight.device
            module.weight.grad = None
            (module(ids.to(device)) * factor.to(device)).sum().backward()  # noqa: B023
            assert module.weight.grad is not None
            return module.weight.grad

        whole = ranks.whole(ranks.each(train))
        assert theirs.weight.grad is not None
        torch.testing.assert_close(whole, theirs.weight.grad)
        if padding_idx is not None:
            assert not whole[padding_idx].any()
    assert torch.equal(whole, theirs.weight.grad)
    assert ranks.num_sums() == (2 if size > 1 else 0)
    torch.optim.SGD([theirs.weight], lr=0.5).step()

    def step(module: TPEmbedding) -> None:
        module.fence()
        torch.optim.SGD([module.weight], lr=0.5).step()
        module.fence()
        with torch.no_grad():
            assert torch.equal(module(twice.to(module.weight.device)).cpu(), theirs(twice))

    ranks.each(step)


def test_padding_has_no_gradient_whatever_comes(way: Way) -> None:
    table = torch.randn(VOCAB, 2)
    ids = torch.tensor([3, 4, 3])
    ranks = way.ranks_of(2, table, padding_idx=3)

    def gradient(module: TPEmbedding) -> Tensor:
        on_device = ids.to(module.weight.device)
        module(on_device).backward(torch.full((3, 2), torch.nan, device=on_device.device))
        assert torch.equal(module(on_device).cpu(), table[ids])  # its row is a row
        assert module.weight.grad is not None
        return module.weight.grad.nan_to_num(7.0)

    whole = ranks.whole(ranks.each(gradient))
    assert whole[4].eq(7).all() and whole.count_nonzero() == 2


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_and_double_backward(way: Way, size: int) -> None:
    table = torch.randn(VOCAB, 4, dtype=torch.float64)
    ids = torch.tensor([3, 3, 28])

    def body(module: TPEmbedding) -> None:
        on_device = ids.to(module.weight.device)
        cubes = (module(on_device) ** 3).sum()
        gradient = torch.autograd.grad(cubes, module.weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient[0].sum(), module.weight)
        start, length = module.vocab_range
        count = torch.bincount(ids, minlength=VOCAB)[start : start + length].unsqueeze(1)
        expected = 6 * count**2 * table[start : start + length]
        # d/dw of (3 n w^2) is 6 n w: the gradient of the result is not summed over ranks again.
        torch.testing.assert_close(second[:length].cpu(), expected / count.clamp(min=1))
        module.weight.requires_grad_(False)
        assert not module(on_device).requires_grad

    way.ranks_of(size, table).each(body)


class Model(torch.nn.Module):
    def __init__(self, embedding: TPEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0, device=embedding.weight.device))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids + 1) * self.scale + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize(("size", "padding_idx"), [(1, 3), (2, None), (2, 3)])
def test_compiled(device: torch.device, size: int, padding_idx: int | None) -> None:
    """One rank is in the graph; of two, each by itself: what is compiled is not the other's."""
    ids = torch.tensor([-1, 2, 13, 27, 13], device=device)
    torch.compiler.reset()
    for rank in range(size):
        comm = SilentComm(rank, size)
        module = TPEmbedding(VOCAB, 4, comm=comm, device=device, padding_idx=padding_idx)
        Model(module)(ids).sum().backward()
        expected, gradient = Model(module)(ids).detach(), module.weight.grad
        comm.sent.clear()
        how: Any = {"backend": "aot_eager", "fullgraph": size == 1}
        run: Callable[[Tensor], Tensor] = torch.compile(Model(module), **how)
        for calls in (1, 2):
            module.weight.grad = None
            rows = run(ids)
            assert torch.equal(rows.detach(), expected)
            assert len(comm.sent) == (calls if size > 1 else 0)
            rows.sum().backward()
            assert torch.equal(module.weight.grad, gradient)  # type: ignore[arg-type]
        with torch.no_grad():
            assert torch.equal(run(ids), expected)


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
    "make_fx without gradient": lambda m, i: make_fx(torch.no_grad()(m))(i),
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
    text = "TPEmbedding: ids: traced or transformed, expected a plain call"
    with pytest.raises(RuntimeError, match=text):
        TRACERS[tracer](module, torch.tensor([1, 20]))
    assert comm.sent == []
