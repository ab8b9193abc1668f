"""Errors of unknown names, with a similar one."""

from __future__ import annotations

import sys
from collections.abc import Iterable

# The public names of the packages, which are not imported to look for a name.
# tests/test_package.py compares them with what each ``__init__`` imports.
NAMES = {
    "jitkern.comm": (
        *("Communicator", "PeerCommunicator", "PeerMemory", "PeerReducer", "PyNCCLCommunicator"),
        *("ReduceOp", "TorchCommunicator", "init_pynccl", "peer_gather", "peer_scatter"),
    ),
    "jitkern.nn": ("TPEmbedding",),
    "jitkern.offload": (
        *("BlockBuffers", "DescriptorRing", "LayerSignals", "OffloadEngine", "OverlapMonitor"),
        *("OverlapSnapshot", "PinnedPool", "PoolStats", "RingServer", "Run", "Share", "Slot"),
        *("SlotPipeline", "copy_blocks", "memcpy_2d_async"),
    ),
}


def did_you_mean(name: object, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error: the known name that is most like an unknown one, if one is.

    All have the `prefix`, which is not compared.
    """
    from difflib import get_close_matches

    stems = [known.removeprefix(prefix) for known in names]
    similar = get_close_matches(str(name).removeprefix(prefix), stems, 1)
    return f"; did you mean {prefix}{similar[0]}?" if similar else ""


def no_attribute(package: str, name: str) -> AttributeError:
    """Return the error of an unknown name, with the package that has it, or a similar name."""
    from difflib import get_close_matches

    text = f"module {package!r} has no attribute {name!r}"
    packages = [other.removeprefix("jitkern.") for other in NAMES]
    by_package = {"jitkern": [*sys.modules["jitkern"].__all__, *packages], **NAMES}
    if homes := [home for home, names in by_package.items() if name in names]:
        hint = f"it is in {homes[0]}"
    elif similar := get_close_matches(name, by_package.pop(package), 1):
        hint = f"did you mean {similar[0]!r}?"
    else:
        others = {other: home for home, names in by_package.items() for other in names}
        similar = get_close_matches(name, others, 1)
        if not similar:
            return AttributeError(text)
        hint = f"did you mean '{others[similar[0]]}.{similar[0]}'?"
    # Python adds a suggestion of its own to an error without `obj`.
    return AttributeError(f"{text}; {hint}", obj=sys.modules[package])
