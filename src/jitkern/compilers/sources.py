"""Sources: where jitkern's own are, the include closure that a compile sees, and its options.

NVRTC gets headers in memory and finds one only by the exact spelling of its ``#include`` (NVRTC
13.5). So each file gets one name, and each directive that resolves becomes ``#include <name>``. The
result contains no path of this machine; it is what is hashed and compiled. Line numbers stay.
"""

from __future__ import annotations

import codecs
import os
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jitkern.fs import digest, sha256

CSRC = Path(__file__).resolve().parents[1] / "csrc"  # the package's C++ and CUDA sources
OWN_PREFIX = "jitkern:"  # names a source of the package: jitkern:ops/store.cu


def source_path(name: str) -> Path:
    """Return the path of a source: in CSRC with `OWN_PREFIX`, else from this directory."""
    own = name.removeprefix(OWN_PREFIX)
    return Path(os.path.abspath(name if own == name else CSRC / own))


def include_dirs(csrc: Path) -> tuple[Path, ...]:
    """Return the include directories of jitkern's sources: <jitkern/copy.cuh>, "ops/store.cu"."""
    return (csrc / "include", csrc)


INCLUDE_DIRS = include_dirs(CSRC)
DEVICE_STD = "-std=c++17"  # device code, by NVRTC and nvcc

# Options that read other files, in their long and short spellings.
_FILE_OPTIONS = (
    *("-I", "--include-path", "-include-path", "--pre-include", "-pre-include", "-include"),
    *("-isystem", "--system-include", "-system-include"),
    *("-optf", "--options-file", "-options-file"),
)

# Raw strings, comments and literals are matched to be skipped: an #include inside is text.
_DIRECTIVES = r"""
      R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
    | /\*.*?\*/
    | //(?:\\\r?\n|[^\n])*
    | ^[ \t]*\#[ \t]*include\b[ \t]*(?P<argument>(?:<[^>\n]*>|"[^"\n]*"|(?:\\\r?\n|[^\n])*))
    | "(?:\\.|[^"\\\n])*"
    | '(?:\\.|[^'\\\n])*'
"""
_ASKS = "__has_include"
_QUESTIONS = rf"""
    | \b{_ASKS}[ \t]*\([ \t]*(?P<asked><[^>\n]*>|"[^"\n]*")(?=[ \t]*\))
"""
_FLAGS = re.VERBOSE | re.MULTILINE | re.DOTALL
_TOKEN = re.compile(_DIRECTIVES, _FLAGS)


class Closure(NamedTuple):
    """A translation unit and the headers that it may include, all directives rewritten."""

    source: str
    headers: Mapping[str, str]  # include name -> text; names are relative, without ".."
    files: tuple[Path, ...]  # where each header is
    missing: tuple[str, ...] = ()  # names that resolve nowhere: CUDA's own, or in unused branches
    texts: tuple[bytes, ...] = ()  # each header as it is on disk

    @property
    def digest(self) -> str:
        """20 hex digits over source and headers."""
        # Digests of the texts: JSON would escape the texts, a fifth of a warm load.
        texts = {"": self.source, **self.headers}.items()
        return digest(
            {name: sha256(text.encode("utf-8", "surrogateescape")) for name, text in texts}
        )


def include_closure(
    source: str, *, include_dirs: Sequence[Path] = INCLUDE_DIRS, computed: bool = False
) -> Closure:
    """Read everything that a source may include, directly or not.

    Conditionals are not evaluated, so the closure holds at least what a compile needs. A quoted
    name is looked up beside the including file, then in `include_dirs` in order. A directive that
    resolves nowhere gets angle brackets: with quotes NVRTC would search the current directory. A
    computed include (``#include MACRO``) is a ValueError, unless `computed`.

    Examples
    --------
    >>> closure = include_closure('#include <jitkern/types.h>')
    >>> list(closure.headers)
    ['jitkern/types.h']
    """
    return _Walk([Path(d) for d in include_dirs], computed).run(source)


def words(options: Sequence[str], argument: str = "extra_cuda_cflags") -> list[str]:
    """Split options, each of which may hold several words quoted as in a shell.

    An open quote raises ValueError, which names `argument` and the option.
    """
    split: list[str] = []
    for option in options:
        try:
            split += shlex.split(option)
        except ValueError as error:
            raise ValueError(
                f"{argument}: {option!r}: {error}, expected words quoted as in a shell"
            ) from None
    return split


def is_cpp17(options: Sequence[str]) -> bool:
    """Tell whether device code is C++17 (the default) or newer with these options."""
    text = " ".join(["-std=c++17", *words(options)])
    standard = re.findall(r"(?:^| )--?std[= ]\S*?\+\+(\w+)", text)[-1]
    return standard not in ("98", "03", "11", "14")


