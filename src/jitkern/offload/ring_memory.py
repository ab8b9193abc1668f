"""The memory of a ``DescriptorRing``, and what its device allows."""

from __future__ import annotations

import fcntl
import os
import weakref
from typing import TYPE_CHECKING, Any

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
        self.fd = os.memfd_create("jitkern-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.pool = PinnedPool.attach(self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        self.close_fd = weakref.finalize(self, os.close, self.fd)


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
