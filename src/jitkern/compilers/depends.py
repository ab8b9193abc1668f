"""What a C++ build has read, as the compiler reported it, in terms that hold on another machine.

A manifest maps each file to its content's digest. Files are named ``<n>:<path>``: the path below
the n-th root, the roots being the directories of the main sources and then the include paths, so
that two checkouts at different places share entries.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitkern.files import read_regular, sha256

Manifest = dict[str, Any]

_MAX_BYTES = 1 << 30


def manifest(read: Iterable[Path], roots: Sequence[Path], toolchain: Sequence[Path]) -> Manifest:
    """Describe the files a build has read.

    Parameters
    ----------
    read
        What the compiler reported.
    roots
        Directories that files are named relative to.
    toolchain
        Directories left out, because versions in the key stand for what they hold: the toolkit,
        the compiler's own headers, tvm-ffi.

    Returns
    -------
    dict
        ``files``: name -> sha256. ``absent``: names that did not exist but would have been found
        instead of one of the files; when one appears, the manifest does not hold any more.
    """
    # Compilers report files behind symbolic links as it pleases them, so all paths are resolved.
    resolved_roots = [os.path.realpath(root) for root in roots]
    left_out = [os.path.realpath(path) for path in toolchain]
    paths = [
        path
        for path in sorted({os.path.realpath(path) for path in read})
        if any(_is_below(path, root) for root in resolved_roots)
        or not any(_is_below(path, folder) for folder in left_out)
    ]
    files = {_name(path, resolved_roots): sha256(Path(path).read_bytes()) for path in paths}

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
        manifest does not hold here.
    """
    resolved_roots = [os.path.realpath(root) for root in roots]
    paths = [os.path.normpath(_path(name, resolved_roots)) for name in recorded["files"]]
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


def holds(recorded: Mapping[str, Any], roots: Sequence[Path]) -> bool:
    """Tell whether every file of the `recorded` manifest still has the content it had."""
    resolved_roots = [os.path.realpath(root) for root in roots]
    try:
        if any(os.path.exists(_path(name, resolved_roots)) for name in recorded["absent"]):
            return False
        return all(
            _content(_path(name, resolved_roots)) == expected
            for name, expected in recorded["files"].items()
        )
    except (OSError, KeyError, IndexError, ValueError, AttributeError, TypeError):
        return False


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


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _content(path: str) -> str:
    # A manifest may come from anywhere and name anything: what is no plain file does not hold.
    return sha256(read_regular(path, _MAX_BYTES, follow=True))
