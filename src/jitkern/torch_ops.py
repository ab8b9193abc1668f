"""The ops as PyTorch operators, ``torch.ops.jitkern.*``, for all that traces or wraps tensors.

Importing this module registers them, as ``ops.register.OVERLOADS`` lists them. The
public functions do so when they are traced; import it before an exported program is loaded, which
names the operators but calls no function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad

from jitkern.errors import name_unreadable
from jitkern.ops._ops import OPS
from jitkern.ops.common import not_a_tensor
from jitkern.ops.register import OVERLOADS, TorchOverload

_unpack_dual: Any = forward_ad.unpack_dual

# Not torch.library.custom_op: its wrappers add 12 to 15 us to a call, this 1.2 us.
_LIBRARY: Any = vars(torch.library)["Library"]("jitkern", "FRAGMENT")


def call(op: str, overload: str = "default", /, **arguments: Any) -> Any:
    """Call ``torch.ops.jitkern.<op>.<overload>``.

    RuntimeError if a tensor requires a gradient, has a tangent or is batched.
    """
    refuse_transformed(op, arguments)
    operator = getattr(getattr(torch.ops.jitkern, op), overload)
    if torch.compiler.is_dynamo_compiling():
        return operator(**arguments)
    try:
        return operator(**arguments)
    except RuntimeError as error:
        # The dispatcher does not name an argument that it takes for no tensor.
        given = {}
        for argument in operator._schema.arguments:
            value, kind = arguments.get(argument.name), str(argument.type)
            if kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None):
                given[argument.name] = value
        if (wrong := not_a_tensor(op, **given)) is not None:
            raise wrong from error
        raise


def refuse(op: str, written: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise for an op that writes in place and is no operator: see ``dispatch.refuse``."""
    refuse_transformed(op, arguments)
    _refuse_inference_tensors(op, written)


# What has a gradient and does the same.
_DIFFERENTIABLE = {"indexing": "torch.nn.functional.embedding"}


def refuse_transformed(op: str, arguments: dict[str, Any]) -> None:
    """Raise for a tensor that requires a gradient, has a tangent or is batched by vmap."""
    is_compiling = torch.compiler.is_dynamo_compiling()
    is_dual_level = not is_compiling and forward_ad._current_level >= 0
    instead = f", or use {_DIFFERENTIABLE[op]}" if op in _DIFFERENTIABLE else ""
    for name, value in _tensors_of(arguments):
        if torch.is_grad_enabled() and value.requires_grad:
            raise RuntimeError(
                f"{op}: {name}: requires a gradient, expected none: the op has no gradient; call "
                f"it under torch.no_grad() or pass {name}.detach(){instead}"
            )
        if is_dual_level and _unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"{op}: {name}: has a tangent of forward-mode AD, expected none: the op has no "
                f"gradient; pass forward_ad.unpack_dual({name}).primal{instead}"
            )
        # In a graph of torch.compile PyTorch's own error names the operator.
        if not is_compiling and torch._C._functorch.is_batchedtensor(value):
            raise RuntimeError(
                f"{op}: {name}: batched by torch.vmap, expected a plain tensor: call the op in a "
                f"loop or once with all rows{instead}"
            )


def _tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of({f"{name}[{i}]": one for i, one in enumerate(value)})


def _kernel(op: str, arguments: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs where the tensors are plain: PyTorch's rules, then the op."""
    written = _written(arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = _named(arguments, args, kwargs)
        changed = {name: named[name] for name in written if named.get(name) is not None}
        refuse_transformed(op, named)
        if changed and not torch.is_inference_mode_enabled():
            _refuse_inference_tensors(op, changed)
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            name_unreadable(error, op, **dict(_tensors_of(named)))
        if changed:
            torch.autograd.graph.increment_version([*changed.values()])
        return result

    return kernel


def _refuse_inference_tensors(op: str, written: dict[str, Any]) -> None:
    for name, value in _tensors_of(written):
        if value.is_inference():
            raise RuntimeError(
                f"{op}: {name}: made in inference mode, expected a tensor that is not: such a one "
                "is written to under torch.inference_mode() only; call the op there, or pass "
                f"{name}.clone()"
            )


def _fake(op: str, arguments: Any, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the operator's fake, which refuses tensors on the meta device beside others."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        tensors = dict(_tensors_of(_named(arguments, args, kwargs)))
        on_meta = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
        if 0 < len(on_meta) < len(tensors):
            raise ValueError(f"{op}: {on_meta[0]}: device meta, expected cpu or cuda")
        return None if function is None else function(*args, **kwargs)

    return fake


def _named(arguments: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}


def _written(arguments: Any) -> list[str]:
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _register(op: str, overload: TorchOverload) -> None:
    name = overload.schema.partition("(")[0]
    _LIBRARY.define(overload.schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(getattr(torch.ops.jitkern, op), name.partition(".")[2] or "default")
    arguments = operator._schema.arguments
    _LIBRARY.impl(name, _kernel(op, arguments, overload.function), "CompositeExplicitAutograd")
    fake = _fake(op, arguments, overload.fake)
    torch.library.register_fake(f"jitkern::{name}", fake, lib=_LIBRARY)
    if overload.one_by_one is not None:
        operator.py_impl(FunctionalTensorMode)(_functional(operator, overload.one_by_one))
    # Without this PyTorch invents a gradient that only warns.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")


def _functional(operator: Any, one_by_one: Callable[..., None]) -> Callable[..., Any]:
    """Return the operator for graphs without writes: one by one if outputs share a storage."""
    arguments = operator._schema.arguments

    def functional(mode: Any, *args: Any, **kwargs: Any) -> Any:
        named = _named(arguments, args, kwargs)
        tensors = [named[name] for name in _written(arguments) if named.get(name) is not None]
        if len({_allocation(one) for one in tensors}) == len(tensors):
            return mode.__torch_dispatch__(operator, (), args, kwargs)
        with mode:
            return one_by_one(**named)

    return functional


def _allocation(tensor: Any) -> int:
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    storage: int = tensor.untyped_storage()._cdata
    return storage


for _op in OPS:
    import_module(f"jitkern.ops.{_op.stem}")
    for _overload in OVERLOADS.get(_op.function, ()):
        _register(_op.function, _overload)
