"""The public names of the packages, and errors of unknown names, with a similar one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping

# ``__all__`` of each package, which is not imported to look for a name. tests/test_package.py
# compares it with what the package imports.
NAMES = {
    "jitkern.comm": (
        *("Communicator", "PeerCommunicator", "PeerMemory", "PeerReducer", "PyNCCLCommunicator"),
        *("ReduceOp", "TorchCommunicator", "init_pynccl", "peer_gather", "peer_scatter"),
    ),
    "jitkern.nn": ("TPEmbedding",),
    "jitkern.offload": (
        *("DescriptorRing", "MissPlan", "OffloadEngine", "OverlapMonitor", "OverlapStats"),
        *("PinnedPool", "PipelineRun", "PipelineSlot", "PoolShare", "PoolStats"),
        *("ResidencyMap", "ResidencyStats", "RingServer", "SlotPipeline"),
    ),
    "jitkern.typing": (
        *("AllReduceAlgorithm", "Blocks", "Copy", "CppArgs", "DeclaredWrapper"),
        *("EmbeddingAlgorithm", "File", "Files", "FormatName", "FreezeMode", "LseBase"),
        *("KernelStats", "LseLayout", "Outcome", "Ring", "ScaleRule", "Wrapper"),
    ),
}

# Functions of vLLM and sglang, and what replaces them; docs/migrating.md has the differences.
ELSEWHERE = {
    "reshape_and_cache": "store_cache",
    "concat_and_cache_mla": "store_rows",
    "set_mla_kv_buffer": "store_rows",
    "swap_blocks": "copy_blocks",
    "transfer_kv_per_layer": "copy_blocks",
}


def did_you_mean(name: str, names: Iterable[str] | Mapping[str, str]) -> str:
    """Return the end of an error: the known name that is most like an unknown one, if one is.

    A mapping has what to suggest for each name.
    """
    from difflib import get_close_matches

    suggestions = names if isinstance(names, Mapping) else {known: known for known in names}
    # Short words differ in little: "mha" is no misspelling of "mla".
    similar = get_close_matches(name, suggestions, 1, cutoff=0.7 if len(name) <= 4 else 0.6)
    return f"; did you mean {suggestions[similar[0]]}?" if similar else ""


def no_attribute(package: str, name: str) -> AttributeError:
    """Return the error of an unknown name, with the most similar name of all packages."""
    names = [f"{home}.{public}" for home, publics in NAMES.items() for public in publics]
    names += [*NAMES, *(f"jitkern.{public}" for public in sys.modules["jitkern"].__all__)]
    full_names = {full_name.rpartition(".")[2]: full_name for full_name in names}
    full_names |= {there: f"jitkern.{here}" for there, here in ELSEWHERE.items()}
    # Python adds a suggestion of its own to an error without `obj`.
    text = f"module {package!r} has no attribute {name!r}{did_you_mean(name, full_names)}"
    return AttributeError(text, obj=sys.modules[package])


def attach(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__all__``, ``__getattr__`` and ``__dir__``."""

    def getattr_(name: str) -> object:
        raise no_attribute(package, name)

    return [*NAMES[package]], getattr_, lambda: sorted(NAMES[package])
