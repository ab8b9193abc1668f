"""Memory that a communicator has registered: NCCL reads and writes it where it is."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from jitkern.host import module as host

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGN_BYTES = 512  # of PyTorch's allocator


class _Piece:
    """A range of the memory as PyTorch takes it; the tensor made of it keeps it."""

    def __init__(self, memory: _Memory, begin: int, num_bytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.address + begin, False),
            "version": 3,
        }


class _Memory:
    """Device memory that is freed when nothing is made of it any more."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.ordinal = device.index
        self.address = int(host.module()["nccl_allocate"](self.ordinal, num_bytes))
        self.is_of_nccl = self.address != 0
        if not self.is_of_nccl:  # before 2.19: calls are the same, and take NCCL a copy
            self._tensor = _new_bytes(num_bytes, device)
            self.address = self._tensor.data_ptr()

    def __del__(self) -> None:
        if getattr(self, "is_of_nccl", False):
            with suppress(Exception):  # at the end of the process there may be no driver any more
                host.module()["nccl_free"](self.ordinal, self.address)


def _new_bytes(num_bytes: int, device: torch.device) -> Tensor:
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _as_tensor(piece: _Piece, device: torch.device) -> Tensor:
    import torch

    return torch.as_tensor(piece, device=device)


class Buffer:
    """Registered memory, given out piece by piece in the order in which it is asked for.

    Ranks ask in the same order, so that what they make at the same time lies at the same place:
    that is what NCCL's fastest kernels need. When all tensors of it are gone, it begins anew.

    Raises
    ------
    RuntimeError
        There is not that much memory on the GPU.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._memory = _Memory(device, num_bytes) if num_bytes else None
        self._used = 0
        self._pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()

    @property
    def address(self) -> int:
        """Where it begins; 0 if there is none."""
        return 0 if self._memory is None else self._memory.address

    @property
    def is_of_nccl(self) -> bool:
        """Whether it is memory that can be registered."""
        return self._memory is not None and self._memory.is_of_nccl

    def whole(self) -> Tensor:
        """Return all of it as uint8."""
        return self._tensor(0, self.num_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in it. Raises ValueError where it is full."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not self._pieces:
            self._used = 0
        left = self.num_bytes - self._used
        if num_bytes > left:
            raise ValueError(
                f"empty: shape {tuple(shape)} of {dtype}: {num_bytes} bytes, expected at most "
                f"{left}, which are left of the {self.num_bytes} of the communicator's buffer; "
                "give a larger max_size_bytes"
            )
        begin = self._used
        self._used += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._tensor(begin, num_bytes).view(dtype).view(tuple(shape))

    def _tensor(self, begin: int, num_bytes: int) -> Tensor:
        if num_bytes == 0 or self._memory is None:
            return _new_bytes(0, self._device)
        piece = _Piece(self._memory, begin, num_bytes)
        self._pieces.add(piece)
        return _as_tensor(piece, self._device)
