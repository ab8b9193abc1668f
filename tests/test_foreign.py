"""Input that somebody else has written: of another type, endless, nested, huge. Never fatal."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import VARIANT, change, key, publish, sealed
from owned import group_of
from strangers import MALLORY, needs_root

from jitkern.cache.bundle import export_bundle, import_bundle, read_bundle
from jitkern.cache.cleanup import Cleared
from jitkern.cache.lock import FailureRecord, read_holder
from jitkern.cache.schema import META_MAX_BYTES, META_NAME, parse_meta
from jitkern.cache.store import Cache
from jitkern.compilers import depends
from jitkern.errors import CacheError
from jitkern.files import parse_json, read_regular, sha256
from jitkern.host.module import _fits
from jitkern.jit.record import replay


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", max_bytes=1 << 20)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


FILE = {"bytes": 1, "sha256": sha256(b"x")}
A_NAME = "expected a plain name"
FILES = "expected an object: for each plain name its bytes and sha256"
DESCRIBE = "expected an object: op and arch strings, args a list of strings"

# Each of these had a right checksum and was imported; then list, info, export, verify and warm
# ended in a TypeError for ever.
BAD_METAS: list[tuple[dict[str, Any], str]] = [
    ({"describe": {"args": 5}}, f"describe: {{'args': 5}}, {DESCRIBE}"),
    ({"describe": {"args": [5]}}, f"describe: {{'args': [5]}}, {DESCRIBE}"),
    ({"describe": {"args": "656"}}, f"describe: {{'args': '656'}}, {DESCRIBE}"),
    ({"describe": {"op": ["x"]}}, f"describe: {{'op': ['x']}}, {DESCRIBE}"),
    ({"describe": {"arch": 9.0}}, f"describe: {{'arch': 9.0}}, {DESCRIBE}"),
    ({"describe": "x"}, f"describe: 'x', {DESCRIBE}"),
    ({"describe": []}, f"describe: [], {DESCRIBE}"),
    ({"describe": None}, f"describe: None, {DESCRIBE}"),
    ({"route": 5}, f"route: 5, {A_NAME}"),
    ({"route": "../x"}, f"route: '../x', {A_NAME}"),
    ({"name": ["x"]}, "name: ['x'], expected a string"),
    ({"family": 5}, "family: 5, expected 20 hex digits"),
    ({"family": "../../etc"}, "family: '../../etc', expected 20 hex digits"),
    ({"family": f"{'0' * 20}\n"}, f"family: '{'0' * 20}\\n', expected 20 hex digits"),
    ({"toolchain": {}}, f"toolchain: {{}}, {A_NAME}"),
    ({"toolchain": ".."}, f"toolchain: '..', {A_NAME}"),
    ({"artefact": 5}, f"artefact: 5, {A_NAME}"),
    ({"artefact": "other"}, "artefact: 'other', expected one of files"),
    ({"schema": True}, "schema: True, expected 1"),
    ({"schema": 1.0}, "schema: 1.0, expected 1"),
    ({"schema": 2}, "schema: 2, expected 1"),
    ({"files": []}, f"files: [], {FILES}"),
    ({"files": {}}, f"files: {{}}, {FILES}"),
    ({"files": {"a": 5}}, f"files: {{'a': 5}}, {FILES}"),
    ({"build_ms": "1"}, "build_ms: '1', expected a number, 0 or more"),
    ({"built_unix_s": True}, "built_unix_s: True, expected seconds since 1970"),
    ({"built_unix_s": 1e300}, "built_unix_s: 1e+300, expected seconds since 1970"),
    ({"note": nested(50)}, "not JSON: nested deeper than 32 levels"),
]
BAD_FILES: list[dict[str, Any]] = [
    {"../kernel.cubin": FILE},
    {META_NAME: FILE},
    {"kernel.cubin": {**FILE, "bytes": 5.0}},
    {"kernel.cubin": {**FILE, "bytes": True}},
    {"kernel.cubin": {**FILE, "bytes": -1}},
    {"kernel.cubin": {**FILE, "bytes": 10**30}},
    {"kernel.cubin": {**FILE, "bytes": "1"}},
    {"kernel.cubin": {**FILE, "bytes": None}},
    {"kernel.cubin": {**FILE, "sha256": 5}},
    {"kernel.cubin": {**FILE, "sha256": "x" * 64}},
    {"kernel.cubin": {"bytes": 1}},
    {"kernel.cubin": {**FILE, "more": 1}},
]


@pytest.mark.parametrize(("changes", "says"), BAD_METAS)
def test_a_meta_that_only_its_checksum_vouches_for(
    cache: Cache, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = publish(cache)
    publish(cache, "other")
    change(path, **changes)
    assert [info.name for info in cache.entries()] == ["other"]
    assert cache.verify() == [f"{path / META_NAME}: {says}"]
    assert cache.lookup(key()) is None
    assert export_bundle(cache, tmp_path / "k.jkb") == 1
    publish(cache)  # replaces it
    assert cache.lookup(key()) is not None
    change(path, **changes)
    assert cache.prune(0) == 2  # it can be evicted
    assert cache.clear() == Cleared([], [])


@pytest.mark.parametrize("files", BAD_FILES)
def test_files_of_another_type_or_size(cache: Cache, files: dict[str, Any]) -> None:
    path = publish(cache)
    change(path, files=files, artefact=next(iter(files)))
    (problem,) = cache.verify()
    assert problem.startswith(f"{path / META_NAME}: ")
    assert "expected" in problem
    assert cache.entries() == []
    assert cache.lookup(key()) is None


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 100_000, "not JSON: nested deeper than 32 levels"),
        (b'{"a":' * 100_000, "not JSON: nested deeper than 32 levels"),
        (b"\xff\xfe{}", "not JSON: 'utf-8' codec can't decode byte 0xff in position 0: "),
        ("{}".encode("utf-16"), "not JSON: 'utf-8' codec"),
        (b'{"a": NaN}', "not JSON: NaN is not JSON"),
        (b'{"a": -Infinity}', "not JSON: -Infinity is not JSON"),
        (b"[1]", "not an object"),
        (b"{}", "checksum does not match"),
    ],
)
def test_texts_that_are_no_meta(cache: Cache, raw: bytes, says: str) -> None:
    path = publish(cache)
    (path / META_NAME).write_bytes(raw)
    assert cache.entries() == []
    (problem,) = cache.verify()
    assert says in problem


def test_a_meta_that_is_too_large(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(cache)
    os.truncate(path / META_NAME, META_MAX_BYTES + 1)
    (problem,) = cache.verify()
    assert f"{META_MAX_BYTES + 1} bytes, expected at most {META_MAX_BYTES}" in problem
    with pytest.raises(CacheError, match="where: 67108865 bytes, expected at most 67108864"):
        parse_meta(bytes(META_MAX_BYTES + 1), "where")
    monkeypatch.setattr("jitkern.cache.entry.META_MAX_BYTES", 100)
    with pytest.raises(CacheError, match=r"^meta\.json: \d+ bytes, expected at most 100$"):
        publish(cache, "other")
    assert os.listdir(cache.root / "v1" / ".staging") == []


def test_a_meta_of_many_braces_is_read(cache: Cache) -> None:
    log = "template <int N> struct S { int x[N]; };\n" * 1000
    cache.publish(key(), VARIANT, {"kernel.cubin": b"x"}, {"log": log, "deep": nested(20)})
    found = cache.lookup(key())
    assert found is not None
    assert found.notes == {"log": log, "deep": nested(20)}


def test_a_manifest_may_name_anything(tmp_path: Path) -> None:
    """It is a note of the C++ route: of any type, and of files that have no end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"x")
    roots = [tmp_path]
    good = {"files": {"0:file": sha256(b"x")}, "absent": []}
    assert depends.holds(good, roots)
    zero = f"0:{os.path.relpath('/dev/zero', tmp_path)}"
    for files in ({"0:fifo": ""}, {zero: ""}, {"9:file": ""}, {"x": 5}, 5):
        assert not depends.holds({**good, "files": files}, roots)
    for absent in (5, [5], [None], ["x:y"]):
        assert not depends.holds({**good, "absent": absent}, roots)
    for manifest in (5, [], "x", None):
        assert not depends.holds(manifest, roots)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.1.\N{SUPERSCRIPT TWO}", f"0.1.{'9' * 5000}", "0.1.-1", ""])
