"""The way of a call: straight to C++, or through PyTorch's dispatcher.

Tracing, tensor subclasses and autograd need the op to go through PyTorch's dispatcher, as the
operator ``torch.ops.jitkern.*``. That takes 10 us more, so a plain call goes straight to C++. Who
asks, in the order of a call:

1. ``torch.compile`` never runs an op's function. It traces the function that `traced_as` names,
   which calls the operator.
2. `is_plain`, before the call of C++ and unless inference mode is on: does autograd track an
   argument, or is one written that was made in inference mode?
3. C++, before anything else, in 3 ns (csrc/host/launch.cc): is a dispatch mode or
   ``torch.jit.trace`` active in this thread? Then it does nothing and returns true.
4. `require_wrapper`, after C++ could not read an argument: does a tensor wrap others, as fake
   tensors, subclasses and those inside ``torch.func`` do?

An answer of yes leads to the operator, by `through_torch`. The operator refuses what an op does not
support, such as a tensor that requires a gradient: ``torch_ops.refuse_transformed``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from jitkern.errors import UNREADABLE as UNREADABLE
from jitkern.errors import name_unreadable
from jitkern.gate import gate

AUTO = "auto"
"""Default of options. An op passes None to C++ in its place: a string takes 0.13 us."""

F = TypeVar("F", bound=Callable[..., Any])


# Bound by `_InferenceMode`.
_is_grad_enabled: Callable[[], bool]
_increment_version: Callable[[Any], None]
_num_modes: Callable[[], int]
_tracing_state: Callable[[], object]
_forward_ad: Any


class _InferenceMode:
    """``is_enabled`` is PyTorch's function, once the first call has imported PyTorch.

    Importing an op, as `jitkern warm` does to compile its kernels, does not import PyTorch, which
    takes a second.
    """

    __slots__ = ("is_enabled",)

    def __init__(self) -> None:
        self.is_enabled: Callable[[], bool] = self._bind

    def _bind(self) -> bool:
        global _is_grad_enabled, _increment_version, _num_modes, _tracing_state, _forward_ad
        with gate:
            import torch

        _is_grad_enabled = torch.is_grad_enabled
        # The public name, torch.autograd.graph.increment_version, takes 0.1 us more.
        _increment_version = torch._C._increment_version
        _num_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
        _forward_ad = torch.autograd.forward_ad
        self.is_enabled = torch.is_inference_mode_enabled
        return self.is_enabled()


inference_mode = _InferenceMode()


def is_plain(written: tuple[Any, ...], read: tuple[Any, ...]) -> bool:
    """Tell whether autograd has no part in a call outside of inference mode.

    `read` are the tensors whose values are read. Indices, which have no gradient, are left out.
    Tensors of other libraries are plain.
    """
    if _forward_ad._current_level >= 0:  # no_grad() does not switch it off
        return False
    try:
        is_grad_enabled = _is_grad_enabled()
        for tensor in written:
            if is_grad_enabled and tensor.requires_grad:
                return False
            tensor._version  # noqa: B018 - takes half as long as is_inference()
        if is_grad_enabled:
            for tensor in read:
                if tensor.requires_grad:
                    return False
    except RuntimeError:
        return False  # an inference tensor: it has no version counter
    except (AttributeError, TypeError):
        known_written, known_read = _torch_tensors(written), _torch_tensors(read)
        is_fewer = len(known_written) + len(known_read) < len(written) + len(read)
        return not is_fewer or is_plain(known_written, known_read)
    return True


def _torch_tensors(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return PyTorch's tensors: another library's have neither gradient nor version counter."""
    import torch

    return tuple(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def bump_versions(tensors: tuple[Any, ...]) -> None:
    """Bump the autograd version counter of tensors written by C++.

    A backward pass that has kept the old content then raises instead of using the new, as after
    PyTorch's operations in place; also in inference mode, for tensors that were made outside of it.
    """
    try:
        _increment_version(tensors)
    except (RuntimeError, TypeError):  # inference tensors, or another library's
        with suppress(RuntimeError, TypeError):
            _increment_version(_torch_tensors(tensors))


def require_wrapper(error: Exception, op: str, /, **tensors: Any) -> None:
    """Raise the error of a call of C++, unless a tensor wraps others, which PyTorch unwraps.

    Wrappers are fake tensors, those inside ``torch.vmap`` and ``torch.func.grad``, and subclasses
    with ``__torch_dispatch__``; nested tensors are not.
    """
    import torch

    for tensor in tensors.values():
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            continue
        is_subclass = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if is_subclass or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
    name_unreadable(error, op, **tensors)


def through_torch(op: str, overload: str = "default", /, **arguments: Any) -> Any:
    """Call an op as the PyTorch operator that it is; see ``torch_ops.call``."""
    from jitkern import torch_ops

    return torch_ops.call(op, overload, **arguments)


def traced_as(function: Callable[..., Any]) -> Callable[[F], F]:
    """Make ``torch.compile`` trace `function` in the place of the decorated one.

    PyTorch's public way, ``substitute_in_graph``, imports its compiler, which takes a second.
    """

    def mark(public: F) -> F:
        public._torchdynamo_inline = function  # type: ignore[attr-defined]
        return public

    return mark


# -- ops that are no operators of PyTorch ----------------------------------------------------------


def untraced(function: F) -> F:
    """Make ``torch.compile`` break its graph at calls, or raise the reason with ``fullgraph``.

    PyTorch's public way, ``torch.compiler.disable``, imports its compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        f"{function.__name__}: no operator of PyTorch, expected a call outside of the graph"
    )
    return function


def refuse(op: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """Raise for a call that is not plain, of an op that is no operator.

    RuntimeError if an argument requires a gradient, has a tangent or is batched, or a written one
    was made in inference mode. A call inside forward-mode AD without a tangent passes.
    """
    from jitkern import torch_ops

    torch_ops.refuse(op, written, {**written, **read})


def refuse_transformed(op: str, **arguments: Any) -> None:
    """Raise RuntimeError for a tensor that requires a gradient, has a tangent or is batched."""
    from jitkern import torch_ops

    torch_ops.refuse_transformed(op, arguments)


def refuse_tracing(op: str) -> None:
    """Raise RuntimeError if a tracer or dispatch mode is active, which would not see the op."""
    inference_mode.is_enabled()  # the first call binds the functions below
    if _num_modes() > 0 or _tracing_state() is not None:
        raise untraceable(op)


def untraceable(op: str) -> RuntimeError:
    """Return the error of an op that was called while a tracer or dispatch mode is active."""
    return RuntimeError(
        f"{op}: cannot run inside torch.jit.trace or a TorchDispatchMode: the copy would not be "
        "traced"
    )
