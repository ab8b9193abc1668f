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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jitkern import fs
from jitkern.compilers.sources import CSRC, OWN_PREFIX, source_path
from jitkern.fs import digest, sha256

FORMAT = 2
FILES = frozenset(("cpp_files", "cuda_files", "device_files"))
"""Options that are lists of sources."""
FOLDERS = frozenset(("extra_include_paths",))
"""Options that are lists of directories."""
MAX_BYTES = 64 << 20
"""Of a record: 200,000 kernels of jitkern's own; or the 14 MB that a file includes of torch."""

_LOCK_S = 5.0  # eight ranks that add 15 MB each are done in a second
_MAX_PLACE_CHARS = 1000

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


def record(
    used: Specialisation,
    read: Iterable[Path],
    file: Path,
    texts: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Append `used` and its sources to `file`, once; many processes may do so at a time.

    `read` are its headers, `texts` what was compiled, by path; other files are read now. A record
    that cannot be written is a warning: it must not stop a server.
    """
    try:
        lines = _lines(used, read, texts)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        _log.warning("jitkern: JITKERN_RECORD: %s is left out: cannot read %s", used, why)
        return
    try:
        with _locked(file) as descriptor:
            _append(used, lines, descriptor)
    except OSError as error:
        _log.warning("jitkern: JITKERN_RECORD: cannot write %s: %s", file, error.strerror)


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


@contextmanager
def _locked(file: Path) -> Iterator[int]:
    """Open the record and lock it, unless its file system has no locks or another holds it long."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = fs.open_to_append(file)
    until_s = time.monotonic() + _LOCK_S
    try:
        while time.monotonic() < until_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                break  # a text may be there twice
        yield descriptor
    finally:
        # A child that was forked meanwhile has the descriptor too, and would hold the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lines(
    used: Specialisation, read: Iterable[Path], compiled: Mapping[str, bytes]
) -> list[bytes]:
    """Return the texts of the sources, then what was used of them."""
    options = {name: value for name, value in used.options.items() if name != "build_directory"}
    files = [path for name in FILES for path in options.get(name, ())]
    folders = [path for name in FOLDERS for path in options.get(name, ())]
    files += [os.path.abspath(path) for path in read]
    places = _places(files, folders)
    for name in (FILES | FOLDERS).intersection(options):
        options[name] = [places[path] for path in options[name]]
    lines: list[bytes] = []
    digests: dict[str, str] = {}
    for path in dict.fromkeys(files):
        if not places[path].startswith(OWN_PREFIX):
            data = compiled.get(path)
            if data is None:
                data = fs.read_regular(path, MAX_BYTES, follow=True)
            text = data.decode("utf-8", "surrogateescape")
            lines.append(json.dumps({"record": FORMAT, "text": text}).encode())
            digests[places[path]] = sha256(data)
    return [*lines, used._replace(options=options).to_json(files=digests).encode()]


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


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """One specialisation of a record, with its sources but for those of this package.

    `files` has the digest of each source's text by its place, `texts` the text by its digest.
    """

    used: Specialisation
    files: Mapping[str, str]
    texts: Mapping[str, bytes]

    def to_json(self, arch: str) -> str:
        """Return a text that is equal for what is equal when it is built for `arch`."""
        return self.used._replace(arch=arch).to_json(files=self.files)

    def unpack(self, folder: Path) -> Specialisation:
        """Write the sources below `folder`; return what was used, with paths that exist."""
        tree = folder / digest(self.files)  # equal trees are written once
        if not tree.exists():
            try:
                for place, name in self.files.items():
                    path = tree / place
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self.texts[name])
                tree.mkdir(parents=True, exist_ok=True)
            except (OSError, ValueError):  # such as a zero byte in a name
                import shutil

                shutil.rmtree(tree, ignore_errors=True)
                raise
        options = dict(self.used.options)
        for name in (FILES | FOLDERS).intersection(options):
            options[name] = [str(_path(place, tree)) for place in options[name]]
        for path in (path for name in FILES for path in options.get(name, ())):
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{path}: this version of jitkern has no such source")
        for path in (path for name in FOLDERS for path in options.get(name, ())):
            if Path(path).is_relative_to(tree):  # no header was found in it, but it is in the key
                os.makedirs(path, exist_ok=True)
        return self.used._replace(options=options)


