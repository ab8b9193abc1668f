"""PyTorch's rules for gradients: who has one, and what becomes of tensors that are written to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm_ffi
from ref import flat, replaced, same_bits
from stems import FUNCTIONS, own_tests
from torch import Tensor
from torch.autograd import forward_ad

import jitkern
import jitkern.torch_ops
from jitkern.ops.register import OVERLOADS

ROWS = 12
SIXTEEN_BITS = [torch.bfloat16, torch.float16]


def double(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def zeroed(weights: Tensor, indices: Tensor, start: int, length: int) -> Tensor:
    """``indexing`` in PyTorch's words, of which each has a gradient."""
    rows = indices.long() - start
    inside = (rows >= 0) & (rows < length)
    picked = weights[rows.where(inside, 0)]
    return picked * inside.reshape(*inside.shape, *[1] * (weights.ndim - 1))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("vocab_range", [None, (0, ROWS), (5, 3), (7, 0), (2**63 - 1, 3)], ids=str)
@pytest.mark.parametrize("row_shape", [(1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("index_shape", [(), (0,), (7,), (2, 9)], ids=str)
def test_the_gradient_of_indexing(
    device: torch.device,
    index_shape: tuple[int, ...],
    row_shape: tuple[int, ...],
    vocab_range: tuple[int, int] | None,
    index_dtype: torch.dtype,
) -> None:
    """Repeated rows add up; padding, and what another rank holds, gives nothing."""
    weights = double(ROWS, *row_shape, device=device)
    indices = torch.randint(-2, ROWS, index_shape, dtype=index_dtype, device=device)
    ours = jitkern.indexing(weights, indices, vocab_range=vocab_range)
    theirs = zeroed(weights, indices, *(vocab_range or (0, ROWS)))
    assert ours.requires_grad
    assert torch.equal(ours, theirs)
    factor = torch.randn_like(ours)
    (our_gradient,) = torch.autograd.grad((ours * factor).sum(), weights)
    (their_gradient,) = torch.autograd.grad((theirs * factor).sum(), weights)
    torch.testing.assert_close(our_gradient, their_gradient)


@pytest.mark.parametrize("vocab_range", [None, (4, 6)], ids=str)
def test_gradcheck(device: torch.device, vocab_range: tuple[int, int] | None) -> None:
    indices = torch.tensor([3, -1, 9, 3, 5], device=device)

    def lookup(weights: Tensor) -> Tensor:
        return jitkern.indexing(weights[:, 3:6], indices, vocab_range=vocab_range)  # strided

    weights = double(ROWS, 9, device=device)
    assert torch.autograd.gradcheck(lookup, weights, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda w: lookup(w) ** 3, weights)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS], ids=str)
def test_func_grad_and_vmap(device: torch.device, dtype: torch.dtype) -> None:
    """Of numbers that 16 bits hold exactly."""
    weights = torch.randint(-3, 4, (ROWS, 4), device=device).to(dtype)
    indices = torch.tensor([[1, -1], [5, 1]], device=device)

    def loss(table: Tensor, where: Tensor) -> Tensor:
        return (jitkern.indexing(table, where, vocab_range=(0, ROWS)) ** 2).sum()

    def reference(table: Tensor, where: Tensor) -> Tensor:
        return (zeroed(table, where, 0, ROWS) ** 2).sum()

    for make in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(make(loss)(weights, indices), make(reference)(weights, indices))
    for in_dims in ((None, 0), (None, 1)):
        per_row = [torch.vmap(torch.func.grad(f), in_dims=in_dims) for f in (loss, reference)]
        torch.testing.assert_close(per_row[0](weights, indices), per_row[1](weights, indices))
    tables = torch.stack([weights, weights * 2], dim=1)
    for in_dims in ((1, None), (1, 0)):
        ours = torch.vmap(jitkern.indexing, in_dims=in_dims)(tables, indices)
        theirs = torch.vmap(lambda w, i: zeroed(w, i, 0, ROWS), in_dims=in_dims)(tables, indices)
        assert torch.equal(ours, theirs)


def test_a_table_that_is_no_argument_of_what_is_differentiated(device: torch.device) -> None:
    """Its output is a wrapper all the same, where its input is a plain tensor."""
    weights, x = torch.randn(ROWS, 4, device=device), torch.randn(3, 4, device=device)
    indices = torch.tensor([1, 0, 5], device=device)
    factor = weights[indices]

    def loss(x: Tensor) -> Tensor:
        return (x * jitkern.indexing(weights, indices)).sum()

    (by_vjp,) = torch.func.vjp(loss, x)[1](torch.ones((), device=device))
    of_batch = torch.vmap(torch.func.grad(loss))(torch.stack([x, x + 1]))
    for gradient in (torch.func.grad(loss)(x), by_vjp, torch.func.jacrev(loss)(x), *of_batch):
        assert torch.equal(gradient, factor)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode(device: torch.device, mode: Callable[[], torch.no_grad]) -> None:
    """Which no_grad() does not switch off."""
    weights, tangent = torch.randn(2, ROWS, 4, device=device)
    indices = torch.tensor([1, -1, 5], device=device)
    with forward_ad.dual_level(), mode():
        dual = forward_ad.make_dual(weights, tangent)
        result = forward_ad.unpack_dual(jitkern.indexing(dual, indices))
        assert torch.equal(result.tangent, zeroed(tangent, indices, 0, ROWS))
        text = "store_cache: k: has a tangent of forward-mode AD, expected none"
        cache = torch.zeros_like(weights)
        with pytest.raises(RuntimeError, match=text):
            jitkern.store_cache(cache, None, indices, dual[:3])
        assert not cache.any()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"indices": [1, 2]}, "indices: list, expected a tensor"),
        ({"vocab_range": 3}, "vocab_range: 3, expected (start, length)"),
        ({"vocab_range": (1, None)}, "vocab_range: (1, None), expected two ints"),
    ],
)
def test_wrong_arguments_have_one_text(
    device: torch.device, given: dict[str, Any], text: str
) -> None:
    """That of a call without a gradient, which tests/ops/test_errors_table.py checks."""
    weights = torch.zeros(ROWS, 4, device=device, requires_grad=True)
    arguments = {"indices": torch.tensor([1], device=device), **given}
    with pytest.raises(TypeError, match=re.escape(f"indexing: {text}")):
        jitkern.indexing(weights, **arguments)


