"""Entries for the tests of the cache, and metas that only their checksum vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jitkern.cache.entry import Key
from jitkern.cache.schema import META_NAME
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
    entry = cache.publish(key(name), variant, {"kernel.cubin": data}, {"build_ms": 12.5})
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


# -- metas that make no sense ----------------------------------------------------------------------


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


FILE = {"bytes": 1, "sha256": sha256(b"x")}
A_NAME = "expected a plain name"
FILES = "expected an object: for each plain name its bytes and sha256"
DESCRIBE = "expected an object: op and arch strings, args a list of strings"

# Each of these had a right checksum and was imported; then list, info, export, verify and warm
# ended in a TypeError for ever.
BAD_METAS: list[tuple[dict[str, Any], str]] = [
    ({"describe": {"args": 5}}, f"describe: {{'args': 5}}, {DESCRIBE}"),
    ({"describe": {"args": [5]}}, f"describe: {{'args': [5]}}, {DESCRIBE}"),
    ({"describe": {"args": "656"}}, f"describe: {{'args': '656'}}, {DESCRIBE}"),
    ({"describe": {"op": ["x"]}}, f"describe: {{'op': ['x']}}, {DESCRIBE}"),
    ({"describe": {"arch": 9.0}}, f"describe: {{'arch': 9.0}}, {DESCRIBE}"),
    ({"describe": "x"}, f"describe: 'x', {DESCRIBE}"),
    ({"describe": []}, f"describe: [], {DESCRIBE}"),
    ({"describe": None}, f"describe: None, {DESCRIBE}"),
    ({"route": 5}, f"route: 5, {A_NAME}"),
    ({"route": "../x"}, f"route: '../x', {A_NAME}"),
    ({"name": ["x"]}, "name: ['x'], expected a string"),
    ({"family": 5}, "family: 5, expected 20 hex digits"),
    ({"family": "../../etc"}, "family: '../../etc', expected 20 hex digits"),
    ({"family": f"{'0' * 20}\n"}, f"family: '{'0' * 20}\\n', expected 20 hex digits"),
    ({"toolchain": {}}, f"toolchain: {{}}, {A_NAME}"),
    ({"toolchain": ".."}, f"toolchain: '..', {A_NAME}"),
    ({"artefact": 5}, f"artefact: 5, {A_NAME}"),
    ({"artefact": "other"}, "artefact: 'other', expected one of files"),
    ({"schema": True}, "schema: True, expected 1"),
    ({"schema": 1.0}, "schema: 1.0, expected 1"),
    ({"schema": 2}, "schema: 2, expected 1"),
    ({"files": []}, f"files: [], {FILES}"),
    ({"files": {}}, f"files: {{}}, {FILES}"),
    ({"files": {"a": 5}}, f"files: {{'a': 5}}, {FILES}"),
    ({"build_ms": "1"}, "build_ms: '1', expected a number, 0 or more"),
    ({"built_unix_s": True}, "built_unix_s: True, expected seconds since 1970"),
    ({"built_unix_s": 1e300}, "built_unix_s: 1e+300, expected seconds since 1970"),
    ({"note": nested(50)}, "not JSON: nested deeper than 32 levels"),
]