def _path(place: str, tree: Path) -> Path:
    return source_path(place) if place.startswith(OWN_PREFIX) else tree / place


def replay(file: str | os.PathLike[str], *, trust: bool = False) -> list[Recorded]:
    """Read a file written under ``JITKERN_RECORD``: each specialisation once, by first use.

    Raises ValueError if it is no record, and, without `trust`, if other users could have written
    it; OSError if it cannot be read, or is no regular file.
    """
    from jitkern.cache.trust import written_by_others

    with open(fs.open_regular(Path(file), follow=True), "rb") as stream:
        status = os.fstat(stream.fileno())
        reason = "" if trust else written_by_others(status)
        if reason:
            command = f"jitkern warm --trust --replay {file}"
            raise ValueError(f"{file}: {reason}; if you trust them, replay it with: {command}")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"{file}: {status.st_size} bytes, expected at most {MAX_BYTES}")
        raw = stream.read(status.st_size + 1)
    texts: dict[str, bytes] = {}
    found: dict[bytes, tuple[int, Recorded]] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            value = _checked(fs.parse_json(line)) if line.strip() else {}
            if "text" in value:
                text = value["text"].encode("utf-8", "surrogateescape")
                texts[sha256(text)] = text
                continue
        except ValueError as error:
            raise ValueError(f"{file}:{number}: not a recorded specialisation: {error}") from error
        if value:
            used = Specialisation(*(value[name] for name in Specialisation._fields))
            used = used._replace(args=tuple(used.args))
            found.setdefault(line, (number, Recorded(used, value["files"], texts)))
    for number, one in found.values():
        for place, name in one.files.items():
            if name not in texts:
                raise ValueError(f"{file}:{number}: the record has no text for {_short(place)}")
    if not found:
        raise ValueError(
            f"{file}: nothing is recorded in it; record a run with JITKERN_RECORD=FILE"
        )
    return [one for _, one in found.values()]


_MEMBERS: dict[str, type] = {"record": int, "function": str, "args": list, "options": dict}
_MEMBERS |= {"arch": str, "files": dict}


def _checked(value: Any) -> dict[str, Any]:
    """Return the value of a line, whose members are as `record` writes them.

    The loader checks the options, as it does for a call.
    """
    form = value.get("record") if isinstance(value, dict) else None
    if type(form) is not int or form != FORMAT:
        raise ValueError(f"record: {_short(form)}, expected {FORMAT}")
    line: dict[str, Any] = value
    if line.keys() == {"record", "text"} and isinstance(line["text"], str):
        return line
    if line.keys() != _MEMBERS.keys():
        raise ValueError(f"expected an object of {', '.join(sorted(_MEMBERS))}, or of a text")
    for name, kind in _MEMBERS.items():
        if not isinstance(line[name], kind):
            raise ValueError(f"{name}: {_short(line[name])}, expected {kind.__name__}")
    if not line["args"] or not _is_texts(line["args"]):
        raise ValueError("args: expected a list of strings, the name first")
    if line["function"] not in ("load_jit", "load_aot"):
        raise ValueError("function: expected load_jit or load_aot")
    options, files = line["options"], line["files"]
    for place, name in files.items():
        if not _is_place(place, "./") or not isinstance(name, str):
            raise ValueError(f"files: {_short(place)}, expected a place such as ./src/scale.cu")
    for option in (FILES | FOLDERS).intersection(options):
        if not _is_texts(options[option]):
            raise ValueError(f"options: {option}: expected a list of strings")
        for place in options[option]:
            if not (_is_place(place, "./") or _is_place(place, OWN_PREFIX)):
                raise ValueError(f"options: {option}: {_short(place)}, expected ./... or jitkern:")
            if option in FILES and place[:2] == "./" and place not in files:
                raise ValueError(f"options: {option}: {_short(place)}, expected one of files")
    return line


def _is_place(place: str, prefix: str) -> bool:
    """Tell whether a name leads below a record's tree, or the package, and nowhere else."""
    if not place.startswith(prefix) or len(place) > _MAX_PLACE_CHARS:
        return False
    below = place.removeprefix(prefix)
    return below == "." or not {"", ".", ".."}.intersection(below.split("/"))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
