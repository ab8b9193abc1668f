"""What Linux says of host memory: on which NUMA nodes it is, in huge pages or not."""

from __future__ import annotations

import re
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


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
