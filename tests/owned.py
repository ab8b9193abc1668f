"""A cache with one entry whose owners and modes the tests change, part by part."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest
from entries import VARIANT, key, publish

from jitkern.cache import strangers
from jitkern.cache.schema import META_NAME
from jitkern.cache.store import Cache
from jitkern.env import NOBODY, Trust

OTHER = 54321
EVERYONE = Trust(everyone=True)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def no_private_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group may write is written by others here; one test asks for the exception."""
    monkeypatch.setattr(strangers, "_private_group", lambda user: None)


@pytest.fixture
def cache_root(tmp_path: Path, no_private_groups: None) -> Path:
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


def name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def group_of(path: Path) -> str:
    try:
        return grp.getgrgid(path.stat().st_gid).gr_name
    except KeyError:
        return str(path.stat().st_gid)


ME = name_of(os.geteuid())
PLACE, ENTRY = ["root", "base"], ["key", "entry", "artefact", "meta"]
