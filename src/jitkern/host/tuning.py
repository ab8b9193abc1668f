"""Figures of a machine by which "auto" decides: where they are kept, and what they are read from.

``jitkern calibrate`` writes them, beside the cache, for one model of GPU, driver and processor.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitkern.cache.search import folders, user_cache
from jitkern.cache.strangers import written_by_others
from jitkern.files import canonical_json, digest, open_regular, parse_json
from jitkern.scratch import require_writable
from jitkern.writing import make_folders, write_whole

_MAX_BYTES = 1 << 20
_FORMAT = 1
_CPU_INFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """What figures hold for."""

    gpu: str
    driver: str
    cpu: str
    num_cores: int

    @property
    def file_name(self) -> str:
        """Of the file of its figures."""
        return f"calibration-{digest(asdict(self))}.json"

    def __str__(self) -> str:
        return f"{self.gpu}, driver {self.driver}, {self.num_cores} cores of {self.cpu}"


def machine_with(gpu: str, cuda_version: int) -> Machine:
    """Return what this process runs on, with a GPU of this name.

    Parameters
    ----------
    cuda_version
        Of the driver, such as 13000, where nothing tells the driver's own.
    """
    driver = kernel_driver() or f"for CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
    return Machine(gpu, driver, processor(), len(os.sched_getaffinity(0)))


def kernel_driver() -> str:
    """Version of the kernel's part of the driver, such as 580.95.05; empty where none is known."""
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def processor() -> str:
    """Name of the processor's model; its architecture where Linux does not say."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured_figures(gpu: str, cuda_version: int) -> Mapping[str, int]:
    """Return the figures that were measured on a machine like this one; none where none were."""
    found = find(gpu, cuda_version)
    return {} if found is None else found[1]["figures"]


def find(gpu: str, cuda_version: int) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the file of this machine, and its content; warns of one that is no such thing."""
    machine = machine_with(gpu, cuda_version)
    for folder in folders():
        file = folder / machine.file_name
        try:
            return file, _content(file, machine)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            warnings.warn(
                f"jitkern: {file} is not used: {reason}; run jitkern calibrate, or delete it",
                RuntimeWarning,
                stacklevel=2,
            )
    return None


def _content(file: Path, machine: Machine) -> Mapping[str, Any]:
    with open(open_regular(file), "rb") as stream:
        if reason := written_by_others(file, os.fstat(stream.fileno())):
            raise ValueError(reason)
        content = parse_json(stream.read(_MAX_BYTES))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"not of format {_FORMAT}")
    if content.get("machine") != asdict(machine):
        raise ValueError("of another machine")
    figures = content.get("figures")
    if not isinstance(figures, dict) or not all(map(_is_figure, figures.values())):
        raise ValueError("figures are positive ints")
    return content


def _is_figure(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62


def check_writable() -> None:
    """Raise CacheError where :func:`save` would fail, or leave what :func:`find` does not take."""
    cache = user_cache()
    cache.place.check()
    require_writable(cache.root, "set JITKERN_CACHE_DIR to a directory of yours")


def save(machine: Machine, figures: Mapping[str, int], **measured: Any) -> Path:
    """Write the figures of a machine to the user's cache; return the file. OSError where not."""
    file = user_cache().root / machine.file_name
    content = {
        "format": _FORMAT,
        "machine": asdict(machine),
        "figures": dict(figures),
        **measured,
    }
    make_folders(file.parent)  # 0700 under any umask: a cache that a group may write is not used
    write_whole(file, canonical_json(content) + b"\n", flush=True)
    return file
