"""Record which specialisations a run used, with their sources (``JITKERN_RECORD``).

A record holds lines of JSON, of two kinds: the text of a source, once, and what ``load_jit`` or
``load_aot`` was given, with the arch. That one names each source by its place in a tree of its own
(``./src/scale.cu``), or by its name in this package (``jitkern:ops/store.cu``), and says which text
lies there. So a record needs nothing of the machine that it was made on. It is code to compile, and
flags to compile it with, of whoever could write it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from jitkern.compilers.sources import CSRC, OWN_PREFIX
from jitkern.files import open_regular, read_regular, sha256
from jitkern.forks import PerProcess
from jitkern.jit.specialisation import FILES, FOLDERS, FORMAT, Specialisation
from jitkern.writing import append

_log = logging.getLogger("jitkern")
_guard = PerProcess(threading.Lock)

MAX_BYTES = 64 << 20
"""Of a record: 200,000 kernels of jitkern's own; or the 14 MB that a file includes of torch."""

_TAIL_BYTES = 4096


@dataclass
class _Seen:
    """Digests of the lines of a file, and how it went on up to where it was last looked at.

    By these bytes a file that has been begun anew is known, though it be as long and have the same
    inode by now.
    """

    lines: set[str]
    end: int
    tail: bytes


_seen: dict[Path, _Seen] = {}


def record(
    used: Specialisation,
    read: Iterable[Path],
    file: Path,
    texts: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Append `used` and its sources to `file`, once per process.

    Many processes may append at once: what is added is one write to a file opened for appending.

    Parameters
    ----------
    used
        Paths in it are absolute.
    read
        What else a compiler may read of it: its headers.
    file
        The record.
    texts
        What was compiled of these files, by path; of others it is what they hold now.
    """
    # A record that cannot be kept must not stop a server, but it is said aloud.
    try:
        *parts, line = _lines(used, read, texts)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        _log.warning("jitkern: JITKERN_RECORD: %s is left out: cannot read %s", used, why)
        return
    try:
        _append(used, parts, line, file)
    except OSError as error:
        _log.warning("jitkern: JITKERN_RECORD: cannot write %s: %s", file, error.strerror)


def _append(used: Specialisation, texts: Iterable[bytes], line: bytes, file: Path) -> None:
    with _guard.value:
        size = file.stat().st_size if file.exists() else 0
        seen = _seen.get(file)
        if seen is None or _between(file, seen.end - len(seen.tail), seen.end) != seen.tail:
            tail = _between(file, max(0, size - _TAIL_BYTES), size)
            seen = _seen[file] = _Seen(_digests(file), size, tail)
        if sha256(line) in seen.lines:
            return
        seen.lines.add(sha256(line))  # what cannot be kept is said once
        new = [text for text in texts if sha256(text) not in seen.lines]
        data = b"".join(part + b"\n" for part in (*new, line))
        if size + len(data) > MAX_BYTES:
            raise OSError(0, f"it would have more than {MAX_BYTES} bytes, {used} left out")
        # A process that was killed, or found the disk full, has left half a line.
        is_torn = _between(file, max(0, size - 1), size) not in (b"", b"\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        seen.end = append(file, b"\n" + data if is_torn else data)
        seen.tail = data[-_TAIL_BYTES:]
        seen.lines.update(map(sha256, new))


def _lines(
    used: Specialisation, read: Iterable[Path], compiled: Mapping[str, bytes]
) -> list[bytes]:
    """The texts of the sources, then what was used of them."""
    # Where something was built besides the cache is no matter, and a path of this machine.
    options = {name: value for name, value in used.options.items() if name != "build_directory"}
    files = [path for name in FILES for path in options.get(name, ())]
    folders = [path for name in FOLDERS for path in options.get(name, ())]
    files += [os.path.abspath(path) for path in read]
    places = _places(files, folders)
    for name in FILES | FOLDERS:
        if name in options:
            options[name] = [places[path] for path in options[name]]

    texts: list[bytes] = []
    digests: dict[str, str] = {}
    for path in dict.fromkeys(files):
        if not places[path].startswith(OWN_PREFIX):
            data = compiled.get(path)
            if data is None:
                data = read_regular(path, MAX_BYTES, follow=True)
            text = data.decode("utf-8", "surrogateescape")
            texts.append(json.dumps({"record": FORMAT, "text": text}).encode())
            digests[places[path]] = sha256(data)
    line = Specialisation(used.function, used.args, options, used.arch).to_json(files=digests)
    return [*texts, line.encode()]


def _places(files: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
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


def _between(file: Path, start: int, end: int) -> bytes:
    """Bytes of the record; none where there is no file of that kind, which append() will say."""
    try:
        descriptor = open_regular(file)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, end - start, start)
    finally:
        os.close(descriptor)


def _digests(file: Path) -> set[str]:
    try:
        return {sha256(line) for line in read_regular(file, MAX_BYTES).split(b"\n")}
    except OSError:
        return set()