def test_a_version_that_is_no_number(version: str) -> None:
    assert not _fits(version, "0.1.15")


# -- FIFOs -----------------------------------------------------------------------------------------


def test_a_fifo_in_the_place_of_the_meta(cache: Cache) -> None:
    path = publish(cache)
    (path / META_NAME).unlink()
    os.mkfifo(path / META_NAME)
    assert cache.lookup(key()) is None
    assert cache.entries() == []
    assert len(cache.verify()) == 1
    publish(cache)
    assert cache.lookup(key()) is not None


@pytest.mark.parametrize(
    "read",
    [
        lambda file: read_holder(file.with_suffix("")),
        lambda file: FailureRecord(file).recent("", time.time()),
    ],
    ids=["holder", "failure"],
)
def test_a_fifo_in_the_place_of_a_record(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "x.holder")
    assert read(tmp_path / "x.holder") is None


def test_fifos_and_devices_are_no_bundles_and_no_recordings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(CacheError, match=f"{file}: not a regular file"):
            read_bundle(file)
        with pytest.raises(OSError, match="not a regular file"):
            replay(file)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(OSError, match="11 bytes, expected at most 10"):
        read_regular(tmp_path / "file", 10)
    assert read_regular(tmp_path / "file", 11) == bytes(11)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="a symbolic link, which is not followed here"):
        read_regular(tmp_path / "link", 11)
    assert read_regular(tmp_path / "link", 11, follow=True) == bytes(11)


