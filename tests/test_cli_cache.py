"""`jitkern cache`: which entries it is about, and what it says as JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from entries import change, publish

from jitkern.cache.bundle import export_bundle, read_bundle
from jitkern.cache.entry import Key
from jitkern.cache.schema import META_NAME
from jitkern.cache.store import Cache
from jitkern.cli import main
from jitkern.fs import digest

Capture = pytest.CaptureFixture[str]

DAY_S = 86400.0
# name: op, arch, bytes of the artefact, days since the last use
ENTRIES = {
    "store8": ("store", "8.0", 5_000, 40),
    "store9": ("store", "9.0", 50_000, 20),
    "index9": ("index", "9.0", 5_000, 10),
    "mine": ("scale", "", 200_000, 1),
}


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    status = main([str(arg) for arg in argv])
    return status, *capsys.readouterr()


def as_json(capsys: Capture, *argv: object, status: int = 0) -> dict[str, Any]:
    got, out, err = run(capsys, *argv, "--json")
    assert (got, bool(err)) == (status, bool(status))
    found: dict[str, Any] = json.loads(out)
    assert found.pop("schema") == 1
    return found


@pytest.fixture
def filled(empty_cache: Path) -> Cache:
    cache = Cache(empty_cache)
    now_unix_s = time.time()
    for name, (op, arch, size_bytes, days) in ENTRIES.items():
        describe = {"op": op, "args": [name, "4"], "arch": arch}
        key = Key("device" if arch else "cxx", name, digest(name), describe)
        entry = cache.publish(key, "nvrtc-13.5", {"kernel.cubin": bytes(size_bytes)})
        used_unix_s = now_unix_s - days * DAY_S
        assert entry.path is not None
        os.utime(entry.path / META_NAME, (used_unix_s, used_unix_s))
    return cache


def names_of(cache: Cache) -> set[str]:
    return {entry.args.partition(",")[0] for entry in cache.entries()}


CHOICES = [
    ("", "store8 store9 index9 mine"),
    ("--op store", "store8 store9"),
    ("--op store_cache", "store8 store9"),
    ("--op indexing,scale", "index9 mine"),
    ("--op store,scale --op index", "store8 store9 index9 mine"),
    ("--arch 9.0", "store9 index9"),
    ("--arch sm_80 --arch 9.0", "store8 store9 index9"),
    ("--unused-for 15d", "store8 store9"),
    ("--unused-for 36h", "store8 store9 index9"),
    ("--unused-for 5w", "store8"),
    ("--larger-than 20K", "store9 mine"),
    ("--larger-than 20K --unused-for 15d", "store9"),
    ("--op store --arch 9.0", "store9"),
    ("--op nothing", ""),
]


@pytest.mark.parametrize(("options", "expected"), CHOICES)
def test_list_and_clear_choose_alike(
    capsys: Capture, filled: Cache, options: str, expected: str
) -> None:
    chosen = set(expected.split())
    listed = as_json(capsys, "cache", "list", *options.split())
    assert {entry["parameters"] for entry in listed["entries"]} == {f"{name}, 4" for name in chosen}
    assert listed["all_entries"] == 4
    planned = as_json(capsys, "cache", "clear", *options.split(), "--dry-run")
    assert names_of(filled) == set(ENTRIES)
    cleared = as_json(capsys, "cache", "clear", *options.split())
    assert names_of(filled) == set(ENTRIES) - chosen
    assert len(cleared["removed"]) == len(chosen)
    assert planned == {**cleared, "dry_run": True}


@pytest.mark.parametrize(("options", "expected"), [c for c in CHOICES if c[1]])
def test_export_chooses_as_list_does_and_takes_host_code_along(
    capsys: Capture, filled: Cache, tmp_path: Path, options: str, expected: str
) -> None:
    chosen = set(expected.split())
    if "--arch" in options and "--op" not in options:
        chosen.add("mine")  # which has no arch, and which the kernels may need
    file = tmp_path / "k.jkb"
    found = as_json(capsys, "cache", "export", file, *options.split())
    assert {entry.key.name for entry in read_bundle(file).entries} == chosen
    size_bytes = file.stat().st_size
    assert found == {"file": str(file), "entries": len(chosen), "bytes": size_bytes}


def test_nothing_chosen_is_nothing_exported(capsys: Capture, filled: Cache, tmp_path: Path) -> None:
    file = tmp_path / "k.jkb"
    said = f"jitkern: error: {filled.root}: nothing to export: none of 4 entries is what was asked "
    got = run(capsys, "cache", "export", file, "--op", "nothing")
    assert got == (1, "", f"{said}for; jitkern cache list shows them\n")
    assert not file.exists()


def test_nothing_but_damaged_entries(capsys: Capture, filled: Cache, tmp_path: Path) -> None:
    """That was "nothing to export; build something", and an error that named no path."""
    metas = [info.path / "meta.json" for info in filled.entries()]
    for meta in metas:
        meta.unlink()
    first, *others = filled.verify()
    assert first == f"{metas[0]}: No such file or directory"
    assert len(others) == 3
    said = f"jitkern: error: {filled.root}: nothing to export, and damaged: {first}\n"
    assert run(capsys, "cache", "export", tmp_path / "k.jkb") == (1, "", said)


def test_a_damaged_entry_fails_the_export(capsys: Capture, filled: Cache, tmp_path: Path) -> None:
    """The status was 0, and the bundle lacked a kernel."""
    damaged = next(info.path for info in filled.entries() if info.arch == "8.0")
    (damaged / "kernel.cubin").write_bytes(b"x")
    file = tmp_path / "k.jkb"
    for options in ([], ["--json"]):
        status, out, err = run(capsys, "cache", "export", file, *options)
        assert (status, out) == (1, "")
        said = f"1 damaged or not trusted: {damaged}: kernel.cubin: 1 bytes, expected 5000; "
        assert err.startswith(f"jitkern: error: {filled.root}: nothing exported, {said}")
        assert err.count("\n") == 1
    assert not file.exists()
    assert run(capsys, "cache", "export", file, "--arch", "9.0")[0] == 0


@pytest.mark.parametrize("name", [".", "/", "", "made"])
def test_a_bundle_is_a_file(
    capsys: Capture, filled: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A traceback, and "this is a bug of jitkern's"."""
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path)
    said = f"jitkern: error: {name or '.'}: a directory, expected a file to write\n"
    assert run(capsys, "cache", "export", name) == (1, "", said)


