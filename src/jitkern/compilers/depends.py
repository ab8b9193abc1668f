"""What a C++ build has read, as the compiler reported it, in terms that hold on another machine.

A manifest maps each file to its content's digest. Files are named ``<n>:<path>``: the path below
the n-th root, the roots being the directories of the main sources and then the include paths, so
that two checkouts at different places share entries. Headers of the system's packages and what the
linker's flags name are at the same place everywhere or nowhere: ``<path>`` is absolute then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jitkern.fs import read_regular, sha256

Manifest = dict[str, Any]

_MAX_BYTES = 1 << 30

# Where the C library has its headers, and Debian part of them: /usr/include/x86_64-linux-gnu.
_LIBC_DIRECTORY = re.compile(r"/usr/include(/\w+-linux-\w+)?$")

# What it shares with no package: its own directories and, of an interface that only grows, Linux's.
_LIBC_PARTS = ("bits", "gnu", "asm", "asm-generic", "linux")

# Each of its headers says so, but for what it has of BSD and what only includes another header.
_LIBC_SAYS = b"GNU C Library"
_LIBC_NAMES = (
    *("poll.h", "syscall.h", "syslog.h", "wait.h", "sys/errno.h", "sys/fcntl.h", "sys/queue.h"),
    *("sys/signal.h", "sys/syslog.h", "sys/termios.h", "sys/unistd.h", "sys/vfs.h"),
)

# Options of the linker whose value may be a word of its own, and is no file.
_WITH_VALUE = frozenset(("-L", "-l", "-u", "-e", "-h", "-o", "-z", "-soname", "-rpath"))

_SHARED = re.compile(r"\.so(\.[\d.]+)?$")


class HeaderDirectories(NamedTuple):
    """Directories of headers that are no project's.

    Attributes
    ----------
    toolchain
        The compilers' own, CUDA's, tvm-ffi's: versions in a key stand for what they hold.
    system
        Others in which a compiler looks by itself: the C library's, for which a key has its
        version, and those of packages, for which it has nothing.
    """

    toolchain: Sequence[Path]
    system: Sequence[Path]


def manifest(
    read: Iterable[Path],
    roots: Sequence[Path],
    directories: HeaderDirectories,
    linked: Iterable[Path] = (),
) -> Manifest:
    """Describe the files a build has read.

    Parameters
    ----------
    read
        What the compiler reported.
    roots
        Directories that files are named relative to.
    directories
        Where files are left out, all or those of the C library.
    linked
        What the linker has read of the caller's.

    Returns
    -------
    dict
        ``files``: name -> sha256. ``absent``: names that did not exist but would have been found
        instead of one of the files; when one appears, the manifest does not hold any more.
    """
    # Compilers report files behind symbolic links as it pleases them, so all paths are resolved.
    resolved_roots = [os.path.realpath(root) for root in roots]
    left_out = [os.path.realpath(path) for path in directories.toolchain]
    system = [os.path.realpath(path) for path in directories.system]
    paths, others = [], [str(path) for path in linked]
    for path in sorted({os.path.realpath(path) for path in read}):
        if any(_is_below(path, root) for root in resolved_roots):
            paths.append(path)
        elif any(_is_below(path, folder) for folder in left_out):
            continue
        elif not any(_is_below(path, folder) for folder in system):
            paths.append(path)
        elif not _is_libcs(path, system):
            others.append(path)
    names = {_name(path, resolved_roots): path for path in paths}
    names |= {f"0:{path}": path for path in others}
    files = {name: sha256(Path(path).read_bytes()) for name, path in names.items()}

    missing = (path for path in _looked_for(paths, resolved_roots) if not os.path.exists(path))
    absent = {_name(path, resolved_roots) for path in missing}
    return {"files": files, "absent": sorted(absent)}


def sources(
    recorded: Mapping[str, Any], roots: Sequence[Path], links: Iterable[str] = ()
) -> list[str]:
    """Return all files that a build read or looked for: what another machine needs to have.

    Parameters
    ----------
    recorded
        A manifest that holds.
    roots
        The roots that it was made with.
    links
        By which paths files were found, where these are others than those of the files.

    Returns
    -------
    list of str
        Absolute paths: the files that were read, and those that were not but lie where one of them
        is looked for. Without these the build elsewhere notes that they are missing, and its
        manifest does not hold here. What packages bring is left out.
    """
    resolved_roots = [os.path.realpath(root) for root in roots]
    names = [name for name in recorded["files"] if not _is_absolute(name)]
    paths = [os.path.normpath(_path(name, resolved_roots)) for name in names]
    paths += links
    # Known to be absent, all but a few: of torch's headers 5 million are looked for.
    absent = {os.path.normpath(_path(name, resolved_roots)) for name in recorded["absent"]}
    looked_for = (path for path in _looked_for(paths, resolved_roots) if path not in absent)
    return list(dict.fromkeys([*paths, *filter(os.path.isfile, looked_for)]))


def _looked_for(paths: Sequence[str], roots: Sequence[str]) -> Iterator[str]:
    """Yield where a compiler may look for the files at `paths`, before it finds them or not."""
    # A quoted include looks beside the including file first, then along the include paths.
    folders = dict.fromkeys([*roots, *(os.path.dirname(path) for path in paths)])
    for path in paths:
        for root in roots:
            if _is_below(path, root):
                spelling = os.path.relpath(path, root)
                yield from (os.path.join(folder, spelling) for folder in folders)


def holds(
    recorded: Mapping[str, Any],
    roots: Sequence[Path],
    may_lack: Callable[[], bool] = lambda: False,
) -> bool:
    """Tell whether every file of the `recorded` manifest still has the content it had.

    Parameters
    ----------
    recorded
        A manifest.
    roots
        The roots of this machine.
    may_lack
        Whether packages and libraries that were there for the build may be missing by now. Called
        if one is.
    """
    resolved_roots = [os.path.realpath(root) for root in roots]
    try:
        if any(os.path.exists(_path(name, resolved_roots)) for name in recorded["absent"]):
            return False
        for name, expected in recorded["files"].items():
            path = _path(name, resolved_roots)
            if _is_absolute(name) and not os.path.lexists(path) and may_lack():
                continue
            if _content(path) != expected:
                return False
        return True
    except (OSError, KeyError, IndexError, ValueError, AttributeError, TypeError):
        return False


class Linked(NamedTuple):
    """What flags for the linker name.

    Attributes
    ----------
    flags
        The words, with absolute paths: a build runs in another directory.
    files
        Those that become part of a library, and scripts: objects, archives, also what ``-l`` finds
        in the directories of ``-L``. No shared libraries, which are found again by the loader.
    """

    flags: list[str]
    files: list[Path]


def linked(ldflags: Sequence[str]) -> Linked:
    """Read the words of the linker's flags; the compiler reports nothing of what they name."""
    flags: list[str] = []
    files: list[Path] = []
    folders: list[Path] = []
    libraries: list[str] = []

    def look(given: Sequence[str]) -> Iterator[str]:
        pending = iter(given)
        for word in pending:
            option, value = word[:2], word[2:]
            if word in _WITH_VALUE:
                value = next(pending, "")
            if word.startswith("-Wl,"):
                yield "-Wl," + ",".join(look(word[4:].split(",")))
            elif option == "-L" and not value.startswith(("=", "$SYSROOT")):
                folders.append(Path(value).absolute())
                yield f"-L{folders[-1]}"
            elif option == "-l":
                libraries.append(value[1:] if value[:1] == ":" else f"lib{value}.a")
                yield f"-l{value}"
            elif word in _WITH_VALUE:
                yield from (word, value)
            else:
                head, file = _file_of(word)
                if file is not None:
                    files.append(file)
                yield word if file is None else f"{head}{file}"

    flags += look(ldflags)
    for library in libraries:
        found = [folder / library for folder in folders if os.path.isfile(folder / library)]
        files += found[:1]
    kept = (file for file in files if not _SHARED.search(file.name))
    return Linked(flags, list(dict.fromkeys(kept)))


