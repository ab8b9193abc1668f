"""Input that somebody else has written: of another type, endless, nested, huge. Never fatal."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import BAD_METAS, FILE, VARIANT, change, key, nested, publish, sealed

from jitkern.cache.bundle import export_bundle, read_bundle
from jitkern.cache.cleanup import Cleared
from jitkern.cache.lock import FailureRecord, read_holder
from jitkern.cache.schema import META_MAX_BYTES, META_NAME, parse_meta
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.fs import parse_json, read_regular
from jitkern.host.module import fits
from jitkern.jit.record import replay


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", max_bytes=1 << 20)


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
    with pytest.raises(CacheError, match=re.escape(f"{path / META_NAME}: {says}")):
        export_bundle(cache, tmp_path / "k.jkb")
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


@pytest.mark.parametrize("key_name, variant", [("index_656", VARIANT), ("store_656", "nvrtc-1.0")])
def test_an_entry_in_the_place_of_another(cache: Cache, key_name: str, variant: str) -> None:
    path = publish(cache)
    other = cache.root / "v1" / key(key_name).directory / variant
    shutil.copytree(path, other, dirs_exist_ok=True)
    assert cache.lookup(key(key_name), variant) is None
    assert cache.verify() == [
        f"{other / META_NAME}: its meta is that of {path.parent.name}/{path.name}"
    ]


def test_a_meta_that_is_too_large(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(cache)
    os.truncate(path / META_NAME, META_MAX_BYTES + 1)
    (problem,) = cache.verify()
    assert f"{META_MAX_BYTES + 1} bytes, expected at most {META_MAX_BYTES}" in problem
    with pytest.raises(CacheError, match="where: 67108865 bytes, expected at most 67108864"):
        parse_meta(bytes(META_MAX_BYTES + 1), "where")
    monkeypatch.setattr("jitkern.cache.write.META_MAX_BYTES", 100)
    with pytest.raises(CacheError, match=r"^meta\.json: \d+ bytes, expected at most 100$"):
        publish(cache, "other")
    assert os.listdir(cache.root / "v1" / ".staging") == []


def test_a_meta_of_many_braces_is_read(cache: Cache) -> None:
    log = "template <int N> struct S { int x[N]; };\n" * 1000
    cache.publish(key(), VARIANT, {"kernel.cubin": b"x"}, {"log": log, "deep": nested(20)})
    found = cache.lookup(key())
    assert found is not None
    assert found.notes == {"log": log, "deep": nested(20)}


@pytest.mark.parametrize("version", ["0.1.\N{SUPERSCRIPT TWO}", f"0.1.{'9' * 5000}", "0.1.-1", ""])
def test_a_version_that_is_no_number(version: str) -> None:
    assert not fits(version, "0.1.15")


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
