"""What is in the place of a cache: links, FIFOs, many builds; which caches a process searches."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from entries import DATA, key, publish
from owned import ENTRY, ME, OTHER, found, needs_root, part

from jitkern.cache import search
from jitkern.cache.schema import META_MAX_BYTES
from jitkern.cache.store import Cache
from jitkern.cache.trust import UntrustedError
from jitkern.cli import doctor, main, ui
from jitkern.env import settings

# -- links and other things in the place of files --------------------------------------------------


def test_the_root_may_be_a_link_and_is_followed_once(cache_root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(cache_root)
    cache = Cache(link)
    assert cache.lookup(key()) is not None
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    assert cache.lookup(key()) is not None


@pytest.mark.parametrize("prefix", ["/", "/.", "/nowhere/..", "/tmp/.."])
def test_a_root_may_be_spelled_oddly(cache_root: Path, prefix: str) -> None:
    assert found(Path(f"{prefix}{cache_root}"))


def move_behind_a_link(path: Path, tmp_path: Path) -> Path:
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    return target


def test_v1_may_not_be_a_link(cache_root: Path, tmp_path: Path) -> None:
    base = part(cache_root, "base")
    move_behind_a_link(base, tmp_path)
    with pytest.raises(UntrustedError) as caught:
        found(cache_root)
    assert str(caught.value) == (
        f"{base}: a symbolic link, which is not followed in a cache; remove it"
    )


@pytest.mark.parametrize("name", ENTRY)
def test_nothing_below_may_be_a_link(cache_root: Path, tmp_path: Path, name: str) -> None:
    target = move_behind_a_link(part(cache_root, name), tmp_path)
    assert not found(cache_root)
    if name == "key":
        before = sorted(target.rglob("*"))
        with pytest.raises(UntrustedError, match="a symbolic link"):
            publish(Cache(cache_root), data=b"new")
        assert sorted(target.rglob("*")) == before


@pytest.mark.parametrize("name", ["artefact", "meta"])
def test_a_fifo_does_not_keep_anybody_waiting(cache_root: Path, name: str) -> None:
    path = part(cache_root, name)
    path.unlink()
    os.mkfifo(path, 0o600)
    assert not found(cache_root)
    assert Cache(cache_root).verify() == [f"{path}: not a regular file"]


def test_a_meta_without_end(cache_root: Path) -> None:
    path = part(cache_root, "meta")
    os.truncate(path, 1 << 34)
    assert not found(cache_root)
    assert Cache(cache_root).verify() == [
        f"{path}: {1 << 34} bytes, expected at most {META_MAX_BYTES}"
    ]


# -- the order of what fits ------------------------------------------------------------------------


def test_the_newest_build_goes_first_whatever_its_name(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for variant, built in (("zzz-1.0", 1e9), ("gcc-12", 2e9), ("a", None)):
        notes = {} if built is None else {"built_unix_s": built}
        cache.publish(key(), variant, {"kernel.cubin": variant.encode()}, notes)
    order: list[str] = []
    assert cache.lookup(key(), accepts=lambda meta: order.append(meta["toolchain"])) is None
    assert order == ["gcc-12", "zzz-1.0", "a"]
    entry = cache.lookup(key())
    assert entry is not None
    assert entry.data == b"gcc-12"


# -- the caches of a process -----------------------------------------------------------------------


@pytest.fixture
def fresh_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set the environment of the caches; afterwards it is as before."""

    def forget() -> None:
        settings.cache_clear()
        search._shelves.cache_clear()
        search._private._renew()

    def use(**environ: object) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, str(value))
        forget()

    yield use
    monkeypatch.undo()
    forget()


def test_a_read_only_cache_of_others_is_skipped_with_one_warning(
    cache_root: Path, tmp_path: Path, fresh_search: Callable[..., None]
) -> None:
    sound = tmp_path / "sound"
    publish(Cache(sound), data=b"sound")
    cache_root.chmod(0o777)
    path = f"{cache_root}:{sound}"
    fresh_search(JITKERN_CACHE_PATH=path, JITKERN_CACHE_DIR=tmp_path / "own")
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(2):
            assert [entry.data for _, entry in search.search(key())] == [b"sound"]
    (warning,) = warned
    text = str(warning.message)
    assert text.startswith(
        f"jitkern: this cache is not searched: {cache_root} (owner {ME}, mode 0777)"
    )

    fresh_search(JITKERN_CACHE_TRUST="everyone")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [entry.data for _, entry in search.search(key())] == [DATA, b"sound"]


