"""Build hook: a wheel carries the host module, compiled, for any Python 3 of this platform.

An editable install and a source distribution do not: a checkout builds the host module on first
use, and builds it again exactly when one of its sources changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# libstdc++ and libgcc symbol versions -> the first glibc whose manylinux policy promises them
# (auditwheel's manylinux-policy.json). A host module that links them statically asks for none.
_RUNTIME_POLICY = {
    "GLIBCXX": [
        ((3, 4, 19), 17),
        ((3, 4, 24), 28),
        ((3, 4, 29), 34),
        ((3, 4, 30), 35),
        ((3, 4, 33), 39),
    ],
    "CXXABI": [((1, 3, 7), 17), ((1, 3, 11), 28), ((1, 3, 13), 34), ((1, 3, 15), 39)],
    "GCC": [((4, 8), 17), ((7, 0, 0), 28), ((12, 0, 0), 35), ((14, 0, 0), 39)],
}


class HostModuleHook(BuildHookInterface[Any]):
    """Compile ``csrc/**/*.cc`` into ``jitkern/_prebuilt`` of the wheel and tag the wheel by it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        # The package builds itself; that takes tvm-ffi's headers, a C++ compiler and ninja.
        sys.path.insert(0, str(Path(self.root) / "src"))
        from jitkern.cache.store import Cache
        from jitkern.compilers.sources import CSRC
        from jitkern.host.library import HostModule

        self._scratch = tempfile.TemporaryDirectory(prefix="jitkern-wheel-")
        out_dir = Path(self._scratch.name)
        # Stripped. Links the user's libstdc++, as torch does; a static one needs glibc 2.36.
        entry = HostModule(CSRC).compile(ldflags=("-s",))
        Cache(out_dir, shared=True).publish(entry)
        files = sorted(path for path in out_dir.rglob("*") if path.is_file())
        for path in files:
            inside = Path("jitkern") / "_prebuilt" / path.relative_to(out_dir)
            build_data["force_include"][str(path)] = str(inside)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag([p for p in files if p.suffix == '.so'])}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        scratch = getattr(self, "_scratch", None)
        if scratch is not None:
            scratch.cleanup()


def platform_tag(libraries: list[Path]) -> str:
    """The manylinux tag that the libraries' own symbol versions allow, the oldest that is true."""
    if not libraries:
        raise RuntimeError("jitkern: the host module is no shared library")
    minor = 17  # manylinux2014: nothing older is worth a name
    for library in libraries:
        for name, version in needed_versions(library):
            minor = max(minor, _glibc_minor(library, name, version))
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True)
    return f"manylinux_2_{minor}_{machine.stdout.strip()}"


def needed_versions(library: Path) -> set[tuple[str, tuple[int, ...]]]:
    """Version needs of an ELF file, such as ("GLIBC", (2, 34)), as objdump lists them."""
    command = ["objdump", "-p", str(library)]
    english = {**os.environ, "LC_ALL": "C", "LANGUAGE": ""}
    done = subprocess.run(command, env=english, capture_output=True, text=True, check=True)
    references = done.stdout.partition("Version References:")[2]
    found = re.findall(r"\b(GLIBCXX|GLIBC|CXXABI|GCC)_([0-9.]+)\b", references)
    if all(name != "GLIBC" for name, _ in found):  # the tag would allow every machine
        raise RuntimeError(f"jitkern: objdump names no version of glibc that {library.name} needs")
    return {(name, tuple(map(int, version.split(".")))) for name, version in found}


def _glibc_minor(library: Path, name: str, version: tuple[int, ...]) -> int:
    if name == "GLIBC":
        return version[1]
    for limit, minor in _RUNTIME_POLICY[name]:
        if version <= limit:
            return minor
    text = ".".join(map(str, version))
    raise RuntimeError(
        f"jitkern: {library.name} needs {name}_{text}: no manylinux policy has it yet"
    )
