"""One cache folder by itself: layout, look-up, publication, damage, eviction, locks, clearing."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from entries import BAD_METAS, DATA, VARIANT, change, key, make, nested, publish, sealed

from jitkern.cache import store
from jitkern.cache.entry import META_NAME, parse_meta, read_entry, render_meta
from jitkern.cache.lock import FailureNote, build_lock, read_holder
from jitkern.cache.store import EXACT, LOADS, MAY_LOAD, NO_USE, Cache
from jitkern.errors import CacheError, CompileError
from jitkern.fs import digest, sha256, slug

HERE, TOKEN = os.uname().nodename, "0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def staging(cache: Cache) -> list[str]:
    folder = cache.base / ".staging"
    return os.listdir(folder) if folder.exists() else []


def names(cache: Cache) -> list[str]:
    return [entry.key.op for entry in cache.entries()]


# -- looking up and publishing ---------------------------------------------------------------------


def test_layout_and_round_trip(cache: Cache) -> None:
    path = publish(cache)
    assert path == cache.root / "v1" / f"store_656-{digest('store_656')}" / "nvrtc-13.5"
    assert sorted(os.listdir(path)) == ["kernel.cubin", META_NAME]
    entry = cache.lookup(key())
    assert entry is not None
    assert (entry.data, entry.artefact) == (DATA, path / "kernel.cubin")
    assert (entry.key, entry.variant, entry.meta["build_ms"]) == (key(), VARIANT, 12.5)
    meta = json.loads((path / META_NAME).read_text())
    assert meta["describe"]["arch"] == "9.0"
    assert staging(cache) == []
    (listed,) = cache.entries()
    assert (str(listed), listed.size_bytes) == (f"{key()}/{VARIANT}", len(DATA))


def test_nothing_on_disk_until_the_first_publish(cache: Cache) -> None:
    assert cache.lookup(key()) is None
    assert cache.entries() == []
    assert cache.clear() == 0
    assert not cache.root.exists()


def test_an_entry_of_another_version_of_jitkern_is_found(cache: Cache) -> None:
    """Two versions on one cache: this is a kernel as the first releases wrote it."""
    path = make(cache.base / key().directory / VARIANT)
    (path / "kernel.cubin").write_bytes(b"x")
    file = {"bytes": 1, "sha256": sha256(b"x")}
    meta = {
        "schema": 1,
        "route": "device",
        "name": key().name,
        "family": key().digest,
        "toolchain": VARIANT,
        "describe": {"op": "store_656", "args": ["656"], "arch": "9.0", "flags": []},
        "artefact": "kernel.cubin",
        "files": {"kernel.cubin": file},
        "build_ms": 1,
        "a note of the future": [],
    }
    (path / META_NAME).write_bytes(sealed(meta))
    found = cache.lookup(key())
    assert found is not None
    assert found.data == b"x"
    # And the first releases read what is written now: the same fields, and notes.
    written = json.loads((publish(cache, "other") / META_NAME).read_bytes())
    assert written.keys() == meta.keys() - {"a note of the future"} | {"checksum"}


def test_the_highest_rank_goes_first_and_the_newest_of_equals(cache: Cache) -> None:
    for number, (variant, built) in enumerate([("zzz", 1e9), ("gcc", 2e9), ("a", None)]):
        notes = {"number": number, **({} if built is None else {"built_unix_s": built})}
        cache.publish(key(), variant, {"a.so": variant.encode()}, notes)

    def found(ranks: list[int], least: int = MAY_LOAD) -> str | None:
        entry = cache.lookup(key(), lambda meta: ranks[meta["number"]], least)
        return None if entry is None else entry.variant

    assert found([EXACT, EXACT, EXACT]) == "gcc"
    assert found([EXACT, LOADS, LOADS]) == "zzz"
    assert found([MAY_LOAD, MAY_LOAD, LOADS]) == "a"
    assert found([NO_USE, NO_USE, NO_USE]) is None
    assert found([LOADS, MAY_LOAD, LOADS], least=EXACT) is None
    (cache.base / key().directory / "gcc" / "a.so").write_bytes(b"")
    assert found([EXACT, EXACT, EXACT]) == "zzz"  # the next, if the best is damaged


def test_the_first_publication_stays_and_the_loser_has_its_own_bytes(cache: Cache) -> None:
    publish(cache, data=b"first")
    entry = cache.publish(key(), VARIANT, {"kernel.cubin": b"second"})
    assert entry.data == b"second"
    found = cache.lookup(key())
    assert found is not None
    assert found.data == b"first"
    assert staging(cache) == []


def test_what_is_staged_is_not_seen_before_it_is_committed(cache: Cache) -> None:
    files = {"kernel.cubin": DATA}
    with cache.stage(render_meta(key(), VARIANT, files, {}), files) as staged:
        assert staged.artefact is not None
        assert staged.artefact.read_bytes() == DATA
        assert cache.lookup(key()) is None
        cache.commit(staged)
    assert cache.lookup(key()) is not None
    with (
        pytest.raises(CompileError, match="does not load"),
        cache.stage(render_meta(key("other"), VARIANT, files, {}), files),
    ):
        raise CompileError("does not load", command="c++", log="undefined symbol")
    assert cache.lookup(key("other")) is None
    assert staging(cache) == []


def test_all_is_flushed_before_its_rename_and_its_name_after(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut an entry is whole or not there."""
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("staged" if path.parent.name == ".staging" else path.name)
        fsync(descriptor)

    def move(old: Path, new: Path) -> None:
        steps.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    publish(cache)
    assert steps == ["kernel.cubin", META_NAME, "staged", "rename", key().directory, "v1"]


