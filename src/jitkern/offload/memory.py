"""Steps that make the memory of a pool: map, bind to NUMA nodes, touch by threads, register."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.fs import free_bytes
from jitkern.host import module as host

if TYPE_CHECKING:
    import torch

_GIB = 1 << 30
_HUGE_PAGE_BYTES = 2 << 20
# A step of the first touch: after each one the display goes on, and Ctrl-C gets through.
_TOUCH_BYTES = _GIB
_SHOWN_BYTES = 4 * _GIB  # from here on a pool takes long enough to wonder

_PREFERRED, _BIND, _INTERLEAVE = 1, 2, 3  # of mbind

Shown = Callable[[str, float], None]
"""Is told what is being done, and which part of it is."""


def mapped(num_bytes: int, fd: int = -1) -> torch.Tensor:
    """Return bytes that nothing backs yet: private ones, or those of a descriptor."""
    import torch
    from torch.utils.dlpack import from_dlpack

    with torch.inference_mode(False):  # in which servers often are, and not in all threads
        found: torch.Tensor = from_dlpack(host.module()["pool_map"](num_bytes, fd))
    return found


def numa_nodes() -> tuple[int, ...]:
    """Return the nodes that have memory; none if Linux does not say."""
    try:
        text = Path("/sys/devices/system/node/has_memory").read_text().strip()
    except OSError:
        return ()
    nodes: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return tuple(nodes)


def bind(bytes_: torch.Tensor, numa: str | int | None, rank: int, num_ranks: int) -> str:
    """Choose the NUMA nodes of this rank's part before it is touched; return them in words.

    Shared memory has one policy for each page, so each rank binds its own part only.
    """
    import torch

    nodes, node = numa_nodes(), numa
    if numa == "local":
        node = _node_of_gpu() if torch.cuda.is_available() else None
    wanted = nodes if numa == "interleave" else () if node is None else (int(node),)
    if not wanted or (len(nodes) == 1 and isinstance(numa, str)):
        return "as Linux chose"
    mode = {"local": _PREFERRED, "interleave": _INTERLEAVE}.get(str(numa), _BIND)
    mask = sum(1 << node for node in wanted)
    first, last = _part(len(bytes_), rank, num_ranks)
    failed = host.module()["pool_bind"](bytes_.data_ptr() + first, last - first, mode, mask)
    if failed == errno.EPERM and numa == "local":
        return "as Linux chose"
    if failed:
        fix = "; docker run --cap-add SYS_NICE" if failed == errno.EPERM else ""
        raise RuntimeError(f"PinnedPool: numa: {numa!r}: mbind: {os.strerror(failed)}{fix}")
    return f"node{'s' if len(wanted) > 1 else ''} {' and '.join(map(str, wanted))}"


def _node_of_gpu() -> int | None:
    import torch

    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(found, "pci_bus_id"):
        return None  # before torch 2.10
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _part(num_bytes: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return where a rank's huge pages begin, and where they end."""
    part = -(-num_bytes // num_ranks)
    part = -(-part // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    return min(rank * part, num_bytes), min((rank + 1) * part, num_bytes)


def touch(bytes_: torch.Tensor, rank: int, num_ranks: int, threads: int, shown: Shown) -> None:
    """Have Linux back this rank's part of the memory; the pages of an attached pool are there."""
    touch = host.module()["pool_touch"]
    first, last = _part(len(bytes_), rank, num_ranks)
    for begin in range(first, last, _TOUCH_BYTES):
        count = min(_TOUCH_BYTES, last - begin)
        failed = touch(bytes_.data_ptr() + begin, count, threads)
        if failed:
            done = size_text(begin - first)
            raise MemoryError(
                f"PinnedPool: {os.strerror(failed)} after {done} of {size_text(len(bytes_))}; "
                "free memory, or raise the limit of the container"
            )
        shown("touching", (begin + count - first) / max(1, last - first))


def register(bytes_: torch.Tensor, shown: Shown) -> bool:
    """Register the memory with CUDA for all GPUs, and tell the ops; False without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return False
    module, device = host.module(), torch.cuda.current_device()
    shown("registering", 0.0)
    try:
        module["pool_register"](bytes_.data_ptr(), 0, len(bytes_), device)
    except RuntimeError as error:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
        raise RuntimeError(
            f"PinnedPool: {size_text(len(bytes_))} were not registered: {error}; RLIMIT_MEMLOCK is "
            f"{limit} (ulimit -l unlimited, docker run --ulimit memlock=-1), "
            f"{size_text(free_bytes() or 0)} of memory are free"
        ) from None
    module["pool_open"](bytes_.data_ptr(), device)
    shown("registering", 1.0)
    return True


def huge_bytes(begin: int, num_bytes: int) -> int:
    """Return how much of a range of this process's memory lies in huge pages."""
    found, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if head:
                inside = int(head[1], 16) < begin + num_bytes and begin < int(head[2], 16)
            elif inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:")):
                found += int(line.split()[1]) * 1024
    return min(found, num_bytes)


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
    """Show on standard error what is being done and how much of it is, or nothing."""
    console = None
    if num_bytes >= shown_bytes if progress is None else progress:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True, force_terminal=True if progress else None)
    if console is None or not console.is_terminal:
        yield lambda what, done: None
        return
    with Progress(
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda what, done: bar.update(task, description=f"{title}: {what}", completed=done)
