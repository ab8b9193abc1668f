"""What ``jitkern doctor`` says of the wheel of prebuilt kernels."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

import jitkern
from jitkern.cache.search import KERNELS, caches


def kernels_wheel() -> tuple[str, Literal["ok", "note"], str]:
    """Return what is installed, whether that is as it should be, and the fix where it is not."""
    cache = next((cache for origin, _, cache in caches() if origin == KERNELS), None)
    if cache is None:
        return "not installed: kernels are compiled when they are first used", "ok", ""
    try:
        version = metadata.version(KERNELS)
    except metadata.PackageNotFoundError:
        version = "unknown version"  # unpacked, not installed
    found = f"{version}, {len(cache.entries()):,} entries"
    if version == jitkern.__version__:
        return found, "ok", ""
    # Not broken: what does not fit is not found.
    fix = f"install {KERNELS} {jitkern.__version__}: what is of other sources is compiled"
    return f"{found}, for another version of jitkern", "note", fix
