"""PyTorch's rules for tensors that autograd tracks, and for those that an op writes to."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
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

ROWS = 12
EMBEDDING = ", or use torch.nn.functional.embedding"


def gradient_text(op: str, name: str) -> str:
    return (
        f"{op}: {name}: requires a gradient, expected none: the op has no gradient; call it under "
        f"torch.no_grad() or pass {name}.detach(){EMBEDDING if op == 'indexing' else ''}"
    )


@pytest.fixture
def look_up(device: torch.device) -> dict[str, Tensor]:
    """Arguments of ``indexing``."""
    indices = torch.tensor([[1, -1], [5, 1]], device=device)
    return {"weights": torch.randn(ROWS, 4, device=device), "indices": indices}


TRANSFORMS: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "backward": (
        lambda w, i: jitkern.indexing(w.requires_grad_(), i),
        gradient_text("indexing", "weights"),
    ),
    "operator": (
        lambda w, i: torch.ops.jitkern.indexing(w.requires_grad_(), i),
        gradient_text("indexing", "weights"),
    ),
    "grad": (
        lambda w, i: torch.func.grad(lambda w: jitkern.indexing(w, i).sum())(w),
        gradient_text("indexing", "weights"),
    ),
    "jvp": (
        lambda w, i: torch.func.jvp(lambda w: jitkern.indexing(w, i), (w,), (w,)),
        "indexing: weights: has a tangent of forward-mode AD, expected none: the op has no "
        f"gradient; pass forward_ad.unpack_dual(weights).primal{EMBEDDING}",
    ),
    "vmap": (
        lambda w, i: torch.vmap(lambda i: jitkern.indexing(w, i))(i),
        "indexing: indices: batched by torch.vmap, expected a plain tensor: call the op in a loop "
        f"or once with all rows{EMBEDDING}",
    ),
}


@pytest.mark.parametrize(("run", "text"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_what_has_no_gradient_says_what_to_use(
    look_up: dict[str, Tensor], run: Callable[[Tensor, Tensor], object], text: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        run(*look_up.values())


def test_merge_state_names_its_own_argument() -> None:
    outs, lses = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2)
    text = gradient_text("merge_state", "lse_b")
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        jitkern.merge_state(outs[0], lses[0], outs[1], lses[1].requires_grad_())


def test_a_table_beside_what_is_differentiated(look_up: dict[str, Tensor]) -> None:
    """Only ``x`` is differentiated; the rows of the table are constants."""
    indices = look_up["indices"].abs()
    rows = look_up["weights"][indices]

    def loss(x: Tensor) -> Tensor:
        return (x * jitkern.indexing(look_up["weights"], indices)).sum()

    x = torch.randn_like(rows)
    assert torch.equal(torch.func.grad(loss)(x), rows)
    x.requires_grad_()
    loss(x).backward()
    assert x.grad is not None and torch.equal(x.grad, rows)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode(look_up: dict[str, Tensor], mode: Callable[[], torch.no_grad]) -> None:
    """``no_grad()`` does not switch it off. A call without a tangent works."""
    weights, indices = look_up.values()
    cache = torch.zeros_like(weights)
    with forward_ad.dual_level(), mode():
        dual = forward_ad.make_dual(weights, weights)
        text = "store_cache: k: has a tangent of forward-mode AD, expected none"
        with pytest.raises(RuntimeError, match=text):
            jitkern.store_cache(cache, None, indices[0], dual[:2])
        assert not cache.any()
        jitkern.store_cache(cache, None, indices[0], weights[:2])
    assert torch.equal(cache[1], weights[0])


def written_by(op: str) -> set[str]:
    module = import_module(f"jitkern.ops.{FUNCTIONS[op].stem}")
    schemas = [overload.schema for overload in getattr(module, "OVERLOADS", ())]
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
    with pytest.raises(RuntimeError, match=f"^{re.escape(gradient_text(op, name))}$"):
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
