"""Record which specialisations a run used, with their sources (``JITKERN_RECORD``).

A record holds lines of JSON, of two kinds: the text of a source, once, and what ``load_jit`` or
``load_aot`` was given, with the arch. That one names each source by its place in a tree of its own
(``./src/scale.cu``), or by its name in this package (``jitkern:ops/store.cu``), and says which text
lies there. So a record needs nothing of the machine that it was made on. It is code to compile, and
flags to compile it with, of whoever could write it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from jitkern.compilers.sources import CSRC, OWN_PREFIX
from jitkern.files import read_regular, sha256
from jitkern.forks import PerProcess
from jitkern.jit.specialisation import FILES, FOLDERS, FORMAT, Specialisation
from jitkern.writing import append, open_to_append

_log = logging.getLogger("jitkern")
_guard = PerProcess(threading.Lock)

MAX_BYTES = 64 << 20
"""Of a record: 200,000 kernels of jitkern's own; or the 14 MB that a file includes of torch."""

_TAIL_BYTES = 4096

# Eight ranks that add 15 MB each are done in a second; a process that is stopped holds a lock on.
_LOCK_S = 5.0
_POLL_S = 0.005
_OPENINGS = 3

_patience_s = _LOCK_S


@dataclass
class _Seen:
    """Digests of the lines of a file up to `end`, and what stands before that.

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

    Many processes may append at once. They take turns where the file system knows locks, so that a
    text is in it once. Elsewhere it may be there more often: what is added is one write to a file
    opened for appending.

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
    own = sha256(line)
    parts = {sha256(text): text for text in texts} | {own: line}
    with _guard.value, _opened(file) as descriptor:
        seen = _caught_up(file, descriptor)
        if own in seen.lines:
            return
        data = b"".join(part + b"\n" for name, part in parts.items() if name not in seen.lines)
        seen.lines.add(own)  # what cannot be kept is said once
        size = os.fstat(descriptor).st_size
        if size + len(data) > MAX_BYTES:
            raise OSError(0, f"it would have more than {MAX_BYTES} bytes, {used} left out")
        # A process that was killed, or found the disk full, has left half a line.
        is_torn = seen.end < size
        seen.end = append(descriptor, b"\n" + data if is_torn else data, file)
        seen.tail = data[-_TAIL_BYTES:]
        seen.lines.update(parts)


def _caught_up(file: Path, descriptor: int) -> _Seen:
    """Return what is seen of the record, after a look at what others have added."""
    seen = _seen.get(file)
    if seen is None or _between(descriptor, seen.end - len(seen.tail), seen.end) != seen.tail:
        seen = _seen[file] = _Seen(set(), 0, b"")
    size = os.fstat(descriptor).st_size
    *lines, _ = _between(descriptor, seen.end, min(size, MAX_BYTES)).split(b"\n")
    if lines:
        seen.lines.update(map(sha256, lines))
        seen.end += sum(len(line) + 1 for line in lines)
        seen.tail = _between(descriptor, max(0, seen.end - _TAIL_BYTES), seen.end)
    return seen


def _between(descriptor: int, start: int, end: int) -> bytes:
    return os.pread(descriptor, max(0, end - start), start)


# -- turns -----------------------------------------------------------------------------------------


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """Hold the record open, locked if it can be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for _ in range(_OPENINGS):
            stack.close()
            descriptor = open_to_append(file)
            stack.callback(_close, descriptor)
            # Who held the lock may have put another file in its place.
            if not _locked(descriptor, file) or _is_at(file, descriptor):
                break
        yield descriptor


def _locked(descriptor: int, file: Path) -> bool:
    """Lock the record; no process waits for ever, nor twice for one that does not let go."""
    global _patience_s
    until_s = time.monotonic() + _patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() < until_s:
                time.sleep(_POLL_S)
                continue
            if _patience_s:
                _log.warning(
                    "jitkern: JITKERN_RECORD: %s: locked by another process for %g s, not waited "
                    "for any more: sources may be in it twice",
                    file,
                    _patience_s,
                )
                _patience_s = 0.0
            return False
        except OSError:
            return False  # a file system without locks


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close(descriptor: int) -> None:
    # A child that was forked meanwhile has the descriptor too, and would hold the lock.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


# -- lines -----------------------------------------------------------------------------------------


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