def check_options(options: Sequence[str], argument: str = "extra_cuda_cflags") -> None:
    """Raise ValueError for an option that reads files: the include closure does not hold them."""
    for option in options:
        if option.startswith(_FILE_OPTIONS):
            raise ValueError(
                f"{argument}: {option!r}, expected extra_include_paths for headers, "
                "and each option itself"
            )


def with_defaults(defaults: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return `defaults`, then `options`; without the default -std if `options` have one.

    NVRTC takes it only once, nvcc warns of two, and for g++ the last one counts.
    """
    replaced = any(option.lstrip("-").partition("=")[0] == "std" for option in options)
    return [o for o in defaults if not (replaced and o.startswith("-std="))] + list(options)


class _Walk:
    """One traversal of the includes."""

    def __init__(self, include_dirs: Sequence[Path], computed: bool) -> None:
        self._include_dirs = include_dirs
        self._computed = computed
        self._name_of: dict[str, str] = {}  # absolute path -> include name
        self._path_of: dict[str, Path] = {}  # include name -> path, in order of discovery
        self._missing: dict[str, None] = {}  # in order of discovery

    def run(self, source: str) -> Closure:
        rewritten = self._rewrite(source, None)
        headers: dict[str, str] = {}
        texts: list[bytes] = []
        pending = list(self._path_of)
        while pending:
            for name in pending:
                path = self._path_of[name]
                # Bytes that are not UTF-8, in an old comment, are kept: nvrtc encodes them back.
                texts.append(path.read_bytes())
                # NVRTC takes no byte order mark, as nvcc and g++ do.
                text = texts[-1].removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
                headers[name] = self._rewrite(text, name)
            pending = [name for name in self._path_of if name not in headers]
        files = tuple(self._path_of[name] for name in headers)
        return Closure(rewritten, headers, files, tuple(self._missing), tuple(texts))

    def _rewrite(self, text: str, includer: str | None) -> str:
        # Only if it occurs: looking for __has_include makes a warm load a third slower.
        asks = _ASKS in text
        token = re.compile(_DIRECTIVES + _QUESTIONS, _FLAGS) if asks else _TOKEN
        # Stop after the last directive: scanning whole files takes 1.6 ms instead of 0.8.
        last = text.rfind("include")
        parts, done = [], 0
        for match in token.finditer(text):
            if match.start() > last:
                break
            asked = match["asked"] if asks else None
            argument = match["argument"] if asked is None else asked
            if argument is None:
                continue
            if argument[:1] not in ("<", '"') or argument[-1] not in '>"' or len(argument) < 3:
                if self._computed:
                    continue
                line = text.count("\n", 0, match.start()) + 1
                raise ValueError(
                    f"{includer or 'source'}:{line}: computed include '{match[0].strip()}', "
                    'expected #include "file" or #include <file>'
                )
            spelling = argument[1:-1]
            name = self._resolve(spelling, includer if argument[0] == '"' else None)
            if name is None and asked is None:  # a source that asks can do without
                self._missing[spelling] = None
            parts += [text[done : match.end() - len(argument)], f"<{name or spelling}>"]
            done = match.end()
        return "".join([*parts, text[done:]])

    def _resolve(self, spelling: str, includer: str | None) -> str | None:
        """Return the name of the file that a directive includes, or None."""
        if os.path.isabs(spelling):
            return self._known(Path(spelling), posixpath.basename(spelling))
        beside = None
        if includer is not None:
            name = posixpath.join(posixpath.dirname(includer), spelling)
            beside = self._known(self._path_of[includer].parent / spelling, name)
        places = (self._known(directory / spelling, spelling) for directory in self._include_dirs)
        return beside or next(filter(None, places), None)

    def _known(self, path: Path, wanted: str) -> str | None:
        if not os.path.isfile(path):  # Path.is_file raises if a directory cannot be entered
            return None
        # Links are not resolved: a header's neighbours are in the directory it was found in.
        key = os.path.abspath(path)
        name = self._name_of.get(key)
        if name is None:
            name = self._free_name(wanted)
            self._name_of[key] = name
            self._path_of[name] = Path(key)
        return name

    def _free_name(self, wanted: str) -> str:
        """Return `wanted` without ``..``, made unique: two directories may have the same name."""
        normal = posixpath.normpath(wanted)
        base = "/".join("up" if part == ".." else part for part in normal.split("/"))
        name, count = base, 1
        while name in self._path_of:
            count += 1
            name = f"{count}/{base}"
        return name
