"""TPEmbedding where it trains, and where something traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm, ThreadComm, embedding_of, on_ranks, whole_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from jitkern.nn import TPEmbedding

VOCAB = 29


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("padding_idx", "num_added"), [(None, 0), (0, 3), (-1, 3), (13, 0)])
def test_the_gradient_is_that_of_nn_embedding(
    device: torch.device, size: int, padding_idx: int | None, num_added: int
) -> None:
    """Bit for bit where a row is asked for twice at most: a sum of more has another order."""
    total = VOCAB + num_added
    theirs = torch.nn.Embedding(total, 6, padding_idx=padding_idx, device=device)
    options: Any = {"padding_idx": padding_idx, "num_added": num_added}
    twice = torch.randperm(2 * total)[: total + 9].to(device) % total
    often = torch.randint(0, total, (4, 60), dtype=torch.int32, device=device)
    for ids in (twice, often):
        factor = torch.randn(*ids.shape, 6, device=device)
        theirs.weight.grad = None
        (theirs(ids) * factor).sum().backward()

        def body(comm: ThreadComm) -> TPEmbedding:
            module = embedding_of(theirs.weight.detach(), comm, **options)
            (module(ids) * factor).sum().backward()  # noqa: B023
            return module

        modules = on_ranks(size, body)
        gradients = [module.weight.grad for module in modules]
        assert theirs.weight.grad is not None
        whole = whole_of([one for one in gradients if one is not None], modules)
        if ids is twice:
            assert torch.equal(whole, theirs.weight.grad)
        torch.testing.assert_close(whole, theirs.weight.grad)
        if padding_idx is not None:
            assert not whole[padding_idx].any()


def test_padding_has_no_gradient_whatever_comes(device: torch.device) -> None:
    table = torch.randn(VOCAB, 2, device=device)
    ids = torch.tensor([3, 4, 3], device=device)

    def body(comm: ThreadComm) -> TPEmbedding:
        module = embedding_of(table, comm, padding_idx=3)
        module(ids).backward(torch.full((3, 2), torch.nan, device=device))
        assert torch.equal(module(ids), table[ids])  # its row is a row
        return module

    modules = on_ranks(2, body)
    gradient = whole_of([module.weight.grad.nan_to_num(7.0) for module in modules], modules)  # type: ignore[union-attr]
    assert gradient[4].eq(7).all() and gradient.count_nonzero() == 2


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_and_double_backward(device: torch.device, size: int) -> None:
    table = torch.randn(VOCAB, 4, dtype=torch.float64, device=device)
    ids = torch.tensor([3, 3, 28], device=device)

    def body(comm: ThreadComm) -> None:
        module = embedding_of(table, comm)
        gradient = torch.autograd.grad((module(ids) ** 3).sum(), module.weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient[0].sum(), module.weight)
        start, length = module.vocab_range
        count = torch.bincount(ids, minlength=VOCAB)[start : start + length].unsqueeze(1)
        expected = 6 * count**2 * table[start : start + length]
        # d/dw of (3 n w^2) is 6 n w: the gradient of the result is not summed over ranks again.
        torch.testing.assert_close(second[:length], expected / count.clamp(min=1))
        module.weight.requires_grad_(False)
        assert not module(ids).requires_grad

    on_ranks(size, body)


# -- compiled --------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, embedding: TPEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0, device=embedding.weight.device))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids + 1) * self.scale + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_compiled_on_threads(device: torch.device, padding_idx: int | None) -> None:
    table = torch.randn(VOCAB, 4, device=device)
    ids = torch.tensor([-1, 2, 13, 27, 13], device=device)
    torch.compiler.reset()

    def body(comm: ThreadComm) -> tuple[Tensor, TPEmbedding]:
        module = embedding_of(table, comm, padding_idx=padding_idx)
        rows = Model(module)(ids)
        rows.sum().backward()
        return rows.detach(), module

    expected, plain = zip(*on_ranks(2, body), strict=True)
    # One after the other: what is compiled for the one is not to be the other's.
    for rank in (0, 1):
        module = embedding_of(table, comm := SilentComm(rank), padding_idx=padding_idx)
        run: Callable[[Tensor], Tensor] = torch.compile(Model(module), backend="aot_eager")
        start, length = module.vocab_range
        own = (ids + 1 >= start) & (ids + 1 < start + length)
        for calls in (1, 2):
            module.weight.grad = None
            rows = run(ids)
            assert torch.equal(rows.detach()[own], expected[rank][own])
            assert len(comm.sent) == calls
            rows.sum().backward()
            assert torch.equal(module.weight.grad, plain[rank].weight.grad)  # type: ignore[arg-type]
        with torch.no_grad():
            assert torch.equal(run(ids)[own], expected[rank][own])
        assert len(comm.sent) == 3


def test_one_rank_is_in_the_graph(device: torch.device) -> None:
    module = TPEmbedding(VOCAB, 4, comm=SilentComm(0, 1), device=device, padding_idx=3)
    torch.compiler.reset()
    ids = torch.tensor([0, 2, 27, 2], device=device)
    gradients = []
    for run in (Model(module), torch.compile(Model(module), backend="aot_eager", fullgraph=True)):
        module.weight.grad = None
        rows = run(ids)
        assert torch.equal(rows, module.weight[ids + 1] * 2 + 1)
        rows.sum().backward()
        gradients.append(module.weight.grad)
    assert torch.equal(*gradients)  # type: ignore[call-overload]


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
