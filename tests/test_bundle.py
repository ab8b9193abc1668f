"""Bundles: the same entries in one file, verified, and nothing of it can lead anywhere else."""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import publish

from jitkern.cache.bundle import copy_entries, export_bundle, import_bundle, read_bundle
from jitkern.cache.entry import Key
from jitkern.cache.schema import META_NAME
from jitkern.cache.store import Cache, EntryInfo
from jitkern.errors import CacheError
from jitkern.fs import digest


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "one")
    for arch in ("8.0", "9.0"):
        for name in ("store", "index"):
            describe = {"op": name, "args": ["656"], "arch": arch}
            key = Key("device", name, digest([name, arch]), describe)
            files = {f"{name}.cubin": f"{name} {arch}".encode() * 100, "notes.txt": b"second file"}
            cache.publish(key, "nvrtc-13.5", files, {"build_ms": 1.5})
    return cache


def test_round_trip(cache: Cache, tmp_path: Path) -> None:
    file = tmp_path / "out" / "kernels.jkb"
    assert export_bundle(cache, file) == 4
    assert len(read_bundle(file).entries) == 4
    other = Cache(tmp_path / "other")
    assert import_bundle(other, file) == 4
    assert [(i.name, i.arch, i.bytes) for i in other.entries()] == [
        (i.name, i.arch, i.bytes) for i in cache.entries()
    ]
    assert other.verify() == []
    for info in cache.entries():
        twin = other.root / info.path.relative_to(cache.root)
        assert (twin / META_NAME).read_bytes() == (info.path / META_NAME).read_bytes()
    assert import_bundle(other, file) == 4  # again: nothing changes