def test_a_read_only_cache_is_never_written(cache: Cache) -> None:
    path = publish(cache)
    os.utime(path / META_NAME, (1, 1))
    reader = Cache(cache.root, read_only=True)
    assert reader.lookup(key()) is not None
    assert (path / META_NAME).stat().st_mtime == 1
    with pytest.raises(CacheError, match="read-only"):
        publish(reader, "other")


def test_unsafe_names_are_refused(cache: Cache) -> None:
    with pytest.raises(ValueError, match="files"):
        cache.publish(key(), VARIANT, {"../kernel.cubin": DATA})
    with pytest.raises(ValueError, match="variant"):
        cache.publish(key(), "../x", {"kernel.cubin": DATA})
    assert slug("../../a b<656, 2>") == "_.._a_b_656__2_"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o177, 0o777], ids=oct)
@pytest.mark.parametrize("shared", [False, True])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int, shared: bool) -> None:
    """Under 0177 and 0777 the folder got mode 0600 and 0."""
    cache = Cache(tmp_path / "above" / "cache", shared=shared)
    before = os.umask(umask)
    try:
        publish(cache)
        with cache.lock(key(), timeout_s=1) as wait:
            assert wait.held
    finally:
        os.umask(before)
    everything = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    modes = {(path.is_dir(), oct(stat.S_IMODE(path.stat().st_mode))) for path in everything}
    folder, file = ("0o755", "0o644") if shared else ("0o700", "0o600")
    assert modes == {(True, folder), (False, file)}


# -- damage ----------------------------------------------------------------------------------------


def cut(path: Path, how: str) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    texts = {"0": b"", "half": data[:middle], "all but 2": data[:-2], "longer": data + b"x"}
    path.write_bytes({**texts, "flipped": flipped}[how])


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


DAMAGE: list[Callable[[Path], None]] = [
    *(lambda path, how=how: cut(path, how) for how in ("0", "half", "all but 2", "longer")),
    lambda path: cut(path, "flipped"),
    Path.unlink,
    replace_by_fifo,
    replace_by_link,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["kernel.cubin", META_NAME])
def test_damage_is_a_miss_and_is_replaced(
    cache: Cache, file: str, damage: Callable[[Path], None]
) -> None:
    path = publish(cache)
    damage(path / file)
    assert cache.lookup(key()) is None
    with pytest.raises((CacheError, OSError)):
        read_entry(path)
    publish(cache)
    found = cache.lookup(key())
    assert found is not None
    assert found.data == DATA
    assert staging(cache) == []


