"""Bundles: the same entries in one file, verified, and nothing of it can lead anywhere else."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jitkern.cache.bundle import export_bundle, import_bundle, read_bundle
from jitkern.cache.entry import META_NAME, Entry, Key, new_entry
from jitkern.cache.store import Cache
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
            cache.publish(new_entry(key, "nvrtc-13.5", files, {"build_ms": 1.5}))
    return cache


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.jkb"


def of_8_0(entry: Entry) -> bool:
    return entry.key.arch == "8.0"


def test_round_trip(cache: Cache, tmp_path: Path) -> None:
    first, second = tmp_path / "out" / "a.jkb", tmp_path / "b.jkb"
    assert export_bundle(cache, first) == 4
    assert len(read_bundle(first)) == 4
    other = Cache(tmp_path / "other")
    for _ in range(2):  # again: nothing changes
        assert len(import_bundle(other, first)) == 4
    for entry in cache.entries():
        assert entry.path is not None
        twin = other.root / entry.path.relative_to(cache.root)
        for name in os.listdir(entry.path):
            assert (twin / name).read_bytes() == (entry.path / name).read_bytes()
    export_bundle(other, second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.chmod(0o666)])
@pytest.mark.parametrize("name", ["store.cubin", META_NAME])
def test_a_chosen_entry_that_cannot_be_exported_is_an_error(
    cache: Cache, file: Path, harm: Callable[[Path], None], name: str
) -> None:
    """It was left out in silence: the machine that got the bundle lacked a kernel."""
    path = next(e.path for e in cache.entries() if str(e.key).startswith("store") and of_8_0(e))
    assert path is not None
    harm(path / name)
    says = f"^{cache.root}: nothing exported, an entry is damaged or not trusted: {path}"
    with pytest.raises(CacheError, match=says):
        export_bundle(cache, file, of_8_0)
    assert not file.exists()
    if name != META_NAME:
        assert export_bundle(cache, file, lambda entry: not of_8_0(entry)) == 2


def test_any_damage_is_found_and_changes_nothing(cache: Cache, tmp_path: Path, file: Path) -> None:
    export_bundle(cache, file)
    good = file.read_bytes()
    other = Cache(tmp_path / "other")
    cases = [b"", b"x", good[: len(good) // 2], good[:-1], b"not a bundle" * 100]
    # Bytes 4 to 9 of a gzip header are a time and an operating system: they carry nothing.
    cases += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(10, len(good), 37)]
    for data in cases:
        file.write_bytes(data)
        with pytest.raises(CacheError, match=r"a\.jkb"):
            import_bundle(other, file)
    assert not other.root.exists()
    with pytest.raises(CacheError, match="No such file"):
        read_bundle(tmp_path / "missing.jkb")


def test_fifos_and_devices_are_no_bundles(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(CacheError, match=f"{odd}: "):
            read_bundle(odd)


def repack(file: Path, name: str, kind: bytes = tarfile.REGTYPE) -> None:
    """Change name and type of the notes in a bundle."""
    buffer = io.BytesIO()
    with tarfile.open(file) as old, tarfile.open(fileobj=buffer, mode="w:gz") as new:
        for info in old:
            data = old.extractfile(info)
            if info.name.endswith("notes.txt"):
                info.name, info.type, info.linkname = name, kind, "/etc/passwd"
            new.addfile(info, data)
    file.write_bytes(buffer.getvalue())


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/b/../x", "evil", "a/b/\x1b[2Jx"])
def test_names_cannot_leave(cache: Cache, tmp_path: Path, file: Path, name: str) -> None:
    export_bundle(cache, file)
    repack(file, name)
    with pytest.raises(CacheError, match="not a path of a bundle") as error:
        import_bundle(Cache(tmp_path / "other"), file)
    assert str(error.value).isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jkb", "one"]


def test_links_doubles_and_members_of_nothing_are_refused(cache: Cache, file: Path) -> None:
    one = cache.entries()[0]
    for name, kind, says in (
        ("notes.txt", tarfile.SYMTYPE, "not a path of a bundle"),
        (one.artefact_name, tarfile.REGTYPE, "twice"),
        ("more.txt", tarfile.REGTYPE, "its meta describes something else"),
    ):
        export_bundle(cache, file, lambda entry: entry == one)
        repack(file, f"{one}/{name}", kind)
        with pytest.raises(CacheError, match=says):
            read_bundle(file)


def test_a_bundle_that_others_could_have_written_is_refused(cache: Cache, file: Path) -> None:
    export_bundle(cache, file)
    file.chmod(0o666)
    with pytest.raises(CacheError) as error:
        read_bundle(file)
    assert str(error.value) == (
        f"{file}: its mode, 0666, lets others write it; if you trust them, import it with: "
        f"jitkern cache import --trust {file}"
    )
    assert len(read_bundle(file, trust=True)) == 4
