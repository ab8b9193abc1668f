"""The ops as PyTorch operators, ``torch.ops.jitkern.*``, for all that traces or wraps tensors.

Importing this module registers the ``OVERLOADS`` of each op's module. A public function imports it
when it is traced; import it yourself before you load an exported program, which names operators but
calls no function. ``ops/dispatch.py`` says which calls come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad

from jitkern.args import not_a_tensor, refuse_lazy
from jitkern.errors import name_unreadable
from jitkern.ops._ops import OPS, TorchOverload

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
        # The dispatcher's error for a value that is no tensor does not name the argument.
        tensors = {}
        for argument in operator._schema.arguments:
            value, kind = arguments.get(argument.name), str(argument.type)
            if kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None):
                tensors[argument.name] = value
        if (wrong := not_a_tensor(op, **tensors)) is not None:
            raise wrong from error
        raise


def refuse(op: str, written: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise for an op that writes in place and is no operator: see ``dispatch.refuse``."""
    refuse_transformed(op, arguments)
    _refuse_inference_tensors(op, written)


# Functions of PyTorch that do the same and have a gradient, by op.
_DIFFERENTIABLE = {"indexing": "torch.nn.functional.embedding"}


def refuse_transformed(op: str, arguments: dict[str, Any]) -> None:
    """Raise for a lazy view, or a tensor that requires grad, has a tangent or is in a vmap."""
    is_compiling = torch.compiler.is_dynamo_compiling()
    is_dual_level = not is_compiling and forward_ad._current_level >= 0
    instead = f", or use {_DIFFERENTIABLE[op]}" if op in _DIFFERENTIABLE else ""
    for name, value in _tensors_of(arguments):
        if torch.is_grad_enabled() and value.requires_grad:
            raise RuntimeError(
                f"{op}: {name}: requires a gradient, expected none: the op has no gradient; call "
                f"it under torch.no_grad() or pass {name}.detach(){instead}"
            )
        if not is_compiling:  # a graph of torch.compile resolves them
            refuse_lazy(op, **{name: value})
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
            yield from _tensors_of({f"{name}[{i}]": item for i, item in enumerate(value)})


class _Signature:
    """The arguments of an operator, in the order of its schema."""

    def __init__(self, operator: Any) -> None:
        arguments = operator._schema.arguments
        self._defaults = {a.name: a.default_value for a in arguments}
        self.written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]

    def bind(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name. The dispatcher leaves out those at their defaults."""
        return {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **kwargs}


def _kernel(op: str, signature: _Signature, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator for tensors with memory: PyTorch's rules, then the op."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(args, kwargs)
        changed = {name: named[name] for name in signature.written if named[name] is not None}
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            refuse_transformed(op, named)
        if changed and not torch.is_inference_mode_enabled():
            _refuse_inference_tensors(op, changed)
        try:
            result = run(*named.values())
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


def _fake(op: str, signature: _Signature, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator's fake, which refuses tensors on the meta device beside others."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(args, kwargs)
        tensors = dict(_tensors_of(named))
        on_meta = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
        if 0 < len(on_meta) < len(tensors):
            raise ValueError(f"{op}: {on_meta[0]}: device meta, expected cpu or cuda")
        return fake(*named.values())

    return checked


def _register(op: str, overload: TorchOverload) -> None:
    name = overload.schema.partition("(")[0]
    _LIBRARY.define(overload.schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(getattr(torch.ops.jitkern, op), name.partition(".")[2] or "default")
    signature = _Signature(operator)
    _LIBRARY.impl(name, _kernel(op, signature, overload.run), "CompositeExplicitAutograd")
    fake = _fake(op, signature, overload.fake)
    torch.library.register_fake(f"jitkern::{name}", fake, lib=_LIBRARY)
    if overload.one_by_one is not None:
        functional = _functional(operator, signature, overload.one_by_one)
        operator.py_impl(FunctionalTensorMode)(functional)
    # Without this, PyTorch's default for Autograd warns in the backward pass instead of raising.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")


def _functional(
    operator: Any, signature: _Signature, one_by_one: Callable[..., None]
) -> Callable[..., Any]:
    """Return the operator for functionalized graphs: `one_by_one` if outputs share a storage."""

    def functional(mode: Any, *args: Any, **kwargs: Any) -> Any:
        named = signature.bind(args, kwargs)
        tensors = [named[name] for name in signature.written if named[name] is not None]
        if len(set(map(_allocation, tensors))) == len(tensors):
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
    for _overload in getattr(import_module(f"jitkern.ops.{_op.stem}"), "OVERLOADS", ()):
        _register(_op.function, _overload)
