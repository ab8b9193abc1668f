"""The memory of a ``DescriptorRing``, and what its device allows."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from jitkern.fs import make_memory
from jitkern.offload.pool import PinnedPool

if TYPE_CHECKING:
    import torch


class RingMemory:
    """Memory of a descriptor, so that a producer of another process may map it, too.

    Attributes
    ----------
    fd : int
        The descriptor.
    pool : PinnedPool
        The memory, zeros at first, registered where there is a GPU.
    """

    def __init__(self, num_bytes: int) -> None:
        self.fd: int = make_memory("DescriptorRing", "jitkern-ring", num_bytes)
        try:
            self.pool: PinnedPool = PinnedPool.attach(self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        self.close_fd: weakref.finalize[[int], RingMemory] = weakref.finalize(
            self, os.close, self.fd
        )


def zeros_on(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Return zeros that every stream finds."""
    import torch

    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return memory


def memory_arg(memory: Any, device: torch.device) -> None:
    """Raise for another kind of memory than there is for rings of `device`."""
    expected = 'expected "mapped" or "device"'
    if not isinstance(memory, str):
        raise TypeError(f"DescriptorRing: memory: {type(memory).__name__}, {expected}")
    if memory not in ("mapped", "device"):
        raise ValueError(f"DescriptorRing: memory: {memory!r}, {expected}")
    if memory == "device" and device.type == "cpu":
        raise ValueError("DescriptorRing: memory: 'device' on the CPU, expected \"mapped\"")


def full_text(call: str, ticket: int, num_slots: int, is_reserved: bool, timeout_s: float) -> str:
    """Say why push `ticket` comes to no slot, and what to do."""
    slot = ticket % num_slots
    if is_reserved:
        return f"{call}: another thread has slot {slot} reserved for longer than {timeout_s:g} s"
    return (
        f"{call}: slot {slot} is still being read after {timeout_s:g} s: push "
        f"{ticket - num_slots} is not consumed; wait longer (timeout_s), consume sooner, or make a "
        f"ring of more than {num_slots} slots"
    )
