"""A cache with one entry whose owners and modes the tests change, part by part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from entries import VARIANT, key, publish

from jitkern.cache.entry import META_NAME
from jitkern.cache.store import Cache
from jitkern.cache.trust import EVERYONE as EVERYONE
from jitkern.env import NOBODY, Trust

OTHER = 54321
PLACE, ENTRY = ["root", "base"], ["key", "entry", "artefact", "meta"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    """A cache with one entry."""
    publish(Cache(tmp_path / "cache"))
    return tmp_path / "cache"


def part(root: Path, name: str) -> Path:
    base = root / "v1"
    entry = base / key().directory / VARIANT
    return {
        "root": root,
        "base": base,
        "key": entry.parent,
        "entry": entry,
        "artefact": entry / "kernel.cubin",
        "meta": entry / META_NAME,
    }[name]


def found(root: Path, whom: Trust = NOBODY, **kwargs: Path) -> bool:
    return Cache(root, trust=whom, **kwargs).lookup(key()) is not None
