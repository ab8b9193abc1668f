"""What each op means, in PyTorch: slow and plain on purpose, the kernels are held to it.

And what tests of all ops ask of their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def as_bytes(rows: Tensor) -> Tensor:
    """Rows as raw bytes ``[rows, row_bytes]``: NaN patterns and float8 compare bit for bit."""
    if rows.numel() == 0:
        return torch.empty(rows.shape[0], 0, dtype=torch.uint8, device=rows.device)
    return rows.contiguous().reshape(rows.shape[0], -1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dim() == 0:
        a, b = a.reshape(1), b.reshape(1)
    return torch.equal(as_bytes(a), as_bytes(b.to(a.device)))


def ref_store(k_cache: Tensor, v_cache: Tensor, indices: Tensor, k: Tensor, v: Tensor) -> None:
    """``k_cache[indices] = k`` and the same for v; a negative index skips its row."""
    keep = indices >= 0
    slots = indices[keep].long()
    for cache, rows in ((k_cache, k), (v_cache, v)):
        _assign_rows(cache, slots, _rows(rows, keep))


def ref_indexing(
    weights: Tensor,
    indices: Tensor,
    vocab_range: tuple[int, int] | None = None,
    added_range: tuple[int, int] | None = None,
) -> Tensor:
    """``weights[indices - start]``; zeros for a negative index and outside ``(start, length)``.

    The rows of a second range are behind those of the first.
    """
    ranges = [vocab_range if vocab_range is not None else (0, weights.shape[0])]
    ranges += [added_range] if added_range is not None else []
    numbers = indices.reshape(-1).tolist()
    rows, first_row = [-1] * len(numbers), 0
    for start, length in ranges:
        for at, number in enumerate(numbers):
            if number >= 0 and start <= number < start + length:
                rows[at] = first_row + number - start
        first_row += length
    shape = (*indices.shape, *weights.shape[1:])
    output = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
    flat = output.reshape(indices.numel(), *weights.shape[1:])
    local = torch.tensor(rows, dtype=torch.int64, device=weights.device)
    where = (local >= 0).nonzero().reshape(-1)
    _assign_rows(flat, where, _rows(weights, local[where]))
    return flat.reshape(shape)


def ref_h2d_gather(src: Tensor, dst: Tensor, pairs: Tensor, slot_map: Tensor | None = None) -> None:
    """``dst[pairs[..., 1]] = src[pairs[..., 0]]``; a pair with a negative row is skipped."""
    flat = pairs.reshape(-1, 2).long().cpu()
    flat = flat[(flat >= 0).all(dim=1)]
    _assign_rows(
        dst, flat[:, 1].to(dst.device), _rows(src, flat[:, 0].to(src.device)).to(dst.device)
    )
    if slot_map is not None:
        slot_map[flat[:, 0].to(slot_map.device)] = flat[:, 1].to(slot_map)


def ref_unpack(src: Tensor, dst: Tensor, descriptors: Tensor, count: int | None = None) -> None:
    """Piece by piece."""
    to, source = (one.reshape(-1).view(torch.uint8) for one in (dst, src))
    listed = descriptors.tolist()
    for row in listed if count is None else listed[: max(count, 0)]:
        src_off, dst_off, length, pieces, src_stride, dst_stride = (*row, 1, 0, 0)[:6]
        for _ in range(pieces if length else 0):
            to[dst_off : dst_off + length].copy_(source[src_off : src_off + length])
            src_off, dst_off = src_off + src_stride, dst_off + dst_stride


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width: float8 cannot be indexed everywhere."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(width[tensor.element_size()]) if tensor.element_size() in width else tensor


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return as_integers(tensor)[rows].view(tensor.dtype)


def _assign_rows(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    as_integers(tensor)[rows] = as_integers(values)


def flat(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return all tensors by their names in messages."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        values = {f"{name}[{i}]": one for i, one in enumerate(value)} if type(value) is list else {}
        found |= {n: one for n, one in (values or {name: value}).items() if torch.is_tensor(one)}
    return found


def replaced(arguments: dict[str, Any], change: Callable[[str, Tensor], Any]) -> dict[str, Any]:
    """Return the arguments with each tensor as `change` makes it of its name and itself."""

    def new(name: str, value: Any) -> Any:
        if type(value) is list:
            return [change(f"{name}[{i}]", one) for i, one in enumerate(value)]
        return change(name, value) if torch.is_tensor(value) else value

    return {name: new(name, value) for name, value in arguments.items()}


def refusals(call: Any, good: dict[str, Any], *cases: tuple[dict[str, Any], type[Exception], str]):
    """Return a test: with these instead of good arguments the call raises this error."""

    @pytest.mark.parametrize(("wrong", "kind", "text"), cases, ids=[text for *_, text in cases])
    def test(wrong: dict[str, Any], kind: type[Exception], text: str) -> None:
        with pytest.raises(kind, match=f"^{call.__name__}: {re.escape(text)}"):
            call(**{**good, **wrong})

    return test