def _file_of(word: str) -> tuple[str, Path | None]:
    """Split the file off a word: ``libx.a``, ``@flags.txt``, ``--version-script=exports.map``."""
    head = "@" if word[:1] == "@" else word[: word.find("=") + 1] if word[:1] == "-" else ""
    name = word[len(head) :]
    return head, Path(name).absolute() if os.path.isfile(name) else None


def changed_since(read: Iterable[Path], unix_s: float) -> bool:
    """Tell whether any of the files was written, replaced or renamed after `unix_s`."""
    try:
        return any(path.stat().st_ctime > unix_s for path in read)
    except OSError:
        return True


def _name(path: str, roots: Sequence[str]) -> str:
    inside = [number for number, root in enumerate(roots) if _is_below(path, root)]
    number = max(inside, key=lambda n: len(roots[n]), default=0)
    return f"{number}:{os.path.relpath(path, roots[number])}"


def _path(name: str, roots: Sequence[str]) -> str:
    number, _, below = name.partition(":")
    return os.path.join(roots[int(number)], below)


def _is_absolute(name: str) -> bool:
    return name.partition(":")[2].startswith("/")


def _is_libcs(path: str, system: Iterable[str]) -> bool:
    folders = [one for one in system if _LIBC_DIRECTORY.search(one) and _is_below(path, one)]
    names = [os.path.relpath(path, folder) for folder in folders]
    if any(name in _LIBC_NAMES or name.split("/")[0] in _LIBC_PARTS for name in names):
        return True
    return bool(names) and _LIBC_SAYS in Path(path).read_bytes()


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _content(path: str) -> str:
    # A manifest may come from anywhere and name anything: what is no plain file does not hold.
    return sha256(read_regular(path, _MAX_BYTES, follow=True))
