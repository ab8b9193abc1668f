"""The gradient of ``indexing`` where many rows are one. See test_autograd.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jitkern

SIXTEEN_BITS = [torch.bfloat16, torch.float16]
ROWS = 5


@pytest.mark.parametrize("row_shape", [(8,), (2, 3), (), (1,)], ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_many_gradients_of_a_row(
    device: torch.device, dtype: torch.dtype, row_shape: tuple[int, ...]
) -> None:
    """In their own precision a sum of ones stops at 256, or at 2048."""
    for count in (1000, 4000):
        weights = torch.zeros(4, *row_shape, dtype=dtype, device=device, requires_grad=True)
        indices = torch.zeros(count + 2, dtype=torch.int32, device=device)
        indices[7], indices[9] = -1, 3
        jitkern.indexing(weights, indices).sum().backward()
        assert weights.grad is not None
        expected = torch.zeros(4, *row_shape, dtype=dtype, device=device)
        expected[0], expected[3] = count, 1
        assert torch.equal(weights.grad, expected)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("shape", [((3, 4), (0,)), ((3, 0), (2,)), ((0, 4), (0,))], ids=str)
def test_no_gradients(
    device: torch.device, dtype: torch.dtype, shape: tuple[tuple[int, ...], ...]
) -> None:
    weights = torch.zeros(shape[0], dtype=dtype, device=device, requires_grad=True)
    indices = torch.zeros(shape[1], dtype=torch.int64, device=device)
    jitkern.indexing(weights, indices).sum().backward()
    assert weights.grad is not None
    assert weights.grad.shape == shape[0] and not weights.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS], ids=str)
@pytest.mark.parametrize("count", [1000, 100_000])
def test_the_gradient_is_reproducible(device: torch.device, dtype: torch.dtype, count: int) -> None:
    table = torch.randn(100, 24, device=device, dtype=dtype, requires_grad=True)
    indices = torch.randint(0, 100, (count,), device=device)
    factor = torch.randn(count, 24, device=device, dtype=dtype)

    def gradient() -> Tensor:
        loss = (jitkern.indexing(table, indices) * factor).sum()
        return torch.autograd.grad(loss, table)[0]

    torch.use_deterministic_algorithms(True)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)
    expected = torch.zeros(100, 24, device=device, dtype=torch.float64)
    expected.index_add_(0, indices, factor.double())
    # Sums of 16 bits are rounded once on a GPU; on the CPU at each addition.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}[dtype]
    limit = {"rtol": tolerance, "atol": tolerance * count**0.5}
    torch.testing.assert_close(first.double(), expected, **limit)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_second_order_and_batches_of_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Through the op: numbers that 16 bits hold exactly."""
    weights = torch.randint(-3, 4, (ROWS, 3), device=device).to(dtype)
    indices = torch.tensor([[1, -1, 1], [4, 1, 0]], device=device)

    def loss(table: Tensor, where: Tensor) -> Tensor:
        return (jitkern.indexing(table, where) ** 2).sum()

    def plain(table: Tensor, where: Tensor) -> Tensor:
        return (table[where.clamp(min=0)] * (where >= 0)[..., None]).square().sum()

    for make in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        assert torch.equal(make(loss)(weights, indices), make(plain)(weights, indices))
    each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, indices)
    assert torch.equal(each, torch.vmap(torch.func.grad(plain), (None, 0))(weights, indices))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_compiled(device: torch.device, dtype: torch.dtype) -> None:
    """Fake tensors go the same way, with sizes that are not known yet."""
    weights = torch.zeros(4, 8, dtype=dtype, device=device, requires_grad=True)

    def plain(table: Tensor, where: Tensor) -> Tensor:
        return jitkern.indexing(table, where)

    call = torch.compile(plain, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (1000, 1500):
        weights.grad = None
        call(weights, torch.zeros(count, dtype=torch.int64, device=device)).sum().backward()
        assert weights.grad is not None
        exact = torch.tensor(float(count), device=device).to(dtype)
        assert torch.equal(weights.grad[0], exact.expand(8))
