"""How much memory the process may still take, by what Linux says."""

from __future__ import annotations

import re
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")

# Of a control group, version 2 and 1: its directory, its limit, what is used of it, and how much of
# that is files which Linux drops when somebody wants the memory.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int | None:
    """Return how much memory the process may still take, None where Linux does not say.

    What the machine has available, or what the process's control group, which is that of a
    container, leaves of its limit.
    """
    machine = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MACHINE), re.M)
    known = [int(machine[1]) << 10] if machine else []
    for folder, limit, used, cached in _VERSIONS:
        group = _GROUP / folder
        most, now = _text(group / limit).strip(), _text(group / used).strip()
        if most.isdigit() and now.isdigit():  # "max" where there is no limit
            files = re.search(rf"^{cached} (\d+)", _text(group / "memory.stat"), re.M)
            known.append(max(0, int(most) - int(now) + (int(files[1]) if files else 0)))
    return min(known, default=None)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""  # no such control group