def test_the_text_says_how_many_of_all(capsys: Capture, filled: Cache) -> None:
    out = run(capsys, "cache", "list", "--op", "store")[1]
    assert out.splitlines()[-1].startswith("2 of 4 entries, ")
    out = run(capsys, "cache", "clear", "--arch", "9.0")[1]
    sizes = [entry.bytes for entry in filled.entries()]
    left = f"2 entries, {sum(sizes) / 1024:.1f} KiB"
    assert out == f"2 entries removed from {filled.root}; what is left: {left}\n"


@pytest.mark.parametrize(
    ("size", "stay"),
    [
        ("1M", "store8 store9 index9 mine"),
        ("240K", "index9 mine"),
        ("210000", "index9 mine"),
        ("202000", "mine"),
        ("1", ""),
    ],
)
def test_clear_down_to_keeps_what_was_used_last(
    capsys: Capture, filled: Cache, size: str, stay: str
) -> None:
    planned = as_json(capsys, "cache", "clear", "--down-to", size, "--dry-run")
    assert names_of(filled) == set(ENTRIES)
    cleared = as_json(capsys, "cache", "clear", "--down-to", size)
    assert names_of(filled) == set(stay.split())
    assert planned["removed"] == cleared["removed"]


def test_a_chosen_part_leaves_the_rest_alone(capsys: Capture, filled: Cache) -> None:
    """Neither a damaged entry nor what somebody else put there is spoken of."""
    damaged = publish(filled, "damaged")
    change(damaged, describe=5)
    (filled.root / "v1" / "notes.txt").write_text("mine")
    cleared = as_json(capsys, "cache", "clear", "--op", "store")
    assert (len(cleared["removed"]), cleared["left_alone"]) == (2, [])
    assert damaged.exists()
    (damaged.parent.parent / next(iter(names(filled, "index9"))) / "notes.txt").write_text("mine")
    cleared = as_json(capsys, "cache", "clear", "--op", "index")
    assert [Path(left).name for left in cleared["left_alone"]] == ["notes.txt"]
    assert names_of(filled) == {"index9", "mine"}


def names(cache: Cache, name: str) -> list[str]:
    return [str(entry) for entry in cache.entries() if entry.args.startswith(name)]


def test_a_cache_without_a_tag_is_not_cleared_in_part_either(
    capsys: Capture, filled: Cache
) -> None:
    (filled.root / "v1" / "CACHEDIR.TAG").unlink()
    for options in (["--op", "store"], ["--down-to", "1"]):
        status, _, err = run(capsys, "cache", "clear", *options)
        assert status == 1
        assert "not cleared, for it holds no CACHEDIR.TAG of jitkern's" in err
    assert names_of(filled) == set(ENTRIES)


