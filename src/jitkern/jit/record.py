"""Record which specialisations a run used, with their sources, and read such a record again.

A record (``JITKERN_RECORD``) holds lines of JSON: the text of each source, and what ``load_jit`` or
``load_aot`` was given, which names a source by its place in a tree of its own (``./src/scale.cu``)
or in this package (``jitkern:ops/store.cu``). So it needs nothing of the machine that it was made
on. It is code to compile, and flags to compile it with: replay only what you would run.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jitkern import fs
from jitkern.cache.trust import written_by_others
from jitkern.compilers.sources import CSRC, OWN_PREFIX, Closure, source_path
from jitkern.env import settings
from jitkern.fs import digest, sha256

FORMAT = 2
# Options that are lists of sources, and of directories.
FILES = frozenset(("cpp_files", "cuda_files", "device_files"))
FOLDERS = frozenset(("extra_include_paths",))
FLAGS = ("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
# Of a record: 200,000 kernels of jitkern's own; or the 14 MB that a file includes of torch.
MAX_BYTES = 64 << 20

_log = logging.getLogger("jitkern")


class Specialisation(NamedTuple):
    """What makes a kernel or a library: ``load_jit`` or ``load_aot``, and its arguments.

    Paths in `options` are absolute; in a record they are the places there. `arch` is such as
    ``"9.0"``, and empty for host code.
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
        options = {name: option for name, option in self.options.items() if option}
        value = {**self._asdict(), "options": options, "record": FORMAT, **more}
        return json.dumps(value, sort_keys=True)


# -- writing ---------------------------------------------------------------------------------------


def record(used: Specialisation, closure: Closure) -> None:
    """Append `used` and its sources to JITKERN_RECORD, unless it has them; failing is a warning."""
    file = settings().record
    if file is None:
        return
    lines = _lines(used, dict(zip(map(str, closure.files), closure.texts, strict=True)))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(fs.open_regular(file, append=True), "rb") as stream:
            try:
                _lock(stream.fileno(), settings().lock_timeout_s)
                _append(used, lines, stream.fileno())
            finally:
                # A child that was forked meanwhile has the descriptor too, and would hold the lock.
                with suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_UN)
    except OSError as error:
        _log.warning("jitkern: JITKERN_RECORD: cannot write %s: %s", file, error.strerror)


def _lock(descriptor: int, timeout_s: float) -> None:
    """Wait for other processes that record; without the lock a text may be there twice."""
    until_s = time.monotonic() + timeout_s
    with suppress(OSError):  # a file system without locks
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > until_s:
                return
            time.sleep(0.01)


def _append(used: Specialisation, lines: list[bytes], descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    present = os.pread(descriptor, min(size, MAX_BYTES), 0)
    known = set(present.split(b"\n"))
    if lines[-1] in known:
        return
    data = b"".join(line + b"\n" for line in dict.fromkeys(lines) if line not in known)
    if present and not present.endswith(b"\n"):  # a process was killed, or found the disk full
        data = b"\n" + data
    if size + len(data) > MAX_BYTES:
        raise OSError(0, f"it would have more than {MAX_BYTES} bytes, {used} left out")
    count = os.write(descriptor, data)
    if count < len(data):
        raise OSError(0, f"{count} of {len(data)} bytes written, the disk is full")


def _lines(used: Specialisation, texts: Mapping[str, bytes]) -> list[bytes]:
    """Return the texts of the sources, then what was used of them."""
    options = {name: value for name, value in used.options.items() if name != "build_directory"}
    folders = [path for name in FOLDERS for path in options.get(name, ())]
    places = _places(list(texts), folders)
    for name in (FILES | FOLDERS).intersection(options):
        options[name] = [places[path] for path in options[name]]
    lines, digests = [], {}
    for path, data in texts.items():
        if not places[path].startswith(OWN_PREFIX):
            text = data.decode("utf-8", "surrogateescape")
            lines.append(json.dumps({"record": FORMAT, "text": text}).encode())
            digests[places[path]] = sha256(data)
    return [*lines, used._replace(options=options).to_json(files=digests).encode()]


def _places(files: list[str], folders: list[str]) -> dict[str, str]:
    """Name each path by its place in the record: the package's own, else below what all share."""
    own = {path: os.path.relpath(path, CSRC) for path in (*files, *folders)}
    own = {path: name for path, name in own.items() if name.split("/")[0] != ".."}
    others = [path for path in folders if path not in own]
    others += [os.path.dirname(path) for path in files if path not in own]
    above = os.path.commonpath(others) if others else ""
    return {
        path: f"{OWN_PREFIX}{own[path]}" if path in own else f"./{os.path.relpath(path, above)}"
        for path in (*files, *folders)
    }


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """One specialisation of a record, with its sources except those of this package."""

    used: Specialisation
    files: Mapping[str, str]  # the digest of each source's text, by its place
    texts: Mapping[str, bytes]  # each text, by its digest

    def unpack(self, folder: Path) -> Specialisation:
        """Write the sources below `folder`; return what was used, with paths that exist."""
        tree = folder / digest(self.files)  # equal trees are written once
        for place, name in self.files.items():
            path = tree / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.texts[name])
        options = dict(self.used.options)
        for name in (FILES | FOLDERS).intersection(options):
            paths = [
                source_path(place) if place.startswith(OWN_PREFIX) else tree / place
                for place in options[name]
            ]
            options[name] = list(map(str, paths))
            for path in paths:
                if name in FOLDERS and path.is_relative_to(tree):
                    path.mkdir(parents=True, exist_ok=True)  # no header is in it
                elif name in FILES and not path.is_file():
                    raise FileNotFoundError(f"{path}: this version of jitkern has no such source")
        return self.used._replace(options=options)