# -- holders and failures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "1"},
        {"pid": True},
        {"pid": -1},
        {"pid": 10**30},
        {"host": 5},
        {"host": "\x1b[2J"},
        {"since_unix_s": "now"},
        {"since_unix_s": 1e300},
        {"since_unix_s": -1},
    ],
)
def test_a_holder_that_makes_no_sense_is_nobody(tmp_path: Path, changes: dict[str, Any]) -> None:
    holder = {"pid": 1, "host": "h", "since_unix_s": 1.5e9}
    (tmp_path / "x.holder").write_text(json.dumps(holder))
    assert str(read_holder(tmp_path / "x")).startswith("pid 1 on h since 2017-07-1")
    (tmp_path / "x.holder").write_text(json.dumps({**holder, **changes}))
    assert read_holder(tmp_path / "x") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"at_unix_s": "now"},
        {"at_unix_s": True},
        {"inputs": 5},
        {"message": 5},
        {"command": None},
        {"log": ["x"]},
        {"source": 5},
    ],
)
def test_a_failure_that_makes_no_sense_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    record = FailureRecord(tmp_path / "x.json")
    failure = {"at_unix_s": time.time(), "inputs": "", "message": "m", "command": "c", "log": "l"}
    record.path.write_text(json.dumps(failure))
    assert record.recent("", time.time()) is not None
    record.path.write_text(json.dumps({**failure, **changes}))
    assert record.recent("", time.time()) is None


def test_a_failure_of_the_future_is_stale(tmp_path: Path) -> None:
    """Written while the clock was a day ahead, it was fresh for a day after that was mended."""
    record = FailureRecord(tmp_path / "x.json")
    failure = {"inputs": "", "message": "m", "command": "c", "log": "l", "source": None}
    for ahead_s, is_fresh in ((0, True), (5, True), (60, False), (86_400, False), (-60, False)):
        record.path.write_text(json.dumps({**failure, "at_unix_s": time.time() + ahead_s}))
        assert (record.recent("", time.time()) is not None) == is_fresh


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

LINE = {"function": "load_jit", "args": ["a"], "options": {}, "arch": "9.0"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"function": "exec"}, "function: expected load_jit or load_aot"),
        ({"function": ["load_jit"]}, "function: expected load_jit or load_aot"),
        ({"args": "abc"}, "args: expected a list of strings, the name first"),
        ({"args": []}, "args: expected a list of strings, the name first"),
        ({"args": [5]}, "args: expected a list of strings, the name first"),
        ({"arch": None}, "arch: expected a string"),
        ({"options": []}, "options: expected an object"),
        ({"options": {"shell": "rm"}}, "options: 'shell', expected one of build_directory, "),
        ({"options": {"cpp_files": "a.cc"}}, "options: cpp_files: of another type than load_jit"),
        ({"options": {"cpp_wrappers": [["a"]]}}, "options: cpp_wrappers: of another type"),
        ({"options": {"build_directory": 5}}, "options: build_directory: of another type"),
        ({"more": 5}, "expected an object of function, args, options and arch"),
        ({"arch": nested(50)}, "nested deeper than 32 levels"),
    ],
)
def test_lines_that_are_no_specialisation(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    file = tmp_path / "used.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n{json.dumps({**LINE, **changes})}\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="not a recorded specialisation") as error:
        replay(file)
    assert str(error.value).startswith(f"{file}:2: not a recorded specialisation: {says}")


def test_a_recording_that_others_could_have_written(tmp_path: Path) -> None:
    file = tmp_path / "used.jsonl"
    file.write_text(json.dumps(LINE))
    file.chmod(0o666)
    with pytest.raises(ValueError, match="lets everyone write it") as error:
        replay(file)
    assert str(error.value) == (
        f"{file}: its mode, 0666, lets everyone write it; if you trust them, replay it with: "
        f"jitkern warm --trust --replay {file}"
    )
    assert [used.args for used in replay(file, trust=True)] == [("a",)]


def test_plain_json_is_what_json_says() -> None:
    value = {"a": [1, 2.5, None, True, "é\ud800"], "b": {"c": {}}}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_meta(sealed_meta(), "x")["family"] == "0" * 20


def sealed_meta() -> bytes:
    return sealed(
        {
            "schema": 1,
            "route": "device",
            "name": "x",
            "family": "0" * 20,
            "toolchain": "nvrtc-13.5",
            "describe": {},
            "artefact": "a",
            "files": {"a": FILE},
        }
    )
