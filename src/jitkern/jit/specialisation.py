"""What ``load_jit`` and ``load_aot`` were given: what makes a kernel or a library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

FORMAT = 2
"""Of the lines. Those of 1 had no such number, and named files of the recording machine."""

FILES = frozenset(("cpp_files", "cuda_files", "device_files"))
"""Options that are lists of sources."""

FOLDERS = frozenset(("extra_include_paths",))
"""Options that are lists of directories."""

FLAGS = frozenset(("extra_cflags", "extra_cuda_cflags", "extra_ldflags"))
"""Options that are lists of flags, each of which may hold several words."""


class Specialisation(NamedTuple):
    """What makes a kernel or a library.

    Attributes
    ----------
    function
        ``"load_jit"`` or ``"load_aot"``.
    args
        Its positional arguments: the name, then the template arguments.
    options
        Its keyword arguments. Paths are absolute, or in a record the places there.
    arch
        E.g. ``"9.0"``; empty for host code.
    """

    function: str
    args: tuple[str, ...]
    options: Mapping[str, Any]
    arch: str

    def __str__(self) -> str:
        name, *rest = self.args
        return f"{name}<{', '.join(rest)}>" + (f" for {self.arch}" if self.arch else "")

    def to_json(self, **more: Any) -> str:
        """Return a line, equal for equal specialisations and equal `more`."""
        value = {
            "record": FORMAT,
            "function": self.function,
            "args": list(self.args),
            "options": {name: option for name, option in self.options.items() if option},
            "arch": self.arch,
            **more,
        }
        return json.dumps(value, sort_keys=True)