def test_the_own_cache_where_others_may_write_is_replaced_by_a_private_one(
    cache_root: Path, fresh_search: Callable[..., None]
) -> None:
    cache_root.chmod(0o777)
    fresh_search(JITKERN_CACHE_DIR=cache_root)
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(2):
            assert list(search.search(key())) == []
    (warning,) = warned
    assert "everyone can change what is in it; chmod -R go-w " in str(warning.message)
    assert "; this process keeps what it compiles in /" in str(warning.message)
    private = search._private.value.cache
    assert private is not None
    publish(private)
    assert [entry.data for _, entry in search.search(key())] == [DATA]


def test_the_shipped_cache_is_trusted_as_far_as_the_package(
    cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SHIPPED", cache_root)
    cache_root.parent.chmod(0o700)
    part(cache_root, "base").chmod(0o777)
    with pytest.raises(UntrustedError):
        search._shipped().lookup(key())
    cache_root.parent.chmod(0o777)  # then Python's own files are anybody's as well
    assert search._shipped().lookup(key()) is not None
    cache_root.parent.chmod(0o770)
    with pytest.raises(UntrustedError):
        search._shipped().lookup(key())
    part(cache_root, "base").chmod(0o770)
    assert search._shipped().lookup(key()) is not None


@needs_root
def test_the_shipped_cache_may_belong_to_the_packages_owner(
    cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SHIPPED", cache_root)
    subprocess.run(["chown", "-R", str(OTHER), str(cache_root.parent)], check=True)
    assert search._shipped().lookup(key()) is not None
    os.chown(cache_root.parent, 0, 0)
    with pytest.raises(UntrustedError):
        search._shipped().lookup(key())


# -- the command line ------------------------------------------------------------------------------


def test_doctor_says_whose_each_cache_is(
    cache_root: Path, tmp_path: Path, fresh_search: Callable[..., None]
) -> None:
    own, absent = tmp_path / "own", tmp_path / "absent"
    fresh_search(JITKERN_CACHE_DIR=own, JITKERN_CACHE_PATH=f"{cache_root}:{absent}")
    sound, missing, written, shipped = doctor._caches()
    one = sum(entry.bytes for entry in Cache(cache_root).entries())
    holds = f"1 entry, {ui.bytes_text(one)}"
    trusted = f"{cache_root}: owner {ME}, mode 0700, trusted"
    assert sound == doctor.Check("read-only cache", f"{trusted}; {holds}")
    advice = "make it, or take it out of JITKERN_CACHE_PATH"
    assert missing == doctor.Check(
        "read-only cache", f"{absent}: no such directory", "note", advice
    )
    trusted = f"{own}: owner {ME}, mode 0700, trusted, writable"
    empty = f"0 entries, 0 B of at most {ui.bytes_text(4 << 30)}"
    assert written == doctor.Check("cache", f"{trusted}; {empty}")
    assert (shipped.what, shipped.state) == ("shipped cache", "ok")

    own.chmod(0o777)
    cache_root.chmod(0o777)
    fresh_search()
    found = {check.found: (check.state, check.fix) for check in doctor._caches()}
    for path in (own, cache_root):
        state, fix = found[f"{path} (owner {ME}, mode 0777): everyone can change what is in it"]
        assert (state, fix) == ("note", f"chmod -R go-w {path} if all in it is yours")


def test_warm_fills_no_cache_that_nobody_will_use(
    cache_root: Path, fresh_search: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    cache_root.chmod(0o777)
    fresh_search(JITKERN_CACHE_DIR=cache_root)
    assert main(["warm", "--element-size", "656", "--arch", "9.0"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jitkern: error: {cache_root} (owner {ME}, mode 0777): everyone can ")
