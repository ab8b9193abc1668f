"""What Linux says of host memory: how much is free, on which NUMA nodes, in huge pages or not."""

from __future__ import annotations

import re
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Return how much memory the process may still take, None where Linux does not say.

    What the machine has available, or what the process's control group leaves of its limit.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    machine = int(found[1]) * 1024 if found else None
    group = _left_of_group()
    known = [value for value in (machine, group) if value is not None]
    return min(known, default=None)


def _left_of_group() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (_CGROUP / "memory.stat").read_text(), re.M)
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + (int(cached[1]) if cached else 0))


def numa_nodes() -> tuple[int, ...]:
    """Return the nodes that have memory; none where Linux does not say."""
    try:
        text = (_NODES / "has_memory").read_text().strip()
    except OSError:
        return ()
    nodes: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return tuple(nodes)


def node_of_pci(address: str) -> int | None:
    """Return the node that a device such as ``0000:1b:00.0`` hangs on, None if Linux names none."""
    try:
        node = int((_PCI / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


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