@pytest.mark.parametrize(
    ("row_shape", "is_compiled"), [((2, 3), False), ((), False), ((1,), False), ((8,), True)]
)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_many_gradients_of_a_row(
    device: torch.device, dtype: torch.dtype, row_shape: tuple[int, ...], is_compiled: bool
) -> None:
    """In their own precision a sum of ones stops at 256, or at 2048."""

    def look(table: Tensor, where: Tensor) -> Tensor:
        return jitkern.indexing(table, where)

    if is_compiled:  # by fake tensors, whose sizes are not known yet
        look = torch.compile(look, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (1000, 4000):
        weights = torch.zeros(4, *row_shape, dtype=dtype, device=device, requires_grad=True)
        indices = torch.zeros(count + 2, dtype=torch.int32, device=device)
        indices[7], indices[9] = -1, 3
        look(weights, indices).sum().backward()
        assert weights.grad is not None
        expected = torch.zeros(4, *row_shape, dtype=dtype, device=device)
        expected[0], expected[3] = count, 1
        assert torch.equal(weights.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, *SIXTEEN_BITS], ids=str)
def test_no_gradients(device: torch.device, dtype: torch.dtype) -> None:
    for shape, values in (((3, 4), []), ((3, 0), [0, 0]), ((0, 4), []), ((0, 4), [-1, -5])):
        weights = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        indices = torch.tensor(values, dtype=torch.int64, device=device)
        jitkern.indexing(weights, indices).sum().backward()
        assert weights.grad is not None
        assert weights.grad.shape == shape and not weights.grad.any()


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


