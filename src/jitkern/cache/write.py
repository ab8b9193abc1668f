"""Writing one cache entry: its meta, its files, and all of it on the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jitkern.cache.entry import Key
from jitkern.cache.schema import META_MAX_BYTES, META_NAME, SCHEMA
from jitkern.errors import CacheError
from jitkern.fs import canonical_json, flush_directory, is_safe_name, sha256, write_new


def render_meta(
    key: Key, variant: str, files: Mapping[str, bytes], notes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the meta of an entry that holds `files` (the first one is the artefact)."""
    if not is_safe_name(variant):
        raise ValueError(f"publish: variant: {variant!r}, expected a plain name")
    if not files or not all(is_safe_name(name) for name in files):
        raise ValueError(f"publish: files: {sorted(files)}, expected one or more plain names")
    return {
        **notes,
        "schema": SCHEMA,
        "route": key.route,
        "name": key.name,
        "family": key.digest,
        "toolchain": variant,
        "describe": dict(key.describe),
        "artefact": next(iter(files)),
        "files": {
            name: {"bytes": len(data), "sha256": sha256(data)} for name, data in files.items()
        },
    }


def write_entry(
    path: Path, files: Mapping[str, bytes], meta: Mapping[str, Any], mode: int = 0o600
) -> None:
    """Write `files` and `meta` into the existing directory `path` and flush them to the disk.

    Their mode is `mode` under any umask.
    """
    for name, data in files.items():
        write_new(path / name, data, flush=True, mode=mode)
    body = {**meta, "checksum": sha256(canonical_json(meta))}
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
    if len(text) > META_MAX_BYTES:  # nobody would read it back
        raise CacheError(f"{META_NAME}: {len(text)} bytes, expected at most {META_MAX_BYTES}")
    write_new(path / META_NAME, text.encode(), flush=True, mode=mode)
    flush_directory(path)
