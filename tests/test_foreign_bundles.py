"""Bundles and recordings that somebody else has written: refused with one clear error."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from entries import BAD_METAS, VARIANT, change, key, nested, publish
from owned import group_of
from strangers import MALLORY, needs_root

from jitkern.cache.bundle import export_bundle, import_bundle, read_bundle
from jitkern.cache.schema import META_NAME
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.fs import sha256
from jitkern.jit.record import replay


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


# -- bundles ---------------------------------------------------------------------------------------


def packed(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue())


@pytest.mark.parametrize(("changes", "says"), BAD_METAS)
def test_a_bundle_with_a_meta_that_only_its_checksum_vouches_for(
    cache: Cache, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = publish(cache)
    change(path, **changes)
    folder = f"{key().directory}/{VARIANT}"
    members = [
        (tarfile.TarInfo(f"{folder}/{name}"), (path / name).read_bytes())
        for name in (META_NAME, "kernel.cubin")
    ]
    file = tmp_path / "k.jkb"
    file.write_bytes(packed(members))
    file.chmod(0o644)
    other = Cache(tmp_path / "other")
    with pytest.raises(CacheError) as error:
        import_bundle(other, file)
    assert str(error.value) == f"{file}: {folder}: {says}"
    assert not other.root.exists()


def test_a_bundle_that_unpacks_to_more_than_it_should(cache: Cache, tmp_path: Path) -> None:
    file = tmp_path / "k.jkb"
    file.write_bytes(gzip.compress(bytes(64 << 20)))
    assert file.stat().st_size < 100_000
    with pytest.raises(CacheError) as error:
        read_bundle(file, max_unpacked_bytes=1 << 20)
    assert str(error.value) == (
        f"{file}: unpacks to more than 1048576 bytes (max_unpacked_bytes); if that is right, "
        f"import it with: jitkern cache import --max-bytes 4G {file}"
    )
    publish(cache)
    export_bundle(cache, file)
    assert len(read_bundle(file, max_unpacked_bytes=20_000).entries) == 1
    with pytest.raises(CacheError, match="unpacks to more than 5000 bytes"):
        read_bundle(file, max_unpacked_bytes=5000)


def test_a_header_that_promises_much_is_not_believed(tmp_path: Path) -> None:
    """A member of 1 TiB, of which nothing comes; a sparse one, whose bytes are all holes."""
    info = tarfile.TarInfo(f"{key().directory}/{VARIANT}/kernel.cubin")
    info.size = 1 << 40
    file = tmp_path / "k.jkb"
    file.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
    with pytest.raises(CacheError, match="not a bundle, or damaged: unexpected end of data"):
        read_bundle(file)
    sparse = tarfile.TarInfo(info.name)
    sparse.pax_headers = {
        "GNU.sparse.map": "0,0",
        "GNU.sparse.size": str(1 << 40),
        "GNU.sparse.realsize": str(1 << 40),
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
    }
    file.write_bytes(packed([(sparse, b"")]))
    with pytest.raises(CacheError, match="not a path of a bundle"):
        read_bundle(file)


def test_a_chain_of_headers_without_end(tmp_path: Path) -> None:
    """tarfile calls itself for each of them."""
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 4
    link = long_name.tobuf(tarfile.GNU_FORMAT) + b"abc\0".ljust(512, b"\0")
    file = tmp_path / "k.jkb"
    file.write_bytes(gzip.compress(link * 5000))
    with pytest.raises(CacheError, match="not a bundle, or damaged"):
        read_bundle(file)


def test_more_files_than_any_bundle_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitkern.cache.bundle._MAX_FILES", 3)
    file = tmp_path / "k.jkb"
    file.write_bytes(packed([(tarfile.TarInfo(f"a/b/{n}"), b"") for n in range(4)]))
    with pytest.raises(CacheError) as error:
        read_bundle(file)
    assert str(error.value) == f"{file}: more than 3 files"


def test_names_that_would_steer_the_terminal_are_spelled_out(tmp_path: Path) -> None:
    file = tmp_path / "k.jkb"
    file.write_bytes(packed([(tarfile.TarInfo("a/b/\x1b[2Jx"), b"")]))
    with pytest.raises(CacheError) as error:
        read_bundle(file)
    assert str(error.value) == f"{file}: 'a/b/\\x1b[2Jx': not a path of a bundle"


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (0o664, "its mode, 0664, lets group:{group} write it"),
        (0o646, "its mode, 0646, lets everyone write it"),
    ],
)
@pytest.mark.usefixtures("no_private_groups")
def test_a_bundle_that_others_could_have_written(
    cache: Cache, tmp_path: Path, mode: int, reason: str
) -> None:
    publish(cache)
    file = tmp_path / "k.jkb"
    export_bundle(cache, file)
    file.chmod(mode)
    reason = reason.format(group=group_of(file))
    other = Cache(tmp_path / "other")
    with pytest.raises(CacheError) as error:
        import_bundle(other, file)
    assert str(error.value) == (
        f"{file}: {reason}; if you trust them, import it with: jitkern cache import --trust {file}"
    )
    assert not other.root.exists()
    assert import_bundle(other, file, trust=True) == 1


@needs_root
def test_a_bundle_of_somebody_else(cache: Cache, tmp_path: Path) -> None:
    publish(cache)
    file = tmp_path / "k.jkb"
    export_bundle(cache, file)
    os.chown(file, MALLORY, MALLORY)
    other = Cache(tmp_path / "other")
    with pytest.raises(CacheError, match=f"it belongs to {MALLORY}; if you trust them"):
        import_bundle(other, file)
    assert import_bundle(other, file, trust=True) == 1


# -- recordings ------------------------------------------------------------------------------------

TEXT = {"record": 2, "text": "int x;\n"}
PLACE = "./src/a.cu"
LINE: dict[str, Any] = {
    "record": 2,
    "function": "load_jit",
    "args": ["a"],
    "options": {"device_files": [PLACE]},
    "arch": "9.0",
    "files": {PLACE: sha256(b"int x;\n")},
}
DIGEST = LINE["files"][PLACE]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"record": 1}, "record: 1, expected 2"),
        ({"record": 2.0}, "record: 2.0, expected 2"),
        ({"record": None}, "record: None, expected 2"),
        ({"function": "exec"}, "function: expected load_jit or load_aot"),
        ({"function": ["load_jit"]}, "function: ['load_jit'], expected str"),
        ({"args": "abc"}, "args: 'abc', expected list"),
        ({"args": []}, "args: expected a list of strings, the name first"),
        ({"args": [5]}, "args: expected a list of strings, the name first"),
        ({"arch": None}, "arch: None, expected str"),
        ({"options": []}, "options: [], expected dict"),
        ({"options": {"cpp_files": "a.cc"}}, "options: cpp_files: expected a list of strings"),
        (
            {"options": {"cpp_files": ["/etc/passwd"]}},
            "options: cpp_files: '/etc/passwd', expected",
        ),
        ({"options": {"cpp_files": ["./no.cc"]}}, "options: cpp_files: './no.cc', expected one of"),
        (
            {"options": {"extra_include_paths": ["./../x"]}},
            "options: extra_include_paths: './../x'",
        ),
        ({"options": {"extra_include_paths": ["jitkern:../x"]}}, "options: extra_include_paths: "),
        ({"files": [PLACE]}, "files: ['./src/a.cu'], expected dict"),
        ({"files": {PLACE: 5}}, "files: './src/a.cu', expected a place"),
        ({"files": {"/etc/cron.d/x": DIGEST}}, "files: '/etc/cron.d/x', expected a place such as"),
        ({"files": {"./../x": DIGEST}}, "files: './../x', expected a place"),
        ({"files": {"./a//x": DIGEST}}, "files: './a//x', expected a place"),
        ({"files": {"jitkern:perf/copy.cu": DIGEST}}, "files: 'jitkern:perf/copy.cu', expected a"),
        ({"files": {"./" + "a/" * 600 + "x": DIGEST}}, "files: './a/a/a/"),
        ({"files": {"./" + "a" * 2000: DIGEST}}, "files: './aaaa"),
        ({"more": 5}, "expected an object of arch, args, files, function, options, record, or of"),
        ({"text": 5}, "expected an object of arch, args, files, function, options, record, or of"),
        ({"arch": nested(50)}, "nested deeper than 32 levels"),
    ],
)
def test_lines_that_are_no_specialisation(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    file = tmp_path / "used.jsonl"
    lines = [TEXT, LINE, {**LINE, **changes}]
    file.write_text("\n".join(map(json.dumps, lines)))
    file.chmod(0o644)
    with pytest.raises(ValueError, match="not a recorded specialisation") as error:
        replay(file)
    assert str(error.value).startswith(f"{file}:3: not a recorded specialisation: {says}")


def test_a_recording_that_others_could_have_written(tmp_path: Path) -> None:
    file = tmp_path / "used.jsonl"
    file.write_text(f"{json.dumps(TEXT)}\n{json.dumps(LINE)}\n")
    file.chmod(0o666)
    with pytest.raises(ValueError, match="lets everyone write it") as error:
        replay(file)
    assert str(error.value) == (
        f"{file}: its mode, 0666, lets everyone write it; if you trust them, replay it with: "
        f"jitkern warm --trust --replay {file}"
    )
    assert [one.used.args for one in replay(file, trust=True)] == [("a",)]


def written(file: Path, *lines: object) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file.chmod(0o644)
    return file


FIRST_FORMAT = {name: LINE[name] for name in ("function", "args", "options", "arch")}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], ": nothing is recorded in it; record a run with JITKERN_RECORD=FILE"),
        (
            [TEXT],
            ": nothing is recorded in it; record a run with JITKERN_RECORD=FILE",
        ),
        ([LINE], f":1: the record has no text for '{PLACE}'"),
        (
            [FIRST_FORMAT],
            ":1: not a recorded specialisation: record: None, expected 2",
        ),
        ([{"schema": 1}], ":1: not a recorded specialisation: record: None, expected 2"),
        ([5], ":1: not a recorded specialisation: record: None, expected 2"),
        ([{"record": 2, "text": 5}], ":1: not a recorded specialisation: expected an object of "),
        ([{"record": 2, "text": "\ud800"}], ":1: not a recorded specialisation: 'utf-8' codec"),
    ],
)
def test_files_that_are_no_record(tmp_path: Path, lines: list[object], says: str) -> None:
    file = written(tmp_path / "used.jsonl", *lines)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}{says}')}"):
        replay(file)


def test_a_record_lays_out_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    line = {**LINE, "files": {PLACE: DIGEST, "./src": DIGEST}}  # a file and a directory
    (one,) = replay(written(tmp_path / "used.jsonl", TEXT, line))
    with pytest.raises(OSError, match="src"):
        one.unpack(tmp_path / "laid")
    assert list((tmp_path / "laid").iterdir()) == []
    line = {**LINE, "options": {**LINE["options"], "extra_include_paths": ["./.", "./more/inc"]}}
    (one,) = replay(written(tmp_path / "used.jsonl", TEXT, line))
    tree = tmp_path / "laid" / one.tree
    assert one.unpack(tmp_path / "laid").options == {
        "device_files": [str(tree / "src/a.cu")],
        "extra_include_paths": [str(tree), str(tree / "more/inc")],
    }
    assert sorted(path.name for path in tree.rglob("*")) == ["a.cu", "inc", "more", "src"]


def test_a_source_that_this_version_does_not_have(tmp_path: Path) -> None:
    line = {**LINE, "options": {"device_files": ["jitkern:ops/gone.cu"]}, "files": {}}
    (one,) = replay(written(tmp_path / "used.jsonl", line))
    with pytest.raises(FileNotFoundError, match=r"gone\.cu: this version of jitkern has no such"):
        one.unpack(tmp_path)
