"""What killed builds leave in TMPDIR, and caches that grow beyond their cap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from children import wait_until
from entries import DATA, key, publish
from paths import python_path
from strangers import MALLORY, needs_root

from jitkern.cache import size
from jitkern.cache.store import Cache
from jitkern.fs import make_scratch_folder, scratch_folder

TOKEN = "0123456789abcdef"
HERE = os.uname().nodename

# -- TMPDIR ----------------------------------------------------------------------------------------


@pytest.fixture
def tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def test_a_scratch_folder_is_ours_and_goes(tmpdir: Path) -> None:
    before = os.umask(0)
    try:
        with scratch_folder("build") as folder:
            assert folder.parent == tmpdir
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "inner").mkdir()
    finally:
        os.umask(before)
    assert list(tmpdir.iterdir()) == []


def test_a_killed_build_is_swept_by_the_next(tmpdir: Path) -> None:
    code = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from jitkern.fs import scratch_folder
with scratch_folder("build") as folder:
    (folder / "inner").mkdir()
    (folder / "inner" / "0.main.o").write_bytes(b"x")
    time.sleep(60)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmpdir)], env={**os.environ, "PYTHONPATH": python_path()}
    )
    wait_until(lambda: list(tmpdir.glob("jitkern-build-*/inner/*")))
    (left,) = tmpdir.iterdir()
    age(left, 7200)
    with scratch_folder("build"):
        assert left.exists()  # its process lives
    child.send_signal(signal.SIGKILL)
    child.wait()
    age(left, 60)
    with scratch_folder("build"):
        assert left.exists()  # and might do so in another container
    age(left, 7200)
    with scratch_folder("build"):
        assert not left.exists()


@pytest.mark.parametrize("pids_are_seen", [True, False])
def test_what_a_process_keeps_while_it_lives_stays(
    tmpdir: Path, monkeypatch: pytest.MonkeyPatch, pids_are_seen: bool
) -> None:
    """After a day, or an hour where its pid is of another container, it was deleted."""
    kept = make_scratch_folder("cache")
    with scratch_folder("build") as building:
        if not pids_are_seen:
            monkeypatch.setattr("jitkern.fs.os.path.exists", lambda _: False)
        for folder in (kept, building):
            age(folder, 100_000)
        with scratch_folder("other"):
            assert kept.exists()
            assert building.exists()
    assert list(tmpdir.iterdir()) == [kept]


def test_what_is_not_a_dead_build_stays(tmpdir: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "work").write_text("months of it")
    stay = [
        f"jitkern-build-.elsewhere.999999999.{TOKEN}",
        "jitkern-build-notes",
        f"other-build-.{HERE}.999999999.{TOKEN}",
    ]
    for name in stay:
        (tmpdir / name).mkdir()
        age(tmpdir / name, 7200)
    link = tmpdir / f"jitkern-build-.{HERE}.999999998.{TOKEN}"
    link.symlink_to(victim)
    file = tmpdir / f"jitkern-build-.{HERE}.999999997.{TOKEN}"
    file.write_text("a file")
    for path in (link, file):
        age(path, 7200)
    with scratch_folder("build"):
        pass
    assert sorted(os.listdir(tmpdir)) == sorted([*stay, link.name, file.name])
    assert (victim / "work").read_text() == "months of it"


@needs_root
def test_a_build_of_somebody_else_stays(tmpdir: Path) -> None:
    theirs = tmpdir / f"jitkern-build-.{HERE}.999999999.{TOKEN}"
    theirs.mkdir()
    os.chown(theirs, MALLORY, MALLORY)
    age(theirs, 1_000_000)
    with scratch_folder("build"):
        pass
    assert theirs.exists()


# -- the cap ---------------------------------------------------------------------------------------

EACH = len(DATA) + 800


def total(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("v1/[!.]*/*/*"))


@pytest.mark.parametrize("note", ["0", "-999999999", "9" * 30, "1e9", "x", ""])
def test_the_cap_holds_whatever_a_note_says(tmp_path: Path, note: str) -> None:
    """A note of the size was believed, and a cache of 4 GiB grew to 16."""
    for n in range(8):
        publish(Cache(tmp_path), f"old{n}")
    (tmp_path / "v1" / ".bytes").write_text(note)
    publish(Cache(tmp_path, max_bytes=3 * EACH), "new")
    assert total(tmp_path) <= 3 * EACH
    assert "new" in [info.name for info in Cache(tmp_path).entries()]


def test_the_cap_holds_for_processes_that_publish_once(tmp_path: Path) -> None:
    for n in range(12):
        publish(Cache(tmp_path, max_bytes=3 * EACH), f"k{n}")
        assert total(tmp_path) <= 3 * EACH


def test_the_cap_holds_for_a_server_that_publishes_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(size.time, "monotonic", lambda: now_s)
    server = Cache(tmp_path, max_bytes=3 * EACH)
    publish(server, "first")
    for n in range(8):
        publish(Cache(tmp_path), f"by others {n}")
    now_s = 2.0
    publish(server, "second")
    assert total(tmp_path) <= 3 * EACH


def test_a_look_is_rare_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    looks = []

    def look() -> int:
        nonlocal now_s
        looks.append(now_s)
        now_s += 0.5  # a slow file server
        return 1000

    monkeypatch.setattr(size.time, "monotonic", lambda: now_s)
    fill = size.Fill()
    assert fill.after(10, look) == 1000
    assert fill.after(10, look) == 1010
    now_s += 49
    assert fill.after(10, look) == 1020
    fill.is_now(500)
    assert fill.after(10, look) == 510
    now_s += 2
    assert fill.after(10, look) == 1000
    assert len(looks) == 2


def test_damaged_entries_count_and_go_too(tmp_path: Path) -> None:
    for n in range(8):
        (publish(Cache(tmp_path), f"old{n}") / "meta.json").write_bytes(b"")
    publish(Cache(tmp_path, max_bytes=3 * EACH), "new")
    assert total(tmp_path) <= 3 * EACH


def test_entries_of_the_future_go_first_unless_they_are_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for name, ahead_s in (("unused", 86_400), ("used", 86_400), ("old", -86_400), ("new", 0)):
        age(publish(cache, name) / "meta.json", -ahead_s)
    assert cache.lookup(key("used")) is not None
    assert cache.prune(3 * EACH) == 1
    assert [info.name for info in cache.entries()] == ["new", "old", "used"]
    assert cache.prune(2 * EACH) == 1
    assert [info.name for info in cache.entries()] == ["new", "used"]
