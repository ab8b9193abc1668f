"""Libraries planted for another user, really loaded or not: the constructor of one leaves a mark.

Each attack is carried out twice: as it is, and with JITKERN_CACHE_TRUST saying that it is no
attack. That shows that the planted library is one that would have been loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from children import NATIVE, Children
from needs import needs_cxx
from owned import OTHER, needs_root

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
        (info,) = Cache(sound).entries()
        self.entry = read_entry(info.path)

    def plant(self, root: Path, variant: str = "", notes: dict[str, Any] | None = None) -> Entry:
        """Publish the library in the cache at `root`, with all checksums right, as its own user."""
        entry = self.entry
        files = {entry.artefact_name: self._library}
        cache = Cache(root, shared=True)
        planted = cache.publish(entry.key, variant or entry.variant, files, notes or entry.notes)
        assert planted.path is not None
        given = [planted.path, *planted.path.iterdir()]
        for path in given if variant else [root, *root.rglob("*")]:
            os.chown(path, OTHER, OTHER)
        return planted

    def victim(self, **environ: str) -> tuple[int, list[str]]:
        """What a process of root gets of its kernel, and its warnings."""
        report = self._children.run(self._source, env=environ)
        return report["value"], report["warnings"]

    def strikes(self, **environ: str) -> bool:
        """Whether the library is loaded by one who trusts its maker, after it has not been."""
        assert not self.mark.exists()
        value, _ = self.victim(**environ, JITKERN_CACHE_TRUST=f"{OTHER},group:{OTHER}")
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
def test_a_cache_directory_of_somebody_else(attack: Attack, cache_dir: Path) -> None:
    attack.plant(cache_dir)
    before = state(cache_dir)
    value, (warning,) = attack.victim()
    assert value == 1
    assert f"{cache_dir} (owner {OTHER}, mode 0755): {OTHER} can change what is in it" in warning
    assert f"set JITKERN_CACHE_TRUST={OTHER}" in warning
    assert "this process keeps what it compiles in " in warning
    assert state(cache_dir) == before  # neither locks nor times of use
    assert attack.strikes()


@needs_cxx
def test_a_cache_path_that_somebody_else_was_first_to_make(
    attack: Attack, cache_dir: Path, tmp_path: Path
) -> None:
    like_tmp = tmp_path / "like-tmp"
    like_tmp.mkdir()
    like_tmp.chmod(0o1777)
    attack.plant(like_tmp / "kernels")
    environ = {"JITKERN_CACHE_PATH": str(like_tmp / "kernels")}
    value, (warning,) = attack.victim(**environ)
    assert value == 1
    assert warning.startswith("jitkern: this cache is not searched: ")
    assert len(Cache(cache_dir).entries()) == 1
    assert attack.strikes(**environ)


@needs_cxx
@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_root_with_the_home_of_a_user(
    attack: Attack, children: Children, tmp_path: Path, variable: str
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "JITKERN_CACHE_DIR"):
        children.env.pop(name, None)
    home = tmp_path / "home"
    root = home / (".cache/jitkern" if variable == "HOME" else "jitkern")
    attack.plant(root)
    for path in (home, root.parent):
        os.chown(path, OTHER, OTHER)
    value, (warning,) = attack.victim(**{variable: str(home)})
    assert value == 1
    assert f"{home} (owner {OTHER}, mode 0755): {OTHER} can change" in warning
    assert attack.strikes(**{variable: str(home)})


@needs_cxx
@pytest.mark.parametrize("where", ["root", "v1", "key"])
def test_an_own_cache_that_a_group_may_write(attack: Attack, cache_dir: Path, where: str) -> None:
    """As made under umask 002 in a setgid directory; a name that sorts last used to win."""
    assert attack.victim()[0] == 1
    planted = attack.plant(cache_dir, "zzz-1.0", {**attack.entry.notes, "built_unix_s": 4e9})
    assert planted.path is not None
    open_to_all = {"root": cache_dir, "v1": cache_dir / "v1", "key": planted.path.parent}[where]
    os.chown(open_to_all, 0, OTHER)
    open_to_all.chmod(0o2775)
    value, warnings = attack.victim()
    assert value == 1
    text = (
        f"{open_to_all} (owner root, mode 2775): group:{OTHER} can change what is in it; chmod -R"
    )
    assert text in warnings[0]
    assert attack.strikes(**NO_COMPILER)


@needs_cxx
def test_an_own_cache_with_an_entry_of_somebody_else(attack: Attack, cache_dir: Path) -> None:
    """What is left of an attack when the modes have been mended."""
    assert attack.victim()[0] == 1
    planted = attack.plant(cache_dir, "zzz-1.0", {**attack.entry.notes, "built_unix_s": 4e9})
    value, (warning,) = attack.victim(**NO_COMPILER)
    assert value == 1
    assert f"this cache entry is not used: {planted.path} (owner {OTHER}" in warning
    assert attack.strikes(**NO_COMPILER)


@needs_cxx
def test_a_cache_below_a_directory_that_everyone_may_write(
    attack: Attack, children: Children, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    own = scratch / "cache"
    environ = {"JITKERN_CACHE_DIR": str(own)}
    assert attack.victim(**environ)[0] == 1
    own.rename(scratch / "set-aside")
    attack.plant(own)
    scratch.chmod(0o777)
    value, (warning,) = attack.victim(**environ)
    assert value == 1
    assert f"{scratch} (owner root, mode 0777): everyone can change what is in it" in warning
    assert not attack.mark.exists()
    assert attack.victim(**environ, JITKERN_CACHE_TRUST="everyone")[0] == 666


@needs_cxx
def test_a_link_in_the_place_of_an_entry(attack: Attack, cache_dir: Path, tmp_path: Path) -> None:
    """Even of a user who may be trusted: what a link leads to may be anybody's tomorrow."""
    assert attack.victim()[0] == 1
    elsewhere = attack.plant(tmp_path / "elsewhere").path
    assert elsewhere is not None
    own = cache_dir / "v1" / attack.entry.key.directory / attack.entry.variant
    shutil.rmtree(own)
    own.symlink_to(elsewhere)
    assert attack.victim(JITKERN_CACHE_TRUST="everyone")[0] == 1
    assert not attack.mark.exists()


@needs_cxx
@needs_root
def test_somebody_elses_word_is_needed_only_where_it_is_somebody_elses(
    children: Children, sources: Path, cache_dir: Path
) -> None:
    """A cache of root is used by everyone, without a word."""
    children.run(sources / "tiny.cc")
    assert children.run(sources / "tiny.cc", env={"JITKERN_CACHE_TRUST": "1234"})["cached"] == 1