def written_by(op: str) -> set[str]:
    schemas = [overload.schema for overload in OVERLOADS.get(op, ())]
    return set(re.findall(r"Tensor\([ab]!\)\??(?:\[\])? (\w+)", " ".join(schemas))) or {"dst"}


def right(op: str) -> dict[str, Any]:
    return own_tests(FUNCTIONS[op]).good_arguments()


WRITING = [op for op in FUNCTIONS if op != "fast_compare_key"]
WRITTEN = [(op, name) for op in WRITING for name in sorted(written_by(op) & set(flat(right(op))))]
FLOATS = [
    (op, name) for op in WRITING for name, t in flat(right(op)).items() if t.is_floating_point()
]


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize(("op", "name"), WRITTEN)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_to_counts_as_changed(
    op: str, name: str, mode: Callable[[], torch.no_grad]
) -> None:
    """So that no backward pass uses its new content; also beside tensors of other libraries."""
    arguments = right(op)
    before = arguments[name]._version
    with mode():
        getattr(jitkern, op)(**arguments)
        assert arguments[name]._version == before + 1
        given = replaced(arguments, lambda n, t: t if n == name else tvm_ffi.from_dlpack(t))
        getattr(jitkern, op)(**given)
    assert arguments[name]._version > before + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("through_torch", [False, True])
def test_a_refused_call_changes_nothing(
    device: torch.device, mode: Callable[[], torch.no_grad], through_torch: bool
) -> None:
    cache, rows = torch.zeros(2, ROWS, 4, device=device)
    wrong = torch.zeros(1, device=device, dtype=torch.int16)
    with mode():
        jitkern.store_cache(cache, None, wrong.long(), rows[:1])
    before = cache._version
    assert before == 1
    call = torch.ops.jitkern.store_cache if through_torch else jitkern.store_cache
    with mode(), pytest.raises(TypeError, match="store_cache: indices: dtype int16"):
        call(cache, None, wrong, rows[:1])
    assert cache._version == before


@pytest.mark.parametrize("beside_foreign", [False, True])
@pytest.mark.parametrize(("op", "name"), FLOATS)
def test_what_wants_a_gradient_is_refused(op: str, name: str, beside_foreign: bool) -> None:
    """Tensors of another library, which have no gradient, hide no other's."""
    arguments = right(op)
    tensors = flat(arguments)
    before = {other: tensor.clone() for other, tensor in tensors.items()}
    if beside_foreign and op == "merge_states":
        pytest.skip("takes no other library's where PyTorch has to see it")
    other = tvm_ffi.from_dlpack if beside_foreign else lambda t: t
    given = replaced(arguments, lambda n, t: t.detach().requires_grad_() if n == name else other(t))
    text = (
        f"{op}: {name}: requires a gradient, expected none: the op writes in place and has no "
        f"gradient; call it under torch.no_grad(), or pass {name}.detach()"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        getattr(jitkern, op)(**given)
    assert all(same_bits(tensors[other], before[other]) for other in before)
    with torch.no_grad():
        getattr(jitkern, op)(**given)


@pytest.mark.parametrize(("op", "name"), WRITTEN)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_inference_tensors_are_written_in_inference_mode_only(
    op: str, name: str, mode: Callable[[], torch.no_grad]
) -> None:
    given = right(op)
    with torch.inference_mode():
        given[name] = given[name].clone()
    text = f"{op}: {name}: made in inference mode, expected a tensor that is not"
    with mode(), pytest.raises(RuntimeError, match=re.escape(text)):
        getattr(jitkern, op)(**given)
    with torch.inference_mode():
        getattr(jitkern, op)(**given)


def test_what_pytorch_has_to_see_is_its_own(device: torch.device) -> None:
    cache, indices = torch.zeros(ROWS, 4, device=device), torch.tensor([1], device=device)
    rows: Any = tvm_ffi.from_dlpack(torch.ones(1, 4, device=device))
    text = re.escape("store_cache: k: Tensor, expected a torch.Tensor")
    with forward_ad.dual_level(), pytest.raises(TypeError, match=text):
        jitkern.store_cache(cache, None, indices, rows)
    assert not cache.any()
