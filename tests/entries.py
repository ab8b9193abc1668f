"""Entries for the tests of the cache, and metas that only their checksum vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jitkern.cache.entry import META_NAME, Key, new_entry
from jitkern.cache.store import Cache
from jitkern.fs import canonical_json, digest, sha256

DATA = bytes(range(256)) * 16
VARIANT = "nvrtc-13.5"


def key(name: str = "store_656") -> Key:
    describe = {"op": name, "args": ["656"], "arch": "9.0"}
    return Key("device", name, digest(name), describe)


def publish(
    cache: Cache, name: str = "store_656", data: bytes = DATA, variant: str = VARIANT
) -> Path:
    files, notes = {"kernel.cubin": data}, {"build_ms": 12.5}
    entry = cache.publish(new_entry(key(name), variant, files, notes))
    assert entry.path is not None
    return entry.path


def sealed(meta: dict[str, Any]) -> bytes:
    """The text of a meta with the checksum that belongs to it, as whoever writes one can make."""
    return json.dumps({**meta, "checksum": sha256(canonical_json(meta))}).encode()


def change(path: Path, **changes: Any) -> None:
    """Change fields of the meta of the entry at `path`; one that is None goes."""
    meta = json.loads((path / META_NAME).read_bytes())
    del meta["checksum"]
    meta = {name: value for name, value in {**meta, **changes}.items() if value is not None}
    (path / META_NAME).write_bytes(sealed(meta))


def make(folder: Path) -> Path:
    """Make a directory of a cache as the cache would: nobody else's, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700)
    return folder


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


FILE = {"bytes": 1, "sha256": sha256(b"x")}

# Each of these had a right checksum and was imported; then list, info, export and warm ended in a
# TypeError for ever.
BAD_METAS: list[dict[str, Any]] = [
    {"describe": {"args": [5]}},
    {"describe": None},
    {"route": 5},
    {"family": "../../etc"},
    {"toolchain": ".."},
    {"artefact": "other"},
    {"schema": 2},
    {"files": {}},
    {"files": {"../kernel.cubin": FILE}, "artefact": "../kernel.cubin"},
    {"files": {"kernel.cubin": {**FILE, "bytes": -1}}},
    {"files": {"kernel.cubin": {"bytes": 1}}},
    {"built_unix_s": 1e300},
]
