"""Libraries planted for another user, really loaded or not: the constructor of one leaves a mark.

Each attack is carried out twice: as it is, and with JITKERN_CACHE_TRUST saying that it is no
attack. That shows that the planted library is one that would have been loaded.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from children import NATIVE, Children
from needs import needs_cxx
from owned import OTHER

from jitkern.cache.entry import Entry, read_entry
from jitkern.cache.store import Cache
from jitkern.compilers.find import find_cxx

MARKED = """
#include <stdio.h>
__attribute__((constructor)) static void run_when_loaded() {
  if (FILE* file = fopen("%s", "a")) fclose(file);
}
"""

NO_COMPILER = {"CXX": "/nowhere/c++"}  # then what any compiler has built will do


def build_library(folder: Path, value: int, mark: Path) -> bytes:
    """A library whose function returns `value`, and which makes the file `mark` when loaded."""
    folder.mkdir(exist_ok=True)
    text = NATIVE.replace('#include "value.h"', f"#define VALUE {value}\n#define COST 1")
    (folder / f"{value}.cc").write_text(text + MARKED % mark)
    command = [*find_cxx().command, "-shared", "-fPIC", "-o", f"{value}.so", f"{value}.cc"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / f"{value}.so").read_bytes()


class Attack:
    """What an attacker has: a sound entry to imitate, a library of his own, and its mark."""

    def __init__(self, children: Children, source: Path, sound: Path, folder: Path) -> None:
        self._children = children
        self._source = source
        self.mark = folder / "mark"
        self._library = build_library(folder, 666, self.mark)
        assert children.run(source, env={"JITKERN_CACHE_DIR": str(sound)})["value"] == 1
        (path,) = Cache(sound).paths()
        self.entry = read_entry(path)

    def plant(self, root: Path, variant: str = "", notes: dict[str, Any] | None = None) -> Entry:
        """Publish the library in the cache at `root`, with all checksums right, as its own user."""
        entry = self.entry
        files = {entry.artefact_name: self._library}
        cache = Cache(root, shared=True)
        planted = cache.publish(entry.key, variant or entry.variant, files, notes or entry.meta)
        assert planted.path is not None
        given = [planted.path, *planted.path.iterdir()]
        for path in given if variant else [root, *root.rglob("*")]:
            os.chown(path, OTHER, OTHER)
        return planted

    def victim(self, **environ: str) -> tuple[int, list[str]]:
        """What a process of root gets of its kernel, and its warnings."""
        report = self._children.run(self._source, env=environ)
        return report["value"], report["warnings"]

    def strikes(self, trust: str = str(OTHER), **environ: str) -> bool:
        """Whether the library is loaded by one who trusts its maker, after it has not been."""
        assert not self.mark.exists()
        value, _ = self.victim(**environ, JITKERN_CACHE_TRUST=trust)
        return value == 666 and self.mark.exists()


@pytest.fixture
def attack(children: Children, sources: Path, tmp_path: Path) -> Attack:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    return Attack(children, sources / "tiny.cc", tmp_path / "sound", tmp_path / "evil")


def state(root: Path) -> list[tuple[str, int, int]]:
    paths = sorted([root, *root.rglob("*")])
    return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_ino) for path in paths]


@needs_cxx
def test_a_cache_folder_of_somebody_else(attack: Attack, cache_dir: Path) -> None:
    attack.plant(cache_dir)
    before = state(cache_dir)
    value, (warning,) = attack.victim()
    assert value == 1
    assert f"{cache_dir}: it belongs to uid {OTHER}; chown -R 0 {cache_dir} if all " in warning
    assert f"set JITKERN_CACHE_TRUST={OTHER}" in warning
    assert "this process keeps what it compiles in " in warning
    assert state(cache_dir) == before  # neither locks nor times of use
    assert attack.strikes()


@needs_cxx
def test_an_own_cache_that_a_group_may_write(attack: Attack, cache_dir: Path) -> None:
    """As made under umask 002 in a setgid folder; a name that sorts last used to win."""
    assert attack.victim()[0] == 1
    planted = attack.plant(cache_dir, "zzz-1.0", {**attack.entry.meta, "built_unix_s": 4e9})
    os.chown(cache_dir, 0, OTHER)
    cache_dir.chmod(0o2775)
    value, (warning,) = attack.victim()
    assert value == 1
    assert f"{cache_dir}: its mode, 2775, lets others write it; chmod -R go-w " in warning
    # What is left of the attack when the modes have been mended.
    subprocess.run(["chmod", "-R", "go-w", str(cache_dir)], check=True)
    value, (warning,) = attack.victim()
    assert value == 1
    assert f"this cache entry is not used: {planted.path}: it belongs to uid {OTHER}" in warning
    assert attack.strikes(**NO_COMPILER)


@needs_cxx
def test_a_cache_below_a_folder_that_everyone_may_write(attack: Attack, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    own = scratch / "cache"
    environ = {"JITKERN_CACHE_DIR": str(own)}
    assert attack.victim(**environ)[0] == 1
    own.rename(scratch / "set-aside")
    attack.plant(own)
    scratch.chmod(0o777)
    value, (warning,) = attack.victim(**environ)
    assert value == 1
    assert f"{scratch}: its mode, 0777, lets others write it; chmod go-w" in warning
    assert attack.strikes(trust="everyone", **environ)
