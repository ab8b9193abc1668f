"""What several ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

INDEX_BYTES = (4, 8)
"""Bytes of the index types that every op takes: int32 and int64."""


class TorchOverload(NamedTuple):
    """One operator that an op is for PyTorch: an entry of its module's ``TORCH_OVERLOADS``."""

    schema: str
    """Behind ``torch.ops.jitkern.``: ``indexing.out(Tensor weights, ...) -> ()``."""

    function: Callable[..., Any]

    fake: Callable[..., Any] | None = None
    """The same on tensors without memory: returns one of the result's shape; None: no result."""

    differentiable: Callable[[Callable[..., Any]], Any] | None = None
    """Given the operator without a gradient, returns the ``torch.autograd.Function`` that has one.

    Its ``apply`` takes the operator's arguments in their order.
    """

    one_by_one: Callable[..., None] | None = None
    """The same by operators that write to one tensor each, for tensors that share an allocation.

    Of two that do, PyTorch's inductor writes to one in place, and to a copy of the allocation, all
    of a pool of K and V, in the other's stead; in torch 2.11 it copies from the wrong address.
    """


def widest_vec_bytes(row_bytes: int) -> int:
    """Return the widest vector (16, 8, 4, 2 or 1 bytes) that divides a row.

    This is what a call uses where base addresses and strides are multiples of it, as they are for
    every contiguous torch tensor.
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes: {row_bytes}, expected at least 1")
    return min(16, row_bytes & -row_bytes)


def entry_name(
    stem: str, row_bytes: int, vec_bytes: int, index_bytes: int, *, kind: str = ""
) -> str:
    """Return what a profiler shows of an op's kernel.

    Examples
    --------
    >>> entry_name("index", 656, 16, 8)
    'jitkern_index_656B_v16_i64'
    """
    name = f"jitkern_{stem}_{row_bytes}B_v{vec_bytes}_i{8 * index_bytes}"
    return f"{name}_{kind}" if kind else name


def name_unreadable(error: Exception, op: str, **arguments: Any) -> NoReturn:
    """Raise ValueError naming the argument whose memory cannot be read; `error` if all can.

    The way to C++ fails with PyTorch's own words, and no argument's name, for a tensor that is not
    plain memory: on the meta device, sparse, quantised, nested, or inside vmap. Called once a call
    has failed, so that a call that succeeds pays nothing.
    """
    import torch
    import tvm_ffi

    for name, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        try:
            tvm_ffi.from_dlpack(tensor)
        except Exception as refusal:
            came, expected = _trait_of(tensor, refusal)
            raise ValueError(f"{op}: {name}: {came}, expected {expected}") from error
    raise error


def _trait_of(tensor: Any, refusal: Exception) -> tuple[str, str]:
    """Say what makes a tensor unreadable, and what it should be."""
    import torch

    if tensor.layout != torch.strided:
        return f"layout {_short(tensor.layout)}", "strided"
    if tensor.is_quantized:
        return f"dtype {_short(tensor.dtype)}", "a dtype that is not quantised"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"device {tensor.device}", "cpu or cuda"
    reason = str(refusal).strip().partition("\n")[0]
    return f"a tensor without readable memory ({reason})", "a plain tensor"


def _short(torch_name: Any) -> str:
    return str(torch_name).removeprefix("torch.")


def not_a_tensor(op: str, **arguments: object) -> TypeError | None:
    """Return an error that names the first argument that is no tensor; None where all are."""
    import torch

    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            return TypeError(f"{op}: {name}: {type_text(value)}, expected a tensor")
    return None


def type_text(value: object) -> str:
    """Return what a message calls an argument that is of the wrong type."""
    return "None" if value is None else type(value).__name__