def replay(file: str | os.PathLike[str], *, trust: bool = False) -> list[Recorded]:
    """Read a file written under ``JITKERN_RECORD``: each specialisation once, by first use.

    Raises ValueError if it is no record, and, without `trust`, if other users could have written
    it; OSError if it cannot be read, or is no regular file.
    """
    with open(fs.open_regular(Path(file), follow=True), "rb") as stream:
        if not trust and (reason := written_by_others(os.fstat(stream.fileno()))):
            command = f"jitkern warm --trust --replay {file}"
            raise ValueError(f"{file}: {reason}; if you trust them, replay it with: {command}")
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{file}: more than {MAX_BYTES} bytes, which jitkern does not write")
    texts: dict[str, bytes] = {}
    found: dict[bytes, Recorded] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            if not line:
                continue
            value = fs.parse_json(line)
            if value.get("record") != FORMAT:
                raise ValueError(f"record: {value.get('record')!r}, expected {FORMAT}")
            if "text" in value:
                text = value["text"].encode("utf-8", "surrogateescape")
                texts[sha256(text)] = text
            else:
                found.setdefault(line, _recorded(value, texts))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"not a recorded specialisation: {ascii(str(error))[1:-1][:200]}"
            raise ValueError(f"{file}:{number}: {reason}") from error
    if not found:
        advice = "record a run with JITKERN_RECORD=FILE"
        raise ValueError(f"{file}: nothing is recorded in it; {advice}")
    return list(found.values())


def _recorded(value: Mapping[str, Any], texts: Mapping[str, bytes]) -> Recorded:
    """Return what a line says. The loader checks the rest of the options, as it does for a call."""
    function, args, options, arch = (value[name] for name in Specialisation._fields)
    options, files = dict(options), dict(value["files"])
    if function not in ("load_jit", "load_aot") or not all(isinstance(arg, str) for arg in args):
        raise ValueError("expected load_jit or load_aot, and strings")
    named = [place for name in (FILES | FOLDERS).intersection(options) for place in options[name]]
    for place in (*files, *named):
        prefix = "./" if place in files else ("./", OWN_PREFIX)
        below = place.partition("./" if place.startswith("./") else OWN_PREFIX)[2]
        is_inside = below == "." or not {"", ".", ".."}.intersection(below.split("/"))
        if not (place.startswith(prefix) and is_inside and place.isprintable()):
            raise ValueError(f"{place!r}, expected a place such as ./src/scale.cu")
    for place, name in files.items():
        if name not in texts:
            raise ValueError(f"the record has no text for {place}")
    used = Specialisation(function, (args[0], *args[1:]), options, str(arch))
    return Recorded(used, files, texts)
