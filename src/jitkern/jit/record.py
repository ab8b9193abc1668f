"""Record which specialisations a run used, and read such a file back (``JITKERN_RECORD``).

A line is one JSON object: what ``load_jit`` or ``load_aot`` was given, and the arch. It names files
to compile and flags to compile them with, so a record is code, of whoever could write it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern import hints
from jitkern.cache.trust import written_by_others
from jitkern.files import append, open_regular, parse_json, read_regular
from jitkern.forks import PerProcess

_log = logging.getLogger("jitkern")
_guard = PerProcess(threading.Lock)
_seen: dict[Path, set[str]] = {}

_MAX_BYTES = 64 << 20  # 200,000 lines


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
            append(file, (line + "\n").encode())
        except OSError as error:
            # A record that cannot be kept must not stop a server, but it is said aloud.
            _log.warning("jitkern: JITKERN_RECORD: cannot write %s: %s", file, error.strerror)


def _lines(file: Path) -> set[str]:
    try:
        return set(read_regular(file, _MAX_BYTES).decode(errors="replace").splitlines())
    except OSError:
        return set()


def replay(file: str | os.PathLike[str], *, trust: bool = False) -> list[Specialisation]:
    """Read a file written under ``JITKERN_RECORD``: each specialisation once, by first use.

    What is read is meant to be compiled, and a compiler does what its flags say: replay only a
    record that you would run.

    Parameters
    ----------
    trust
        Read even what other users could have written.

    Raises
    ------
    ValueError
        A line is something else, or others could have written the file; the message names it.
    OSError
        The file cannot be read, or is no regular file.
    """
    with open(open_regular(Path(file), follow=True), "rb") as stream:
        status = os.fstat(stream.fileno())
        reason = "" if trust else written_by_others(Path(file), status)
        if reason:
            raise ValueError(f"{file}: {reason}; {hints.trust_record(file)}")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"{file}: {status.st_size} bytes, expected at most {_MAX_BYTES}")
        raw = stream.read(status.st_size + 1)
    found: dict[str, Specialisation] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            used = _parsed(line)
        except ValueError as error:
            raise ValueError(f"{file}:{number}: not a recorded specialisation: {error}") from error
        found.setdefault(used.to_json(), used)
    return list(found.values())


def _parsed(line: bytes) -> Specialisation:
    value = parse_json(line)
    if not isinstance(value, dict) or value.keys() != {"function", "args", "options", "arch"}:
        raise ValueError("expected an object of function, args, options and arch")
    if value["function"] not in ("load_jit", "load_aot"):
        raise ValueError("function: expected load_jit or load_aot")
    if not _is_texts(value["args"]) or not value["args"]:
        raise ValueError("args: expected a list of strings, the name first")
    if not _is_text(value["arch"]):
        raise ValueError("arch: expected a string")
    if not isinstance(value["options"], dict):
        raise ValueError("options: expected an object")
    for name, option in value["options"].items():
        is_right = _OPTIONS.get(name)
        if is_right is None:
            raise ValueError(f"options: {name!r}, expected one of {', '.join(_OPTIONS)}")
        if not is_right(option):
            raise ValueError(f"options: {name}: of another type than load_jit takes")
    args, options = tuple(value["args"]), value["options"]
    return Specialisation(value["function"], args, options, value["arch"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(_is_texts(pair) and len(pair) == 2 for pair in value)


# What load_jit and load_aot take by name, as the loader writes it down.
_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "build_directory": _is_text,
    **dict.fromkeys(("cpp_files", "cuda_files", "device_files", "extra_include_paths"), _is_texts),
    **dict.fromkeys(("extra_cflags", "extra_cuda_cflags", "extra_ldflags"), _is_texts),
    **dict.fromkeys(("cpp_wrappers", "cuda_wrappers", "device_wrappers"), _is_pairs),
}
