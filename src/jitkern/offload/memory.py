"""``PinnedMemory``: mapped in huge pages, touched by threads, registered with CUDA."""

from __future__ import annotations

import atexit
import fcntl
import os
import resource
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from jitkern.fs import free_bytes, size_text
from jitkern.host import library as host

_GIB = 1 << 30
_HUGE_PAGE_BYTES = 2 << 20
_MAX_THREADS = 32  # 8 threads back 38 GB/s of used memory, 16 52: the kernel's zeroing is the rest
_LOCK = "/dev/shm"
_LOCK_S = 120.0  # then without the lock: a process may be stopped; 1 TiB takes 45 s to touch
_TOUCH_BYTES = _GIB  # per call into C++; Ctrl-C is handled between calls


class PinnedMemory:
    """Bytes mapped by one or several processes, as `tensor`; the last tensor frees them.

    ``fd`` is a descriptor of shared memory; by default the memory is private. Each rank touches its
    part only, on the NUMA node of its GPU while that has room.
    """

    def __init__(self, num_bytes: int, fd: int = -1, rank: int = 0, world_size: int = 1) -> None:
        memory, *methods = host.module()["make_pinned_memory"](num_bytes, fd)
        self._bind, self._touch, self._register, self.close = methods
        with torch.inference_mode(False):  # inference tensors cannot be written outside of it
            self.tensor: torch.Tensor = from_dlpack(memory)
        self.is_registered = False
        self.register_s = 0.0
        begin = time.perf_counter()
        part_bytes = -(-num_bytes // (world_size * _HUGE_PAGE_BYTES)) * _HUGE_PAGE_BYTES
        first, last = (min(i * part_bytes, num_bytes) for i in (rank, rank + 1))
        self.numa_node = self._touch_part(first, last)
        self.touch_s: float = time.perf_counter() - begin

    def _touch_part(self, first: int, last: int) -> int | None:
        """Make Linux back a part of the memory with pages; return their NUMA node."""
        node = _node_of_gpu()
        if node is not None and not self._bind(first, last - first, node):
            node = None  # a container without SYS_NICE refuses
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        for begin in range(first, last, _TOUCH_BYTES):
            count = min(_TOUCH_BYTES, last - begin)
            errno = self._touch(begin, count, threads)
            if errno:
                done, total = size_text(begin - first), size_text(len(self.tensor))
                raise MemoryError(
                    f"PinnedPool: {os.strerror(errno)} after {done} of {total}; "
                    "free memory, or raise the limit of the container"
                )
        return node

    def register(self) -> None:
        """Register the memory for all GPUs, if there are any.

        All ranks must have touched their parts: CUDA would touch the rest with one thread.
        """
        if not torch.cuda.is_available():
            return
        begin = time.perf_counter()
        try:
            device = torch.cuda.current_device()
            self._register(device, _torch_streams(device))
        except RuntimeError as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
            raise RuntimeError(
                f"PinnedPool: {size_text(len(self.tensor))} were not registered: {error}; "
                f"RLIMIT_MEMLOCK is {limit} (ulimit -l unlimited, docker run --ulimit memlock=-1), "
                f"{size_text(free_bytes() or 0)} of memory are free"
            ) from None
        self.is_registered, self.register_s = True, time.perf_counter() - begin
        _registered.add(self)


_registered: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Unregister before CUDA shuts down."""
    for memory in list(_registered):
        memory.close()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU like ``torch.cuda.synchronize``, without breaking other threads' captures."""
    host.module()["synchronize_gpu"](device.index, _torch_streams(device.index))


def _torch_streams(device: int) -> list[int]:
    """Return the handles of all streams that torch uses on a GPU; 0 is its default."""
    # torch hands out 32 streams of each of 4 priorities, in turn.
    make: Any = torch.cuda.Stream
    streams = [make(device, priority=priority) for priority in range(-3, 1) for _ in range(32)]
    return [0, *{stream.cuda_stream for stream in streams}]


def _node_of_gpu() -> int | None:
    """Return the NUMA node of the current GPU if Linux reports it."""
    if torch.cuda.is_available():
        gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        with suppress(AttributeError, OSError, ValueError):  # AttributeError: before torch 2.10
            address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
            return node if 0 <= node < 64 else None
    return None


def require_free(num_bytes: int, argument: str = "PinnedPool: num_bytes") -> None:
    """Raise MemoryError if less memory is free: Linux would kill the process later."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        text = f"{size_text(num_bytes)}, expected at most the {size_text(free)} that are free"
        raise MemoryError(f"{argument}: {text}")


@contextmanager
def taking(num_bytes: int) -> Iterator[None]:
    """Require free memory, and let no other pool of the machine take any inside of ``with``.

    Otherwise two pools made at once would each count the same memory as free. The lock is on a
    folder that all processes see, so no file is left.
    """
    folder = os.open(_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _LOCK_S
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        require_free(num_bytes)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # a forked child may hold the descriptor too
        os.close(folder)
