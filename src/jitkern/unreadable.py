"""Tensors whose memory C++ cannot read: what makes them so, in our words instead of PyTorch's."""

from __future__ import annotations

from typing import Any, NoReturn


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
