"""``PinnedMemory``: mapped in huge pages, touched by threads, registered with CUDA."""

from __future__ import annotations

import atexit
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from jitkern.fs import free_bytes
from jitkern.host import module as host

_GIB = 1 << 30
_HUGE_PAGE_BYTES = 2 << 20
_MAX_THREADS = 32  # 8 back 38 GB/s of used memory, 16 52: what is left is the kernel's zeroing
# A step of the first touch; the display and Ctrl-C come in between.
_TOUCH_BYTES = _GIB
_SHOWN_BYTES = 4 * _GIB  # progress is shown from this size on

Shown = Callable[[str, float], None]
"""Is told the step, and the part of it that is done, 0 to 1."""


def _quiet(what: str, done: float) -> None:
    pass


class PinnedMemory:
    """Bytes that one or several processes map, as `tensor`; the last tensor gives them back.

    ``fd`` is a descriptor of the memory; by default it is private. Each rank touches its part only,
    on the node of its GPU as far as that has room.
    """

    def __init__(
        self,
        num_bytes: int,
        fd: int = -1,
        rank: int = 0,
        num_ranks: int = 1,
        shown: Shown = _quiet,
    ) -> None:
        made = host.module()["make_pinned_memory"](num_bytes, fd)
        with torch.inference_mode(False):  # or it could not be written outside of that
            self.tensor: torch.Tensor = from_dlpack(made[0])
        self._bind, self._touch, self._register, self.close = made[1:]
        self.is_registered = False
        self.register_s = 0.0
        begin = time.perf_counter()
        pages = -(-num_bytes // (num_ranks * _HUGE_PAGE_BYTES))  # of each rank, rounded up
        first, last = (min(i * pages * _HUGE_PAGE_BYTES, num_bytes) for i in (rank, rank + 1))
        self.numa_node = self._touch_part(first, last, shown)
        self.touch_s: float = time.perf_counter() - begin

    def _touch_part(self, first: int, last: int, shown: Shown) -> int | None:
        """Have Linux back a part of the memory; the pages of an attached pool are there."""
        node = _node_of_gpu()
        if node is not None and not self._bind(first, last - first, node):
            node = None  # as in a container without SYS_NICE
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        for begin in range(first, last, _TOUCH_BYTES):
            count = min(_TOUCH_BYTES, last - begin)
            failed = self._touch(begin, count, threads)
            if failed:
                done, whole = size_text(begin - first), size_text(len(self.tensor))
                raise MemoryError(
                    f"PinnedPool: {os.strerror(failed)} after {done} of {whole}; "
                    "free memory, or raise the limit of the container"
                )
            shown("touching", (begin + count - first) / (last - first))
        return node

    def register(self, shown: Shown = _quiet) -> None:
        """Register it for all GPUs, if there are any, after all ranks have touched their parts.

        CUDA would touch the rest by one thread.
        """
        if not torch.cuda.is_available():
            return
        shown("registering", 0.0)
        begin = time.perf_counter()
        try:
            self._register(torch.cuda.current_device())
        except RuntimeError as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
            raise RuntimeError(
                f"PinnedPool: {size_text(len(self.tensor))} were not registered: {error}; "
                f"RLIMIT_MEMLOCK is {limit} (ulimit -l unlimited, docker run --ulimit memlock=-1), "
                f"{size_text(free_bytes() or 0)} of memory are free"
            ) from None
        self.is_registered, self.register_s = True, time.perf_counter() - begin
        shown("registering", 1.0)
        _registered.add(self)


_registered: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Unregister before CUDA goes."""
    for memory in list(_registered):
        memory.close()


def _node_of_gpu() -> int | None:
    """Return the NUMA node of the current GPU, if Linux tells."""
    if torch.cuda.is_available():
        gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        with suppress(AttributeError, OSError, ValueError):  # AttributeError: before torch 2.10
            address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
            return node if 0 <= node < 64 else None
    return None


def require_free(num_bytes: int, argument: str = "PinnedPool: size") -> None:
    """Raise MemoryError if less is free: Linux would kill the process later."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        text = f"{size_text(num_bytes)}, expected at most the {size_text(free)} that are free"
        raise MemoryError(f"{argument}: {text}")


def size_text(num_bytes: float) -> str:
    """Return a size for people."""
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"


@contextmanager
def display(
    num_bytes: int,
    progress: bool | None,
    title: str = "PinnedPool",
    shown_bytes: int = _SHOWN_BYTES,
) -> Iterator[Shown]:
    """Show progress on standard error, if it is asked for or the size is large."""
    console = None
    if num_bytes >= shown_bytes if progress is None else progress:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True, force_terminal=True if progress else None)
    if console is None or not console.is_terminal:
        yield _quiet
        return
    with Progress(
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda what, done: bar.update(task, description=f"{title}: {what}", completed=done)
