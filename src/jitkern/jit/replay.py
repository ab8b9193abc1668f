"""Read a record that may come from anywhere, and lay out the sources that it brings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern import hints
from jitkern.cache.strangers import written_by_others
from jitkern.compilers.sources import OWN_PREFIX, source_path
from jitkern.files import digest, open_regular, parse_json, sha256
from jitkern.jit.record import MAX_BYTES
from jitkern.jit.specialisation import FILES, FLAGS, FOLDERS, FORMAT, Specialisation

MAX_UNPACKED_BYTES = 1 << 30
"""Of all sources laid out: a text is laid out in each tree that it is in."""

MAX_UNPACKED_FILES = 100_000

# A directory below a directory: what walks a path may call itself once for each.
_MAX_PLACE_CHARS, _MAX_PLACE_DEPTH = 1000, 100


@dataclass(frozen=True)
class Recorded:
    """One specialisation of a record.

    Attributes
    ----------
    used
        What was used; its paths are places in the record.
    files
        Place -> digest of the content, of all sources but those of this package.
    texts
        Digest -> content.
    """

    used: Specialisation
    files: Mapping[str, str]
    texts: Mapping[str, bytes]

    @property
    def tree(self) -> str:
        """Name of the tree of its sources: equal ones are laid out once."""
        return digest(self.files)

    def to_json(self, arch: str) -> str:
        """Return a text that is equal for what is equal when it is built for `arch`."""
        return self.used._replace(arch=arch).to_json(files=self.files)

    def unpack(self, folder: Path) -> Specialisation:
        """Lay out the sources below `folder`; return what was used with paths that are there.

        Raises
        ------
        OSError
            They cannot be written: one is in the place of another's directory.
        FileNotFoundError
            It names a source of jitkern that this version does not have.
        """
        tree = folder / self.tree
        if not tree.exists():
            try:
                for place, name in self.files.items():
                    path = tree / place
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self.texts[name])
                tree.mkdir(parents=True, exist_ok=True)
            except OSError:
                shutil.rmtree(tree, ignore_errors=True)
                raise
        options = dict(self.used.options)
        for name in (FILES | FOLDERS).intersection(options):
            options[name] = [str(_path(place, tree)) for place in options[name]]
        for path in (path for name in FILES for path in options.get(name, ())):
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{path}: this version of jitkern has no such source")
        for path in (path for name in FOLDERS for path in options.get(name, ())):
            if Path(path).is_relative_to(tree):  # a header may be found in none, and be counted
                os.makedirs(path, exist_ok=True)
        return self.used._replace(options=options)


def _path(place: str, tree: Path) -> Path:
    return source_path(place) if place.startswith(OWN_PREFIX) else tree / place


def replay(file: str | os.PathLike[str], *, trust: bool = False) -> list[Recorded]:
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
        A line is something else, there is none, or others could have written the file; the message
        names it.
    OSError
        The file cannot be read, or is no regular file.
    """
    with open(open_regular(Path(file), follow=True), "rb") as stream:
        status = os.fstat(stream.fileno())
        reason = "" if trust else written_by_others(Path(file), status)
        if reason:
            raise ValueError(f"{file}: {reason}; {hints.trust_record(file)}")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"{file}: {status.st_size} bytes, expected at most {MAX_BYTES}")
        raw = stream.read(status.st_size + 1)
    texts: dict[str, bytes] = {}
    found: dict[str, tuple[int, Specialisation, Mapping[str, str]]] = {}
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = _checked(parse_json(line))
            if "text" in value:
                data = value["text"].encode("utf-8", "surrogateescape")
                texts[sha256(data)] = data
            else:
                found.setdefault(str(line), (number, _specialisation(value), value["files"]))
        except ValueError as error:
            raise ValueError(f"{file}:{number}: not a recorded specialisation: {error}") from error
    if not found:
        raise ValueError(f"{file}: nothing is recorded in it; {hints.replay()}")
    return _joined(file, found.values(), texts)


