"""Build hook: compiles what kernels.toml lists into the wheel, with NVRTC and without a GPU."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # hatchling needs it there, too


class KernelsHook(BuildHookInterface[Any]):
    """Make ``jitkern_kernels`` a cache of jitkern's: its ``v1`` holds the entries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if self.target_name != "wheel" or version == "editable":
            raise RuntimeError("jitkern-kernels: build a wheel of it; it has no sources of its own")
        sys.path.insert(0, str(root.parent / "src"))
        from jitkern.warming import build_kernels

        wanted = tomllib.loads((root / "kernels.toml").read_text())
        self._scratch = tempfile.TemporaryDirectory(prefix="jitkern-kernels-")
        out_dir = Path(self._scratch.name)
        build_kernels(out_dir, wanted["warm"], wanted["archs"])
        for path in sorted(out_dir.rglob("*")):
            if path.is_file():
                inside = Path("jitkern_kernels") / path.relative_to(out_dir)
                build_data["force_include"][str(path)] = str(inside)
        build_data["tag"] = "py3-none-any"  # code for GPUs, whatever the host is

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        scratch = getattr(self, "_scratch", None)
        if scratch is not None:
            scratch.cleanup()