@pytest.mark.parametrize("changes", BAD_METAS)
def test_a_meta_that_only_its_checksum_vouches_for_is_a_miss(
    cache: Cache, changes: dict[str, object]
) -> None:
    path = publish(cache)
    publish(cache, "other")
    change(path, **changes)
    assert names(cache) == ["other"]
    assert cache.lookup(key()) is None
    publish(cache)  # replaces it
    assert cache.lookup(key()) is not None


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON: nested deeper than 32 levels"),
        (b"\xff\xfe{}", "not JSON: 'utf-8' codec can't decode byte 0xff in position 0: "),
        (b'{"a": NaN}', "not JSON: NaN is not JSON"),
        (b"[1]", "not an object"),
        (b"{}", "checksum does not match"),
        (sealed({}), "not a meta of schema 1"),
    ],
)
def test_texts_that_are_no_meta(raw: bytes, says: str) -> None:
    with pytest.raises(CacheError, match=f"^where: {says}"):
        parse_meta(raw, "where")


def test_a_meta_that_is_too_large_is_neither_read_nor_written(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(cache)
    monkeypatch.setattr("jitkern.cache.entry.META_MAX_BYTES", 100)
    assert cache.entries() == []
    with pytest.raises(CacheError, match=r"^meta\.json: \d+ bytes, expected at most 100$"):
        publish(cache, "other")
    assert staging(cache) == []


def test_a_meta_of_many_braces_is_read(cache: Cache) -> None:
    log = "template <int N> struct S { int x[N]; };\n" * 1000
    cache.publish(key(), VARIANT, {"kernel.cubin": b"x"}, {"log": log, "deep": nested(20)})
    found = cache.lookup(key())
    assert found is not None
    assert (found.meta["log"], found.meta["deep"]) == (log, nested(20))


@pytest.mark.parametrize("key_name, variant", [("index_656", VARIANT), ("store_656", "nvrtc-1.0")])
def test_an_entry_in_the_place_of_another_is_a_miss(
    cache: Cache, key_name: str, variant: str
) -> None:
    path = publish(cache)
    other = cache.base / key(key_name).directory / variant
    shutil.copytree(path, other, dirs_exist_ok=True)
    with pytest.raises(CacheError, match=f"its meta is that of {path.parent.name}/{path.name}"):
        read_entry(other)
    assert cache.lookup(key("index_656")) is None
    assert len(cache.entries()) == 1


@pytest.mark.parametrize("what", ["file", "link", "strange"])
def test_anything_in_the_place_of_an_entry_is_replaced(
    cache: Cache, tmp_path: Path, what: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "weights").write_text("months of work")
    target = make(cache.base / key().directory) / VARIANT
    if what == "file":
        target.write_text("not a directory")
    elif what == "link":
        target.symlink_to(victim)
    else:
        make(target / "inner")
    assert cache.lookup(key()) is None
    publish(cache)
    assert cache.lookup(key()) is not None
    assert (victim / "weights").read_text() == "months of work"


# -- eviction and clearing -------------------------------------------------------------------------


def used(path: Path, unix_s: float) -> None:
    os.utime(path / META_NAME, (unix_s, unix_s))


def test_the_least_recently_used_go_first(cache: Cache) -> None:
    for number in range(4):
        used(publish(cache, f"k{number}"), time.time() - 1000 * (9 - number))
    assert cache.lookup(key("k0")) is not None  # used again: now the youngest
    each = 800 + len(DATA)
    publish(Cache(cache.root, max_bytes=4 * each), "new")
    assert names(cache) == ["k0", "k3", "new"]


def test_the_newest_stays_whatever_the_cap(cache: Cache) -> None:
    small = Cache(cache.root, max_bytes=1)
    for number in range(5):
        used(publish(small, f"k{number}"), number + 1)
        assert names(cache) == [f"k{number}"]


@pytest.fixture
def large(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A cache of more keys than a publication looks at."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(store, "_GLANCE", 8)
    monkeypatch.setattr(store, "_MAX_MEASURED", 32)
    for number in range(100):
        used(publish(cache, f"k{number}", data=b"x"), number + 1)
    return cache


def test_a_publication_into_a_large_cache_does_little_work(
    large: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into 10,001 entries it took 38.9 s, in somebody's first call."""
    looked_at: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked_at.append(path) or scandir(path))
    small = Cache(large.root, max_bytes=100)
    publish(small, "new")
    assert len(looked_at) <= 8 + 32 + store._MAX_EVICTED
    assert len(large.entries()) == 101 - store._MAX_EVICTED
    for number in range(10):  # each makes it smaller, until it fits
        publish(small, f"new{number}")
    assert len(large.entries()) < 10


def test_one_large_entry_does_not_make_a_cache_seem_full(
    large: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_MEASURED", 1024)  # all of it
    publish(large, "library", data=bytes(300_000))
    wide = Cache(large.root, max_bytes=600_000)
    for number in range(30):
        publish(wide, f"new{number}")
    assert len(large.entries()) == 131


def test_clear_removes_sound_entries_and_empty_keys_only(cache: Cache) -> None:
    gone = [publish(cache, name) for name in ("one", "two")]
    make(cache.base / key("killed before its rename").directory)
    (publish(cache, "diary") / "diary.txt").write_text("dear diary")
    (publish(cache, "deeper") / "inner").mkdir()
    (publish(cache, "damaged") / META_NAME).write_bytes(b"")
    make(cache.base / "checkpoints" / "run1")
    (cache.base / "notes.txt").write_text("mine")
    assert cache.clear(lambda entry: entry.key.op == "one") == 1
    assert (gone[0].exists(), gone[1].exists()) == (False, True)
    assert cache.clear() == 1
    left = {path.name for path in cache.base.iterdir() if not path.name.startswith(".")}
    kept = {key(name).directory for name in ("diary", "deeper", "damaged")}
    assert left == kept | {"checkpoints", "notes.txt"}
    assert staging(cache) == []


def in_place_of_key(base: Path, victim: Path) -> None:
    shutil.rmtree(base / key().directory)
    (base / key().directory).symlink_to(victim)


def in_place_of_variant(base: Path, victim: Path) -> None:
    shutil.rmtree(base / key().directory / VARIANT)
    (base / key().directory / VARIANT).symlink_to(victim / VARIANT)


def in_place_of_file(base: Path, victim: Path) -> None:
    (base / key().directory / VARIANT / "kernel.cubin").unlink()
    (base / key().directory / VARIANT / "kernel.cubin").symlink_to(victim / VARIANT / "weights.so")


def in_place_of_staging(base: Path, victim: Path) -> None:
    shutil.rmtree(base / ".staging")
    (base / ".staging").symlink_to(victim)


def in_place_of_failed(base: Path, victim: Path) -> None:
    (base / ".failed").symlink_to(victim)


def in_place_of_v1(base: Path, victim: Path) -> None:
    base.rename(base.with_name("v1.old"))
    base.symlink_to(victim)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's files, of all shapes that jitkern could take for its own."""
    folder = tmp_path / "victim"
    for name in ("run1", VARIANT, key().directory):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights.so").write_text("months of work")
        os.utime(folder / name, (1, 1))
    for name in (f"{key().directory}.json", f"{HERE}.999999999.{TOKEN}"):
        (folder / name).write_text("months of work")
        os.utime(folder / name, (1, 1))
    return folder


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.mark.parametrize(
    "plant",
    [
        in_place_of_key,
        in_place_of_variant,
        in_place_of_file,
        in_place_of_staging,
        in_place_of_failed,
        in_place_of_v1,
    ],
)
@pytest.mark.parametrize("action", ["clear", "publish", "publish the same"])
def test_no_link_leads_out_of_the_cache(
    cache: Cache, victim: Path, plant: Callable[[Path, Path], None], action: str
) -> None:
    publish(cache)
    publish(cache, "other")
    plant(cache.base, victim)
    before = tree(victim)
    fresh = Cache(cache.root, max_bytes=1)  # sweeps and evicts when it publishes
    try:
        if action == "clear":
            fresh.clear()
        else:
            publish(fresh, "store_656" if action == "publish the same" else "new")
    except CacheError as error:
        assert str(cache.root) in str(error)
    assert tree(victim) == before


def test_what_killed_processes_left_is_swept_and_nothing_else(cache: Cache) -> None:
    ages_s = {
        f"{HERE}.{os.getpid()}.{TOKEN}": 3600,  # alive
        f"{HERE}.999999999.{TOKEN}": 3600,
        f"{HERE}.999999998.{TOKEN}": 1,  # dead, and young
        f"elsewhere.999999999.{TOKEN}": 3600,
        f"elsewhere.999999998.{TOKEN}": 100_000,
        "my-experiments": 100_000,
    }
    for name, age_s in ages_s.items():
        folder = make(cache.base / ".staging" / name)
        (folder / "kernel.cubin").write_bytes(DATA)
        os.utime(folder, (time.time() - age_s,) * 2)
    publish(cache)
    assert set(ages_s) - set(staging(cache)) == {
        f"{HERE}.999999999.{TOKEN}",
        f"elsewhere.999999998.{TOKEN}",
    }


# -- locks and failures ----------------------------------------------------------------------------


def never() -> bool:
    return False


def test_the_lock_lets_one_thread_in_and_names_its_holder(cache: Cache) -> None:
    inside = threading.Semaphore(1)
    overlaps = []

    def work() -> None:
        with cache.lock(key(), timeout_s=30) as wait:
            overlaps.append(not (wait.held and inside.acquire(blocking=False)))
            time.sleep(0.002)
            inside.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 8

    path = cache.base / ".locks" / "x.lock"
    with build_lock(path, timeout_s=1, done=never):
        assert read_holder(path).startswith(f"pid {os.getpid()} on {HERE} since 20")
    assert read_holder(path) == ""


@pytest.fixture
def held_elsewhere(cache: Cache) -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.lock(key(), timeout_s=30):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(30)
    yield
    leave.set()
    thread.join()


def test_who_waits_too_long_goes_on_after_a_warning(cache: Cache, held_elsewhere: None) -> None:
    with (
        pytest.warns(RuntimeWarning, match=f"still held by pid {os.getpid()} on .* after 0.1 s"),
        cache.lock(key(), timeout_s=0.1) as wait,
    ):
        assert not wait.held
        assert wait.waited_ms >= 100


def test_who_has_nothing_left_to_build_goes_on_in_silence(
    cache: Cache, held_elsewhere: None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cache.lock(key(), timeout_s=30, done=lambda: True) as wait:
            assert not wait.held


@pytest.mark.parametrize("holder", [b"", b"\xff", b"\x1b[2J", b"x" * 500, None])
def test_a_holder_that_makes_no_sense_is_nobody(tmp_path: Path, holder: bytes | None) -> None:
    file = tmp_path / "x.lock.holder"
    os.mkfifo(file) if holder is None else file.write_bytes(holder)
    assert read_holder(tmp_path / "x.lock") == ""


def test_no_lock_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Cache(tmp_path / "file").lock(key(), timeout_s=30) as wait:
            assert not wait.held


def test_a_failure_is_handed_on_for_a_while(cache: Cache) -> None:
    note = cache.failure(key())
    assert note.recent("", time.time()) is None
    failure = CompileError("no", command="nvrtc", log="line 1", source="src")
    note.write(failure, "digest")
    known = note.recent("digest", time.time())
    assert known is not None
    assert str(known) == str(failure)
    assert note.recent("other inputs", time.time()) is None
    assert note.recent("digest", time.time() + 60) is None
    publish(cache)  # forgets it
    assert not note.path.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"at_unix_s": "now"},
        {"at_unix_s": 1e300},
        {"inputs": 5},
        {"message": 5},
        {"command": None},
        {"log": ["x"]},
        None,
    ],
)
def test_a_failure_that_makes_no_sense_is_none(
    tmp_path: Path, changes: dict[str, object] | None
) -> None:
    note = FailureNote(tmp_path / "x.json")
    note.write(CompileError("m", command="c", log="l"), "")
    assert note.recent("", time.time()) is not None
    text = json.dumps({**json.loads(note.path.read_text()), **(changes or {})})
    note.path.write_text(text if changes else "{")
    assert note.recent("", time.time()) is None


def test_a_failure_of_the_future_is_stale(tmp_path: Path) -> None:
    """Written while the clock was a day ahead, it was fresh for a day after that was mended."""
    note = FailureNote(tmp_path / "x.json")
    note.write(CompileError("m", command="c", log="l"), "")
    text = json.loads(note.path.read_text())
    for ahead_s, is_fresh in ((0, True), (5, True), (60, False), (86_400, False), (-60, False)):
        note.path.write_text(json.dumps({**text, "at_unix_s": time.time() + ahead_s}))
        assert (note.recent("", time.time()) is not None) == is_fresh
