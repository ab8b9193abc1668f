"""Where a call of an op goes: straight to C++, or through ``torch.ops.jitkern`` first.

What traces, differentiates or wraps tensors has to see the op. Whether something traces is asked in
C++, in 3 ns (csrc/host/launch.cc); what a tensor of PyTorch says is asked here, and not in
inference mode, which has no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from jitkern.errors import UNREADABLE as UNREADABLE
from jitkern.errors import name_unreadable as name_unreadable

F = TypeVar("F", bound=Callable[..., Any])

# PyTorch's functions, from the first call on: importing an op, as `jitkern warm` does to compile
# its kernels, does not import PyTorch, which takes a second.
_is_grad_enabled: Callable[[], bool]
_increment_version: Callable[[Any], None]
_num_modes: Callable[[], int]
_tracing_state: Callable[[], object]
_forward_ad: Any  # a dual tensor of forward-mode AD looks like any other; no_grad() is for others


def in_inference_mode() -> bool:
    """Tell whether inference mode is on: ``torch.is_inference_mode_enabled`` from then on."""
    global _is_grad_enabled, _increment_version, _forward_ad, _num_modes, _tracing_state
    import torch

    _is_grad_enabled = torch.is_grad_enabled
    # The public name, torch.autograd.graph.increment_version, takes 0.1 us more.
    _increment_version = torch._C._increment_version
    _forward_ad = torch.autograd.forward_ad
    _num_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
    globals()["in_inference_mode"] = torch.is_inference_mode_enabled
    return torch.is_inference_mode_enabled()


def may_write(written: tuple[Any, ...], read: tuple[Any, ...]) -> bool:
    """Tell whether a call that writes may go straight to C++; not to be asked in inference mode.

    Indices, which have no gradient, are not given. C++ also takes another library's tensors.
    """
    if _forward_ad._current_level >= 0:
        return False
    try:
        if _is_grad_enabled():
            for tensor in (*written, *read):
                if tensor.requires_grad:
                    return False
        for tensor in written:
            tensor._version  # noqa: B018 - half of what is_inference() takes
    except RuntimeError:
        return False  # made in inference mode: it has no version
    except (AttributeError, TypeError):
        tensors = _of_torch(written), _of_torch(read)
        is_fewer = len(tensors[0]) + len(tensors[1]) < len(written) + len(read)
        return not is_fewer or may_write(*tensors)
    return True


def _of_torch(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those that are PyTorch's: another library's have neither gradient nor version."""
    import torch

    return tuple(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def wrote(*tensors: Any) -> None:
    """Count what C++ has written to as changed, as after PyTorch's operations in place.

    A backward pass that has kept the old content then raises instead of using the new; in inference
    mode, too, for tensors that were not made in it.
    """
    try:
        _increment_version(tensors)
    except (RuntimeError, TypeError):
        with suppress(RuntimeError, TypeError):
            _increment_version(_of_torch(tensors))


def wants_gradient(tensor: Any) -> bool:
    """Tell whether PyTorch has to see what becomes of `tensor`."""
    if _forward_ad._current_level >= 0:
        return True
    return _is_grad_enabled() and getattr(tensor, "requires_grad", False)


def refuse(op: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """Raise for a call that PyTorch would have to see, of an op that it never sees.

    RuntimeError if an argument requires a gradient, has a tangent or is batched, or a written one
    was made in inference mode. Nothing in forward-mode AD without a tangent.
    """
    from jitkern import torch_ops

    torch_ops.refuse(op, written, {**written, **read})


def refuse_transformed(op: str, **arguments: Any) -> None:
    """Raise RuntimeError for a tensor that requires a gradient, has a tangent or is batched."""
    from jitkern import torch_ops

    torch_ops.refuse_transformed(op, arguments)


def refuse_watchers(op: str) -> None:
    """Raise RuntimeError if a tracer or dispatch mode is active, which would not see the op."""
    if _num_modes() > 0 or _tracing_state() is not None:
        raise unseen(op)


def refuse_objects(op: str, **objects: object) -> None:
    """Raise RuntimeError if one is given to an op while PyTorch has to see its call."""
    for name, value in objects.items():
        if value is not None:
            came = f"{op}: {name}: {type(value).__name__} while PyTorch traces or differentiates"
            raise RuntimeError(f"{came}, expected None")


def unseen(op: str) -> RuntimeError:
    """Return the error of a call that an active tracer or dispatch mode would not see."""
    return RuntimeError(
        f"{op}: dst: written while a tracer or a dispatch mode of PyTorch is active, expected "
        "neither: it would see nothing of the copy"
    )


def require_wrapper(
    error: Exception, op: str, options: Mapping[str, str], /, **arguments: Any
) -> None:
    """Raise for a call that failed in C++, unless a tensor wraps others, which PyTorch unwraps.

    Inside ``torch.vmap`` and ``torch.func.grad``, a fake tensor, a subclass with
    ``__torch_dispatch__``; but a nested tensor raises.
    """
    import torch

    for name, tensor in arguments.items():
        if name in options or not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            continue
        is_subclass = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if is_subclass or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
    name_unreadable(error, op, options, **arguments)


def through_torch(op: str, overload: str = "default", /, **arguments: Any) -> Any:
    """Call an op as the PyTorch operator that it is; see ``torch_ops.call``."""
    from jitkern import torch_ops

    return torch_ops.call(op, overload, **arguments)


def traced_as(function: Callable[..., Any]) -> Callable[[F], F]:
    """Have ``torch.compile`` trace `function` in the place of the one below.

    PyTorch's public way, ``substitute_in_graph``, imports its compiler, which takes a second.
    """

    def mark(public: F) -> F:
        public._torchdynamo_inline = function  # type: ignore[attr-defined]
        return public

    return mark
