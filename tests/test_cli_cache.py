"""`jitkern cache`: which entries it is about, what it says, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from entries import change, publish

from jitkern.cache.entry import META_NAME, Key, new_entry
from jitkern.cache.store import Cache
from jitkern.cli import main, ui
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
    status = main(["cache", *map(str, argv)])
    return status, *capsys.readouterr()


def as_json(capsys: Capture, *argv: object) -> dict[str, Any]:
    status, out, err = run(capsys, *argv, "--json")
    assert (status, err) == (0, "")
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
        entry = cache.publish(new_entry(key, "nvrtc-13.5", {"kernel.cubin": bytes(size_bytes)}))
        used_unix_s = now_unix_s - days * DAY_S
        assert entry.path is not None
        os.utime(entry.path / META_NAME, (used_unix_s, used_unix_s))
    return cache


def names_of(cache: Cache) -> set[str]:
    return {entry.key.name for entry in cache.entries()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", "store8 store9 index9 mine"),
        ("--op store_cache", "store8 store9"),
        ("--op store,scale --op index", "store8 store9 index9 mine"),
        ("--arch 9.0", "store9 index9"),
        ("--arch sm_80 --arch 9.0", "store8 store9 index9"),
        ("--unused-for 36h", "store8 store9 index9"),
        ("--unused-for 5w", "store8"),
        ("--op store --arch 9.0", "store9"),
        ("--op nothing", ""),
    ],
)
def test_list_and_clear_choose_alike(
    capsys: Capture, filled: Cache, options: str, expected: str
) -> None:
    chosen = set(expected.split())
    listed = as_json(capsys, "list", *options.split())
    assert {entry["parameters"] for entry in listed["entries"]} == {f"{name}, 4" for name in chosen}
    assert listed["all_entries"] == 4
    out = run(capsys, "clear", *options.split())[1]
    assert names_of(filled) == set(ENTRIES) - chosen
    assert out.startswith(f"{len(chosen)} entr") and out.endswith(f"; {4 - len(chosen)} left\n")


@pytest.mark.parametrize("age", ["", "30", "-1d", "1.5d", "30 d", "1y", "³d", "9999999d"])
def test_an_age_has_a_unit(capsys: Capture, age: str) -> None:
    assert run(capsys, "list", f"--unused-for={age}") == (
        2,
        "",
        f"jitkern: error: argument --unused-for: {age!r}, expected an age such as 90min, 12h, 30d "
        "or 8w (see: jitkern cache list --help)\n",
    )


def test_the_list_and_clear_as_text(capsys: Capture, filled: Cache) -> None:
    head, row, *_, last = run(capsys, "list", "--op", "store")[1].splitlines()
    columns = ["op", "parameters", "arch", "route", "built by", "bytes", "last used"]
    assert re.split("  +", head) == columns
    cells = ["store", "store8, 4", "8.0", "device", "nvrtc-13.5", "5000", "40 d ago"]
    assert re.split("  +", row) == cells
    assert last == f"2 of 4 entries, 53.7 KiB in {filled.root}"
    said = f"2 entries removed from {filled.root}; 2 left\n"
    assert run(capsys, "clear", "--arch", "9.0") == (0, said, "")


def test_list_and_info_as_json(capsys: Capture, filled: Cache) -> None:
    found = as_json(capsys, "list", "--op", "store", "--arch", "9.0")
    (entry,) = (entry for entry in filled.entries() if entry.key.name == "store9")
    shown = {
        "op": "store",
        "parameters": "store9, 4",
        "arch": "9.0",
        "route": "device",
        "variant": "nvrtc-13.5",
        "bytes": 50_000,
        "last_used_unix_s": entry.last_used,
        "path": str(entry.path),
    }
    assert found == {
        "directory": str(filled.root),
        "not_searched": "",
        "all_entries": 4,
        "bytes": 50_000,
        "entries": [shown],
    }
    found = as_json(capsys, "info")
    assert found["max_bytes"] == 4 << 30
    assert [cache["origin"] for cache in found["caches"]][:2] == ["JITKERN_CACHE_DIR", "shipped"]
    assert found["caches"][0] == {
        "origin": "JITKERN_CACHE_DIR",
        "directory": str(filled.root),
        "entries": 4,
        "bytes": 260_000,
        "not_searched": "",
    }


def test_nothing_in_a_list_steers_the_terminal(capsys: Capture, empty_cache: Path) -> None:
    path = publish(Cache(empty_cache))
    change(path, describe={"op": "\x1b[2Jgone\r", "args": ["a\nb", "\ud800"], "arch": "\x07"})
    status, out, _ = run(capsys, "list")
    assert status == 0
    assert "\\x1b[2Jgone\\r" in out and "a\\nb, \\ud800" in out
    assert all(line.isprintable() for line in out.splitlines())
    ui.say("two\nlines of /tmp/:x:/[a]")
    assert capsys.readouterr().out == "two\nlines of /tmp/:x:/[a]\n"


def test_a_cache_that_others_may_write(capsys: Capture, filled: Cache) -> None:
    filled.root.chmod(0o777)
    reason = f"{filled.root}: its mode, 0777, lets others write it; chmod -R"
    assert f"\nnot searched: {reason}" in run(capsys, "list")[1]
    assert reason in run(capsys, "info")[1]
    assert as_json(capsys, "list")["not_searched"].startswith(reason)
    status, out, err = run(capsys, "clear")
    assert (status, out) == (1, "")
    assert err.startswith(f"jitkern: error: {reason}")
    assert names_of(filled) == set(ENTRIES)


def test_a_bad_entry_stops_no_command(capsys: Capture, filled: Cache) -> None:
    """`"describe": {"args": 5}` ended each of these in a TypeError."""
    path = publish(filled)
    change(path, describe={"args": 5})
    for command in ("info", "list"):
        status, out, err = run(capsys, command)
        assert (status, err) == (0, "")
    assert "4 entries" in out
    assert run(capsys, "clear")[1] == f"4 entries removed from {filled.root}; 1 left\n"
