"""Record which specialisations a run used, and read such a file back (``JITKERN_RECORD``).

A line is one JSON object: what ``load_jit`` or ``load_aot`` was given, and the arch.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.forks import PerProcess

_log = logging.getLogger("jitkern")
_guard = PerProcess(threading.Lock)
_seen: dict[Path, set[str]] = {}


@dataclass(frozen=True)
class Specialisation:
    """One line of a recorded file.

    Attributes
    ----------
    function
        ``"load_jit"`` or ``"load_aot"``.
    args
        Its positional arguments: the name, then the template arguments.
    options
        Its keyword arguments.
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

    def to_json(self) -> str:
        """Return the line, equal for equal specialisations."""
        value = {
            "function": self.function,
            "args": list(self.args),
            "options": {name: option for name, option in self.options.items() if option},
            "arch": self.arch,
        }
        return json.dumps(value, sort_keys=True)


def record(used: Specialisation, file: Path) -> None:
    """Append `used` to `file`, once per process.

    Many processes may append at once: a line is one write to a file opened for appending.
    """
    line = used.to_json()
    with _guard.value:
        seen = _seen.get(file)
        if seen is None:
            seen = _seen[file] = _lines(file)
        if line in seen:
            return
        seen.add(line)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, (line + "\n").encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            # A record that cannot be kept must not stop a server, but it is said aloud.
            _log.warning("jitkern: JITKERN_RECORD: cannot write %s: %s", file, error)


def _lines(file: Path) -> set[str]:
    try:
        return set(file.read_text().splitlines())
    except OSError:
        return set()


def replay(file: str | os.PathLike[str]) -> list[Specialisation]:
    """Read a file written under ``JITKERN_RECORD``: each specialisation once, by first use.

    Raises
    ------
    ValueError
        A line is something else; the message names file and line.
    OSError
        The file cannot be read.
    """
    found: dict[str, Specialisation] = {}
    for number, line in enumerate(Path(file).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            used = Specialisation(
                function=str(value["function"]),
                args=tuple(map(str, value["args"])),
                options=dict(value["options"]),
                arch=str(value["arch"]),
            )
            if used.function not in ("load_jit", "load_aot") or not used.args:
                raise ValueError("unknown function or no name")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{number}: not a recorded specialisation: {error}") from error
        found.setdefault(used.to_json(), used)
    return list(found.values())