def _joined(
    file: str | os.PathLike[str],
    found: Iterable[tuple[int, Specialisation, Mapping[str, str]]],
    texts: Mapping[str, bytes],
) -> list[Recorded]:
    """Give each specialisation its texts, as long as they do not become too many."""
    recorded: list[Recorded] = []
    trees: dict[str, None] = {}
    num_bytes = num_files = 0
    for number, used, files in found:
        missing = sorted(place for place, name in files.items() if name not in texts)
        if missing:
            raise ValueError(f"{file}:{number}: the record has no text for {_short(missing[0])}")
        one = Recorded(used, files, texts)
        recorded.append(one)
        if one.tree in trees:
            continue
        trees[one.tree] = None
        num_files += len(files)
        num_bytes += sum(len(texts[name]) for name in files.values())
        if num_bytes > MAX_UNPACKED_BYTES or num_files > MAX_UNPACKED_FILES:
            raise ValueError(
                f"{file}: unpacks to more than {MAX_UNPACKED_BYTES} bytes "
                f"or {MAX_UNPACKED_FILES} files"
            )
    return recorded


# -- one line --------------------------------------------------------------------------------------

_FIRST_FORMAT = {"function", "args", "options", "arch"}
_MEMBERS = {"record", "files", *_FIRST_FORMAT}


def _checked(value: Any) -> dict[str, Any]:
    """Return a line's value if it has the members of a line."""
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if value.keys() == _FIRST_FORMAT:
        raise ValueError(
            "a record of an older jitkern, which names files of the machine that it was made on; "
            "record the run again"
        )
    form = value.get("record")
    if type(form) is not int or form != FORMAT:
        raise ValueError(f"record: {_short(form)}, expected {FORMAT}")
    if value.keys() == {"record", "text"} and _is_text(value["text"]):
        return value
    if value.keys() != _MEMBERS:
        raise ValueError(f"expected an object of {', '.join(sorted(_MEMBERS))}, or of a text")
    return value


def _specialisation(value: Mapping[str, Any]) -> Specialisation:
    if value["function"] not in ("load_jit", "load_aot"):
        raise ValueError("function: expected load_jit or load_aot")
    if not _is_texts(value["args"]) or not value["args"]:
        raise ValueError("args: expected a list of strings, the name first")
    if not _is_text(value["arch"]):
        raise ValueError("arch: expected a string")
    if not isinstance(value["files"], dict) or not all(map(_is_text, value["files"].values())):
        raise ValueError("files: expected an object of strings")
    for place in value["files"]:
        if not _is_place(place) or place.startswith(OWN_PREFIX):
            raise ValueError(f"files: {_short(place)}, expected a place such as ./src/scale.cu")
    if not isinstance(value["options"], dict):
        raise ValueError("options: expected an object")
    for name, option in value["options"].items():
        is_right = _OPTIONS.get(name)
        if is_right is None:
            raise ValueError(f"options: {_short(name)}, expected one of {', '.join(_OPTIONS)}")
        if not is_right(option):
            raise ValueError(f"options: {name}: of another type than load_jit takes")
        for place in option if name in FILES | FOLDERS else ():
            if not _is_place(place):
                raise ValueError(f"options: {name}: {_short(place)}, expected ./... or jitkern:...")
            if name in FILES and not (place in value["files"] or place.startswith(OWN_PREFIX)):
                raise ValueError(f"options: {name}: {_short(place)}, expected one of files")
    args, options = tuple(value["args"]), value["options"]
    return Specialisation(value["function"], args, options, value["arch"])


def _is_place(place: str) -> bool:
    """Tell whether it is a name below a record's tree or of the package, and leads nowhere else."""
    for prefix in (OWN_PREFIX, "./"):
        if place.startswith(prefix):
            below = place.removeprefix(prefix)
            break
    else:
        return False
    parts = below.split("/")
    return (
        len(below) <= _MAX_PLACE_CHARS
        and len(parts) <= _MAX_PLACE_DEPTH
        and "\0" not in below
        and (below == "." or not {"", ".", ".."}.intersection(parts))
        and _can_be_encoded(below)
    )


def _can_be_encoded(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(_is_texts(pair) and len(pair) == 2 for pair in value)


def _is_device_wrappers(value: Any) -> bool:
    return isinstance(value, list) and all(_is_texts(one) and 2 <= len(one) <= 3 for one in value)


# What load_jit and load_aot take by name, as the loader writes it down.
_OPTIONS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(sorted(FILES | FOLDERS), _is_texts),
    **dict.fromkeys(sorted(FLAGS), _is_texts),
    **dict.fromkeys(("cpp_wrappers", "cuda_wrappers"), _is_pairs),
    "device_wrappers": _is_device_wrappers,
}
