"""Record which kernels and libraries a run used, and read such a record again.

A record (``JITKERN_RECORD``) has a line of JSON for each: what ``load_jit`` or ``load_aot`` was
given. It names the sources, which must be there when it is replayed. Paths are relative to the
record, so a directory that holds both may move; sources of this package go by name
(``jitkern:ops/store.cu``). A record is code: it names files to compile, and flags.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jitkern import fs
from jitkern.cache.trust import written_by_others
from jitkern.compilers.sources import CSRC, OWN_PREFIX
from jitkern.env import settings

FORMAT = 3
# Options that are lists of sources, of directories, and of flags.
FILES = frozenset(("cpp_files", "cuda_files", "device_files"))
FOLDERS = frozenset(("extra_include_paths",))
FLAGS = ("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
MAX_BYTES = 64 << 20  # 100,000 specialisations

_log = logging.getLogger("jitkern")


class Specialisation(NamedTuple):
    """What makes a kernel or a library: ``load_jit`` or ``load_aot``, and its arguments.

    Paths in `options` are absolute, and relative in a record. `arch` is such as ``"9.0"``, and
    empty for host code.
    """

    function: str
    args: tuple[str, ...]
    options: Mapping[str, Any]
    arch: str

    def __str__(self) -> str:
        name, *rest = self.args
        return f"{name}<{', '.join(rest)}>" + (f" for {self.arch}" if self.arch else "")

    def to_json(self) -> str:
        """Return the line of a record, equal for equal specialisations."""
        options = {name: option for name, option in self.options.items() if option}
        return json.dumps({**self._asdict(), "options": options, "record": FORMAT}, sort_keys=True)


def record(used: Specialisation) -> None:
    """Append `used` to JITKERN_RECORD unless it is there; failing is a warning."""
    file = settings().record
    if file is None:
        return
    line = _relative_to(file.parent, used).to_json().encode()
    try:
        with open(fs.open_regular(file, append=True), "r+b") as stream:
            present = stream.read(MAX_BYTES)
            # Processes that append at once may repeat a line; read_record drops it.
            if line not in present.split(b"\n"):
                # A writer that was killed has left half a line.
                is_torn = present and not present.endswith(b"\n")
                stream.write((b"\n" if is_torn else b"") + line + b"\n")
    except OSError as error:
        _log.warning("jitkern: JITKERN_RECORD: cannot write %s: %s", file, error.strerror)


def _relative_to(folder: Path, used: Specialisation) -> Specialisation:
    options = {name: value for name, value in used.options.items() if name != "build_directory"}
    for name in (FILES | FOLDERS).intersection(options):
        options[name] = [
            f"{OWN_PREFIX}{os.path.relpath(path, CSRC)}"
            if name in FILES and Path(path).is_relative_to(CSRC)
            else os.path.relpath(path, folder)
            for path in options[name]
        ]
    return used._replace(options=options)


def read_record(file: str | os.PathLike[str]) -> list[Specialisation]:
    """Read a file written under ``JITKERN_RECORD``: each specialisation once, by first use.

    Raises ValueError if it is no record, or if other users could have written it; OSError if it
    cannot be read, or is no regular file.
    """
    with open(fs.open_regular(Path(file), follow=True), "rb") as stream:
        if reason := written_by_others(os.fstat(stream.fileno())):
            raise ValueError(f"{file}: {reason}; it is code: replay a copy of your own")
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{file}: more than {MAX_BYTES} bytes, which jitkern does not write")
    folder = os.path.dirname(os.path.abspath(file))
    recorded: dict[bytes, Specialisation] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line or line in recorded:
            continue
        try:
            recorded[line] = _parse(line, folder)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"not a recorded specialisation: {ascii(str(error))[1:-1][:200]}"
            raise ValueError(f"{file}:{number}: {reason}") from error
    if not recorded:
        advice = "record a run with JITKERN_RECORD=FILE"
        raise ValueError(f"{file}: nothing is recorded in it; {advice}")
    return list(recorded.values())


def _parse(line: bytes, folder: str) -> Specialisation:
    """Parse a line, paths made absolute. The loader checks the options as it does for a call."""
    value = fs.parse_json(line)
    if value.get("record") != FORMAT:
        raise ValueError(f"record: {value.get('record')!r}, expected {FORMAT}")
    function, args, options, arch = (value[name] for name in Specialisation._fields)
    if function not in ("load_jit", "load_aot") or not all(isinstance(arg, str) for arg in args):
        raise ValueError("expected load_jit or load_aot, and strings")
    options = dict(options)
    for name in (FILES | FOLDERS).intersection(options):
        if not isinstance(options[name], list):
            raise ValueError(f"{name}: expected a list")
        options[name] = [
            path if path.startswith(OWN_PREFIX) else os.path.normpath(os.path.join(folder, path))
            for path in options[name]
        ]
    return Specialisation(function, (args[0], *args[1:]), options, str(arch))