def test_equal_entries_make_equal_bundles(cache: Cache, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jkb", tmp_path / "b.jkb"
    export_bundle(cache, first)
    other = Cache(tmp_path / "other")
    import_bundle(other, first)
    export_bundle(other, second)
    assert first.read_bytes() == second.read_bytes()


def test_select(cache: Cache, tmp_path: Path) -> None:
    file = tmp_path / "a.jkb"
    assert export_bundle(cache, file, lambda info: info.arch == "9.0") == 2
    other = Cache(tmp_path / "other")
    import_bundle(other, file)
    assert {info.arch for info in other.entries()} == {"9.0"}


def test_copies_are_the_entries_themselves(cache: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path / "other")
    assert copy_entries([info.path for info in cache.entries()], other) == 4
    for info in cache.entries():
        twin = other.root / info.path.relative_to(cache.root)
        assert (twin / META_NAME).read_bytes() == (info.path / META_NAME).read_bytes()
    (cache.entries()[0].path / "notes.txt").write_bytes(b"")
    with pytest.raises(CacheError, match=r"notes\.txt"):
        copy_entries([cache.entries()[0].path], other)


def of_8_0(info: EntryInfo) -> bool:
    return info.arch == "8.0"


@pytest.mark.parametrize("harm", [Path.unlink, Path.touch, lambda file: file.chmod(0o666)])
def test_a_chosen_entry_that_cannot_be_exported_is_an_error(
    cache: Cache, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """It was left out in silence: the machine that got the bundle lacked a kernel."""
    file = tmp_path / "a.jkb"
    info = next(info for info in cache.entries() if info.arch == "9.0")
    artefact = info.path / f"{info.name}.cubin"
    if harm is Path.touch:
        artefact.write_bytes(b"")
    harm(artefact)
    says = rf"^{cache.root}: nothing exported, 1 damaged or not trusted: {artefact.parent}.*cubin"
    with pytest.raises(CacheError, match=says):
        export_bundle(cache, file)
    assert not file.exists()
    assert export_bundle(cache, file, of_8_0) == 2


def test_an_entry_of_which_nobody_knows_what_it_was_is_an_error(
    cache: Cache, tmp_path: Path
) -> None:
    """It might be one of those that were chosen."""
    path = next(info.path for info in cache.entries() if info.arch == "9.0")
    (path / META_NAME).write_bytes(b"{}")
    with pytest.raises(CacheError, match=rf"1 damaged or not trusted: {path / META_NAME}: "):
        export_bundle(cache, tmp_path / "a.jkb", of_8_0)
    (path / META_NAME).unlink()
    with pytest.raises(CacheError, match=f"{path / META_NAME}: No such file or directory; "):
        export_bundle(cache, tmp_path / "a.jkb", of_8_0)
    assert not (tmp_path / "a.jkb").exists()
    shutil.rmtree(path)  # as eviction does
    assert export_bundle(cache, tmp_path / "a.jkb", of_8_0) == 2


def test_not_all_of_many_problems_are_said(cache: Cache, tmp_path: Path) -> None:
    for number in range(8):
        damaged = publish(cache, f"op{number}")
        (damaged / "kernel.cubin").write_bytes(b"")
    with pytest.raises(CacheError, match=r"8 damaged or not trusted: .*; and 3 more; a call "):
        export_bundle(cache, tmp_path / "a.jkb")


def test_any_damage_is_found_and_changes_nothing(cache: Cache, tmp_path: Path) -> None:
    file = tmp_path / "a.jkb"
    export_bundle(cache, file)
    good = file.read_bytes()
    other = Cache(tmp_path / "other")
    cases = [b"", b"x", good[: len(good) // 2], good[:-1], b"not a bundle" * 100]
    # Byte 9 of a gzip header names the operating system: it carries nothing.
    cases += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(10, len(good), 37)]
    for data in cases:
        file.write_bytes(data)
        with pytest.raises(CacheError, match=r"a\.jkb"):
            import_bundle(other, file)
        with pytest.raises(CacheError):
            read_bundle(file)
    assert other.entries() == []
    with pytest.raises(CacheError, match="No such file"):
        read_bundle(tmp_path / "missing.jkb")


def repack(file: Path, change: dict[str, str], **kinds: bytes) -> None:
    """Rename members of a bundle, or change their type."""
    buffer = io.BytesIO()
    with tarfile.open(file) as old, tarfile.open(fileobj=buffer, mode="w") as new:
        for info in old:
            data = old.extractfile(info)
            assert data is not None
            tail = info.name.rpartition("/")[2]
            info.name = change.get(tail, info.name)
            if tail in kinds:
                info.type = kinds[tail]
                info.linkname = "/etc/passwd"
            new.addfile(info, data)
    file.write_bytes(gzip.compress(buffer.getvalue()))


@pytest.mark.parametrize(
    "name",
    ["../../evil", "/etc/evil", "a/b/../evil", "a/b/c/d", "evil", "a/.hidden/x", "a/b/", "a//x"],
)
def test_names_cannot_leave(cache: Cache, tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.jkb"
    export_bundle(cache, file)
    repack(file, {"notes.txt": name})
    with pytest.raises(CacheError):
        import_bundle(Cache(tmp_path / "other"), file)
    assert not (tmp_path / "other").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jkb", "one"]


def test_links_and_doubles_are_refused(cache: Cache, tmp_path: Path) -> None:
    file = tmp_path / "a.jkb"
    export_bundle(cache, file)
    repack(file, {}, **{"notes.txt": tarfile.SYMTYPE})
    with pytest.raises(CacheError):
        read_bundle(file)
    export_bundle(cache, file, lambda info: info.name == "store" and info.arch == "9.0")
    repack(file, {"notes.txt": "store-x/nvrtc-13.5/store.cubin"})
    with pytest.raises(CacheError):
        read_bundle(file)


def test_an_unwritable_place_is_a_cache_error(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write the bundle"):
        export_bundle(cache, tmp_path / "file" / "a.jkb")


@pytest.mark.parametrize("name", [".", "/", ".."])
def test_a_directory_is_a_cache_error(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`.` and `/` have no name, which was a ValueError of pathlib's."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CacheError, match=f"^{re.escape(name)}: cannot write the bundle: "):
        export_bundle(cache, Path(name))
    assert list(Path.cwd().iterdir()) == []
