"""PyTorch's rules for gradients: who has one, and what becomes of tensors that are written to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor
from torch.autograd import forward_ad

import jitkern
import jitkern.torch_ops

ROWS = 12


def double(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def zeroed(weights: Tensor, indices: Tensor, start: int, length: int) -> Tensor:
    """``indexing`` in PyTorch's words, of which each has a gradient."""
    rows = indices.long() - start
    inside = (rows >= 0) & (rows < length)
    picked = weights[rows.where(inside, 0)]
    return picked * inside.reshape(*inside.shape, *[1] * (weights.ndim - 1))


# -- indexing has a gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("vocab_range", [None, (0, ROWS), (5, ROWS), (5, 3), (7, 0)], ids=str)
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
        return jitkern.indexing(weights * 2, indices, vocab_range=vocab_range)

    weights = double(ROWS, 3, device=device)
    assert torch.autograd.gradcheck(lookup, weights, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda w: lookup(w) ** 3, weights)


def test_strided_tables_and_no_rows_at_all(device: torch.device) -> None:
    wide = double(ROWS, 9, device=device)
    indices = torch.tensor([2, 2, 11], device=device)
    jitkern.indexing(wide[:, 3:6], indices).sum().backward()
    expected = torch.zeros(ROWS, 9, dtype=torch.float64, device=device)
    expected[2, 3:6], expected[11, 3:6] = 2, 1
    assert torch.equal(wide.grad, expected)
    empty = double(0, 4, device=device)
    result = jitkern.indexing(empty, torch.tensor([-1, -5], device=device))
    (gradient,) = torch.autograd.grad(result.sum(), empty)
    assert gradient.shape == (0, 4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_kept_where_none_is_wanted(
    device: torch.device, mode: Callable[[], torch.no_grad]
) -> None:
    weights = double(ROWS, 4, device=device)
    with mode():
        assert not jitkern.indexing(weights, torch.tensor([1], device=device)).requires_grad


def test_func_grad_and_vmap(device: torch.device) -> None:
    weights = torch.randn(ROWS, 4, device=device)
    indices = torch.tensor([[1, -1], [5, 1]], device=device)

    def loss(table: Tensor, where: Tensor) -> Tensor:
        return (jitkern.indexing(table, where, vocab_range=(0, ROWS)) ** 2).sum()

    def reference(table: Tensor, where: Tensor) -> Tensor:
        return (zeroed(table, where, 0, ROWS) ** 2).sum()

    for make in (
        lambda f: torch.func.grad(f),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.hessian(f),
    ):
        torch.testing.assert_close(make(loss)(weights, indices), make(reference)(weights, indices))
    for in_dims in ((None, 0), (None, 1)):
        per_row = [torch.vmap(torch.func.grad(f), in_dims=in_dims) for f in (loss, reference)]
        torch.testing.assert_close(per_row[0](weights, indices), per_row[1](weights, indices))
    tables = torch.stack([weights, weights * 2], dim=1)
    for in_dims in ((1, None), (1, 0)):
        ours = torch.vmap(jitkern.indexing, in_dims=in_dims)(tables, indices)
        theirs = torch.vmap(lambda w, i: zeroed(w, i, 0, ROWS), in_dims=in_dims)(tables, indices)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("of_a_batch", [False, True])
def test_a_table_that_is_no_argument_of_what_is_differentiated(
    device: torch.device, of_a_batch: bool
) -> None:
    """Its output is a wrapper all the same, where its input is a plain tensor."""
    weights, x = torch.randn(ROWS, 4, device=device), torch.randn(3, 4, device=device)
    indices = torch.tensor([1, 0, 5], device=device)
    factor = weights[indices]

    def loss(x: Tensor) -> Tensor:
        return (x * jitkern.indexing(weights, indices)).sum()

    if of_a_batch:
        gradients = torch.vmap(torch.func.grad(loss))(torch.stack([x, x + 1]))
        assert torch.equal(gradients, torch.stack([factor, factor]))
    else:
        assert torch.equal(torch.func.grad(loss)(x), factor)
        (gradient,) = torch.func.vjp(loss, x)[1](torch.ones((), device=device))
        assert torch.equal(gradient, factor)
        assert torch.equal(torch.func.jacrev(loss)(x), factor)


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
@pytest.mark.parametrize("requires_grad", [False, True])
def test_wrong_arguments_have_one_text(
    device: torch.device, given: dict[str, Any], text: str, requires_grad: bool
) -> None:
    weights = torch.zeros(ROWS, 4, device=device, requires_grad=requires_grad)
    arguments = {"indices": torch.tensor([1], device=device), **given}
    with pytest.raises(TypeError, match=re.escape(f"indexing: {text}")):
        jitkern.indexing(weights, **arguments)


# -- what is written to ----------------------------------------------------------------------------


def caches(device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = torch.zeros(2, ROWS, 4, device=device)
    return first, second


def pinned(rows: Tensor, device: torch.device) -> Tensor:
    return rows.pin_memory() if device.type == "cuda" else rows


def writes(device: torch.device) -> dict[str, tuple[Callable[..., object], dict[str, Tensor]]]:
    """Each op that writes: a call, and the tensors that it writes to and reads from, by name."""
    slots = torch.tensor([1, 2], device=device)
    pairs = torch.tensor([[0, 1], [1, 2]], device=device)
    k_cache, v_cache = caches(device)
    new = torch.ones(2, 4, device=device)
    near, far = new.clone(), pinned(torch.ones(2, 4), device)
    table = torch.ones(ROWS, 4, device=device)
    far_cache = pinned(torch.zeros(ROWS, 4), device)
    return {
        "store_cache": (
            lambda **t: jitkern.store_cache(indices=slots, **t),
            {"k_cache": k_cache, "v_cache": v_cache, "k": new, "v": new},
        ),
        "indexing": (
            lambda **t: jitkern.indexing(indices=slots, **t),
            {"output": torch.zeros(2, 4, device=device), "weights": table},
        ),
        "h2d_gather": (
            lambda **t: jitkern.h2d_gather(pairs=pairs, **t),
            {"dst": caches(device)[0], "src": far},
        ),
        "d2h_scatter": (
            lambda **t: jitkern.d2h_scatter(pairs=pairs, **t),
            {"dst": far_cache, "src": near},
        ),
    }


WRITTEN = [
    ("store_cache", "k_cache"),
    ("store_cache", "v_cache"),
    ("indexing", "output"),
    ("h2d_gather", "dst"),
    ("d2h_scatter", "dst"),
]
READ = [("store_cache", "k"), ("store_cache", "v"), ("indexing", "weights")]
READ += [("h2d_gather", "src"), ("d2h_scatter", "src")]


@pytest.mark.parametrize(("op", "name"), WRITTEN)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_is_written_to_counts_as_changed(
    device: torch.device, op: str, name: str, mode: Callable[[], torch.no_grad]
) -> None:
    """A backward pass that has kept the old content may not use the new."""
    call, tensors = writes(device)[op]
    kept = tensors[name]
    x = torch.ones_like(kept, requires_grad=True)
    y = x * kept
    with mode():
        call(**tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("through_torch", [False, True])
def test_a_refused_call_changes_nothing(
    device: torch.device, mode: Callable[[], torch.no_grad], through_torch: bool
) -> None:
    cache, rows = torch.zeros(2, ROWS, 4, device=device)
    wrong = torch.zeros(1, device=device, dtype=torch.int16)
    jitkern.store_cache(cache, None, wrong.long(), rows[:1])
    before = cache._version
    call = torch.ops.jitkern.store_cache if through_torch else jitkern.store_cache
    with mode(), pytest.raises(TypeError, match="store_cache: indices: dtype int16"):
        call(cache, None, wrong, rows[:1])
    assert cache._version == before


def test_the_map_counts_as_changed_too(device: torch.device) -> None:
    src = pinned(torch.ones(2, 4), device)
    slot_map = torch.full((2,), -1, device=device)
    before = slot_map._version
    pairs = torch.tensor([[0, 1]], device=device)
    jitkern.h2d_gather(src, caches(device)[0], pairs, slot_map=slot_map)
    assert slot_map._version == before + 1


@pytest.mark.parametrize(("op", "name"), WRITTEN + READ)
def test_what_wants_a_gradient_is_refused(device: torch.device, op: str, name: str) -> None:
    call, tensors = writes(device)[op]
    before = {other: tensor.clone() for other, tensor in tensors.items()}
    wants = tensors[name].detach().requires_grad_()
    text = (
        f"{op}: {name}: requires a gradient, expected none: the op writes in place and has no "
        f"gradient; call it under torch.no_grad(), or pass {name}.detach()"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        call(**{**tensors, name: wants})
    assert all(torch.equal(tensors[other], before[other]) for other in before)
    with torch.no_grad():
        call(**{**tensors, name: wants})
    written = [tensor for other, tensor in tensors.items() if (op, other) in WRITTEN]
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert all(tensor.any() for tensor in written)


@pytest.mark.parametrize(("op", "name"), WRITTEN)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_inference_tensors_are_written_in_inference_mode_only(
    device: torch.device, op: str, name: str, mode: Callable[[], torch.no_grad]
) -> None:
    call, tensors = writes(device)[op]
    with torch.inference_mode():
        made = tensors[name].clone()
        tensors[name] = pinned(made, device) if op == "d2h_scatter" else made
    text = f"{op}: {name}: made in inference mode, expected a tensor that is not"
    with mode(), pytest.raises(RuntimeError, match=re.escape(text)):
        call(**tensors)
    with torch.inference_mode():
        call(**tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert tensors[name].any()


# -- beside tensors of another library -------------------------------------------------------------


def foreign(tensors: dict[str, Tensor], kept: str) -> dict[str, Any]:
    """Return all but one as tensors of another library, which have neither gradient nor version."""
    return {name: t if name == kept else tvm_ffi.from_dlpack(t) for name, t in tensors.items()}


@pytest.mark.parametrize(("op", "name"), WRITTEN + READ)
def test_a_gradient_beside_foreign_tensors_is_refused(
    device: torch.device, op: str, name: str
) -> None:
    call, tensors = writes(device)[op]
    given = foreign(tensors, name)
    given[name].requires_grad_()
    before = {other: tensor.clone() for other, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match=f"{op}: {name}: requires a gradient"):
        call(**given)
    assert all(torch.equal(tensors[other], before[other]) for other in before)
    with torch.no_grad():
        call(**given)


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_what_is_written_beside_foreign_tensors_counts_as_changed(
    device: torch.device, op: str, name: str
) -> None:
    call, tensors = writes(device)[op]
    before = tensors[name]._version
    call(**foreign(tensors, name))
    assert tensors[name]._version > before


def test_what_pytorch_has_to_see_is_its_own(device: torch.device) -> None:
    cache, indices = caches(device)[0], torch.tensor([1], device=device)
    rows: Any = tvm_ffi.from_dlpack(torch.ones(1, 4, device=device))
    text = re.escape("store_cache: k: Tensor, expected a torch.Tensor")
    with forward_ad.dual_level(), pytest.raises(TypeError, match=text):
        jitkern.store_cache(cache, None, indices, rows)
    assert not cache.any()
