"""Who may have written a cache: owner and mode of its folder and of those above."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import MALLORY as OTHER
from children import as_user, needs_root
from entries import key, publish

from jitkern.cache import get
from jitkern.cache.store import Cache
from jitkern.cache.trust import UntrustedError, written_by_others
from jitkern.errors import CacheError


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    """A cache with one entry."""
    publish(Cache(tmp_path / "cache"))
    return tmp_path / "cache"


def is_found(root: Path, **options: Any) -> bool:
    return Cache(root, **options).lookup(key()) is not None


@pytest.mark.parametrize("harm", ["mode", pytest.param("owner", marks=needs_root)])
@pytest.mark.parametrize("part", [".", "v1"])
def test_a_cache_that_others_could_have_written_is_not_used(
    cache_root: Path, part: str, harm: str
) -> None:
    path = cache_root / part
    if harm == "mode":
        path.chmod(0o777)
        reason, advice = "its mode, 0777, lets others write it", "chmod -R go-w"
    else:
        os.chown(path, OTHER, OTHER)
        reason, advice = f"it belongs to uid {OTHER}", "chown -R 0"
    with pytest.raises(UntrustedError) as caught:
        is_found(cache_root)
    assert str(caught.value) == f"{path}: {reason}; {advice} {path} if all in it is yours"
    assert is_found(cache_root, shared=True)  # a wheel's
    subprocess.run([*advice.split(), str(path)], check=True)
    assert is_found(cache_root)


@needs_root
def test_a_group_of_the_owners_own_may_write(cache_root: Path) -> None:
    """Under umask 002, where each user has a group of his own number, folders are 0775."""
    cache_root.chmod(0o775)
    assert is_found(cache_root)
    os.chown(cache_root, 0, OTHER)
    with pytest.raises(UntrustedError, match="its mode, 0775, lets others write it"):
        is_found(cache_root)


@needs_root
def test_a_cache_of_root_is_every_users(cache_root: Path) -> None:
    status = cache_root.stat()
    as_user(OTHER, lambda: os._exit(bool(written_by_others(status))))


def test_a_cache_folder_that_is_a_file(use: Callable[..., None]) -> None:
    """It advised chmod -R go-w /dev/null."""
    use(CACHE_DIR="/dev/null")
    assert get.user_cache().lookup(key()) is None
    with pytest.raises(CacheError, match=r"/dev/null.*: cannot publish an entry: Not a d"):
        publish(get.user_cache())


def test_nothing_is_made_where_others_may_write(cache_root: Path) -> None:
    cache_root.chmod(0o777)
    before = sorted(cache_root.rglob("*"))
    cache = Cache(cache_root)
    for act in (lambda: publish(cache, "another"), cache.clear):
        with pytest.raises(CacheError, match="lets others write it"):
            act()
    with cache.lock(key(), timeout_s=1) as held:
        assert not held
    assert sorted(cache_root.rglob("*")) == before


def test_the_folders_above(cache_root: Path) -> None:
    above = cache_root.parent
    above.chmod(0o1777)
    assert is_found(cache_root)  # like /tmp: nobody can rename what is ours
    above.chmod(0o777)
    with pytest.raises(UntrustedError) as caught:
        is_found(cache_root)
    text = f"{above}: its mode, 0777, lets others write it; chmod go-w {above}"
    assert str(caught.value) == text


def test_above_the_home_folder_nothing_is_checked(tmp_path: Path) -> None:
    home = tmp_path / "open" / "home"
    home.mkdir(parents=True, mode=0o755)
    (tmp_path / "link").symlink_to(home)
    root = home / ".cache" / "jitkern"
    publish(Cache(root))
    home.parent.chmod(0o777)
    for spelling in (home, tmp_path / "link"):
        assert is_found(root, home=spelling)
    for elsewhere in (None, tmp_path / "elsewhere"):
        with pytest.raises(UntrustedError):
            is_found(root, home=elsewhere)
    (home / ".cache").chmod(0o777)
    with pytest.raises(UntrustedError, match=r"/\.cache: its mode"):
        is_found(root, home=home)


def test_the_root_may_be_a_link_and_is_followed_once(cache_root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(cache_root)
    cache = Cache(link)
    assert cache.lookup(key()) is not None
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    assert cache.lookup(key()) is not None
    for prefix in ("/", "/.", "/nowhere/..", "/tmp/.."):
        assert is_found(Path(f"{prefix}{cache_root}"))


class Wanted(get.Buildable[bytes]):
    """A kernel that is never built here."""

    key = key()

    def load(self, entry: get.Entry) -> bytes:
        return entry.data

    def build(self) -> get.Entry:
        raise AssertionError("not to be built")


def test_a_read_only_cache_of_others_is_skipped_with_one_warning(
    cache_root: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    publish(Cache(tmp_path / "sound"), data=b"sound")
    cache_root.chmod(0o777)
    use(CACHE_PATH=f"{cache_root}:{tmp_path / 'sound'}", CACHE_DIR=tmp_path / "own")
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(2):
            assert get.find(Wanted()).loaded == b"sound"
    (warning,) = warned
    text = f"jitkern: this cache is not searched: {cache_root}: its mode, 0777, lets others write "
    assert str(warning.message).startswith(text)
