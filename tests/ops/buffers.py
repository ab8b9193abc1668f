"""Tensors with known bytes all around them, so that a test sees every byte an op has written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import jitkern

ROW_BYTES = [*range(1, 13), 15, 16, 17, 21, 23, 24, 31, 32, 33, 37, 39, 40]
ROW_BYTES += [256, 576, 656, 657, 1024, 7168, 8192]

INT_DTYPES = [torch.int32, torch.int64]

DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16,
    torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64,
    torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip

GUARD_BYTES = 512


@dataclass(frozen=True)
class Buffer:
    """A tensor ``view`` inside a larger piece of random bytes, ``whole``."""

    whole: Tensor
    view: Tensor

    def twin(self) -> Buffer:
        """Return a copy of every byte, with the same view into it."""
        whole = self.whole.clone()
        items = whole.view(self.view.dtype)
        view = items.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        return Buffer(whole, view)

    def part(self, view: Tensor) -> Buffer:
        """Return another view into the same bytes."""
        return Buffer(self.whole, view)

    def same(self, other: Buffer) -> bool:
        return torch.equal(self.whole.cpu(), other.whole.cpu())


def make_buffer(
    shape: Sequence[int],
    dtype: torch.dtype = torch.uint8,
    device: torch.device | str = "cpu",
    *,
    gap: int = 0,
    offset: int = 0,
    pinned: bool = False,
    seed: int = 0,
) -> Buffer:
    """Make a buffer of random bytes with rows ``gap`` items apart.

    ``offset`` moves the base by so many items from an address that is aligned to 64 bytes.
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    if len(shape) > 0:
        strides[0] = int(torch.Size(shape[1:]).numel()) + gap
    return strided_buffer(shape, strides, dtype, device, offset=offset, pinned=pinned, seed=seed)


def strided_buffer(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    offset: int = 0,
    pinned: bool = False,
    seed: int = 0,
) -> Buffer:
    guard, item_bytes = GUARD_BYTES // dtype.itemsize, dtype.itemsize
    reach = 1 + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
    whole = random_bytes((guard + offset + reach + guard) * item_bytes, seed)
    whole = whole.pin_memory() if pinned else whole.to(device)
    view = whole.view(dtype).as_strided(tuple(shape), tuple(strides), guard + offset)
    return Buffer(whole, view)


def random_bytes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def bytes_of(view: Tensor) -> list[int]:
    """Return the addresses of a view of bytes; one that is there several times is so here."""
    steps = [
        range(0, n * s, s) if s else [0] * n for n, s in zip(view.shape, view.stride(), strict=True)
    ]
    return [view.data_ptr() + sum(at) for at in itertools.product(*steps)]


def host_buffer(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, **how: Any
) -> Buffer:
    """Make a buffer in host memory as ``h2d_gather`` to ``device`` wants it: pinned for a GPU."""
    return make_buffer(shape, dtype, "cpu", pinned=device.type == "cuda", **how)


def to_index(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def distinct(count: int, below: int, seed: int = 0) -> list[int]:
    """Return ``count`` different row numbers in random order."""
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randperm(below, generator=generator)[:count]]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def out_of_range(device: torch.device, text: str) -> Iterator[None]:
    """Expect the IndexError ``text``: at once on the CPU, from a later call on CUDA."""
    if device.type == "cpu":
        with pytest.raises(IndexError, match=re.escape(text)):
            yield
        return
    yield
    torch.cuda.synchronize(device)
    with pytest.raises(IndexError, match=re.escape(text)) as caught:
        jitkern.check(device)
    assert "found by an earlier call" in str(caught.value)
    jitkern.check(device)  # raising it has cleared it