def test_down_to_chooses_by_itself(capsys: Capture, filled: Cache) -> None:
    assert run(capsys, "cache", "clear", "--down-to", "1M", "--op", "store") == (
        2,
        "",
        "jitkern: error: cache clear: --down-to: it chooses by last use, expected without --op, "
        "--arch, --unused-for and --larger-than (see: jitkern cache clear --help)\n",
    )


@pytest.mark.parametrize("age", ["", "30", "d", "-1d", "1.5d", "30 d", "1y", "³d", "9999999d"])
def test_an_age_has_a_unit(capsys: Capture, age: str) -> None:
    assert run(capsys, "cache", "list", f"--unused-for={age}") == (
        2,
        "",
        f"jitkern: error: argument --unused-for: {age!r}, expected an age such as 90min, 12h, 30d "
        "or 8w (see: jitkern cache list --help)\n",
    )


# -------------------------------------------------------------------------------------------- JSON


def test_list_as_json(capsys: Capture, filled: Cache) -> None:
    found = as_json(capsys, "cache", "list", "--op", "store", "--arch", "9.0")
    (entry,) = found.pop("entries")
    (info,) = (entry for entry in filled.entries() if entry.args.startswith("store9"))
    assert found == {
        "directory": str(filled.root),
        "not_searched": "",
        "all_entries": 4,
        "bytes": info.bytes,
    }
    assert entry == {
        "op": "store",
        "parameters": "store9, 4",
        "arch": "9.0",
        "route": "device",
        "variant": "nvrtc-13.5",
        "bytes": info.bytes,
        "last_used_unix_s": round(info.last_used, 3),
        "path": str(info.path),
    }


def test_info_as_json(capsys: Capture, filled: Cache) -> None:
    found = as_json(capsys, "cache", "info")
    assert found["max_bytes"] == 4 << 30
    assert [cache["origin"] for cache in found["caches"]] == ["JITKERN_CACHE_DIR", "shipped"]
    assert found["caches"][0] == {
        "origin": "JITKERN_CACHE_DIR",
        "directory": str(filled.root),
        "entries": 4,
        "bytes": sum(entry.bytes for entry in filled.entries()),
        "rights": "writable",
        "not_searched": "",
    }


def test_what_is_not_searched_is_said_in_json(capsys: Capture, filled: Cache) -> None:
    filled.root.chmod(0o777)
    one = as_json(capsys, "cache", "info")["caches"][0]
    assert "everyone can change what is in it" in one["not_searched"]
    assert as_json(capsys, "cache", "list")["not_searched"] == one["not_searched"]


def test_import_as_json(capsys: Capture, filled: Cache, tmp_path: Path) -> None:
    file = tmp_path / "k.jkb"
    export_bundle(filled, file, lambda entry: entry.name == "index")
    filled.clear()
    assert as_json(capsys, "cache", "import", file) == {
        "file": str(file),
        "directory": str(filled.root),
        "entries": [
            {
                "op": "index",
                "parameters": "index9, 4",
                "arch": "9.0",
                "route": "device",
                "variant": "nvrtc-13.5",
                "bytes": 5_000,
            }
        ],
    }
    assert names_of(filled) == {"index9"}


def test_verify_as_json(capsys: Capture, filled: Cache, tmp_path: Path) -> None:
    file = tmp_path / "k.jkb"
    export_bundle(filled, file)
    expected = {"verified": str(file), "entries": 4, "problems": []}
    assert as_json(capsys, "cache", "verify", file) == expected
    expected["verified"] = str(filled.root)
    assert as_json(capsys, "cache", "verify") == expected
    artefact = next(filled.root.rglob("*.cubin"))
    size_bytes = artefact.stat().st_size
    artefact.write_bytes(b"x")
    found = as_json(capsys, "cache", "verify", status=1)
    said = f"{artefact.parent}: {artefact.name}: 1 bytes, expected {size_bytes}"
    assert found["problems"] == [said]


def test_a_failure_prints_no_json(capsys: Capture, empty_cache: Path, tmp_path: Path) -> None:
    status, out, err = run(capsys, "cache", "import", tmp_path / "none.jkb", "--json")
    assert (status, out) == (1, "")
    assert err == f"jitkern: error: {tmp_path / 'none.jkb'}: no such bundle\n"
