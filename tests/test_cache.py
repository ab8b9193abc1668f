"""One cache folder by itself: layout, look-up, publication, damage, eviction, locks, clearing."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from entries import BAD_METAS, DATA, VARIANT, change, key, make, nested, publish

from jitkern.cache import store
from jitkern.cache.entry import META_NAME, new_entry, read_entry
from jitkern.cache.lock import build_lock, read_holder
from jitkern.cache.store import EXACT, NO_USE, SHIPPED_WILL_DO, USABLE, Cache
from jitkern.errors import CacheError
from jitkern.fs import digest

HERE, TOKEN = os.uname().nodename, "0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def staging(cache: Cache) -> list[str]:
    folder = cache.base / ".staging"
    return os.listdir(folder) if folder.exists() else []


def names(cache: Cache) -> list[str]:
    return [entry.key.op for entry in cache.entries()]


def data_of(cache: Cache) -> bytes | None:
    found = cache.lookup(key())
    return None if found is None else found.data


def test_layout_and_round_trip(cache: Cache) -> None:
    assert (cache.lookup(key()), cache.entries(), cache.clear()) == (None, [], 0)
    assert not cache.root.exists()
    log = "template <int N> struct S { int x[N]; };\n" * 1000  # more braces than levels are allowed
    notes = {"log": log, "deep": nested(20)}
    path = cache.publish(new_entry(key(), VARIANT, {"kernel.cubin": DATA}, notes)).path
    assert path == cache.root / "v1" / f"store_656-{digest('store_656')}" / "nvrtc-13.5"
    assert sorted(os.listdir(path)) == ["kernel.cubin", META_NAME]
    entry = cache.lookup(key())
    assert entry is not None
    assert (entry.data, entry.artefact) == (DATA, path / "kernel.cubin")
    assert (entry.key, entry.variant) == (key(), VARIANT)
    assert entry.meta.items() >= notes.items()
    assert staging(cache) == []
    (listed,) = cache.entries()
    assert (str(listed), listed.size_bytes) == (f"{key()}/{VARIANT}", len(DATA))


def test_the_highest_rank_goes_first_and_the_newest_of_equals(cache: Cache) -> None:
    for number, (variant, built) in enumerate([("zzz", 1e9), ("gcc", 2e9), ("a", None)]):
        notes = {"number": number, **({} if built is None else {"built_unix_s": built})}
        cache.publish(new_entry(key(), variant, {"a.so": variant.encode()}, notes))

    def found(ranks: list[int], least: int = USABLE) -> str | None:
        entry = cache.lookup(key(), lambda meta: ranks[meta["number"]], least)
        return None if entry is None else entry.variant

    assert found([EXACT, EXACT, EXACT]) == "gcc"
    assert found([EXACT, SHIPPED_WILL_DO, USABLE]) == "zzz"
    assert found([USABLE, USABLE, SHIPPED_WILL_DO]) == "a"
    assert found([NO_USE, NO_USE, NO_USE]) is None
    assert found([USABLE, USABLE, SHIPPED_WILL_DO], least=EXACT) is None
    (cache.base / str(key()) / "gcc" / "a.so").write_bytes(b"")
    assert found([EXACT, EXACT, EXACT]) == "zzz"  # the next, if the best is damaged


def test_an_equal_entry_stays_and_another_is_replaced(cache: Cache) -> None:
    """One that was built with other system libraries may not load here."""
    first = publish(cache, data=b"first").stat().st_ino
    assert publish(cache, data=b"first").stat().st_ino == first
    publish(cache, data=b"second")
    assert (data_of(cache), staging(cache)) == (b"second", [])


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
    assert steps == ["kernel.cubin", META_NAME, "staged", "rename", str(key()), "v1"]


def test_a_read_only_cache_is_never_written(cache: Cache) -> None:
    path = publish(cache)
    os.utime(path / META_NAME, (1, 1))
    reader = Cache(cache.root, read_only=True)
    assert reader.lookup(key()) is not None
    assert (path / META_NAME).stat().st_mtime == 1
    with pytest.raises(CacheError, match="read-only"):
        publish(reader, "other")


def test_what_cannot_be_published_is_named_with_its_path(cache: Cache) -> None:
    folder = make(cache.base) / str(key())
    folder.touch(0o600)
    with pytest.raises(CacheError, match=f"^{folder}: cannot publish an entry: Not a directory$"):
        publish(cache)


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=oct)
@pytest.mark.parametrize("shared", [False, True])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int, shared: bool) -> None:
    """Under 0177 and 0777 the folder got mode 0600 and 0."""
    cache = Cache(tmp_path / "above" / "cache", shared=shared)
    before = os.umask(umask)
    try:
        publish(cache)
        with cache.lock(key(), timeout_s=1) as held:
            assert held
    finally:
        os.umask(before)
    everything = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    modes = {(path.is_dir(), oct(stat.S_IMODE(path.stat().st_mode))) for path in everything}
    folder, file = ("0o755", "0o644") if shared else ("0o700", "0o600")
    assert modes == {(True, folder), (False, file)}


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


DAMAGE: list[Callable[[Path], object]] = [
    lambda path: os.truncate(path, 1 << 40),  # sparse: it was read whole, a MemoryError
    lambda path: path.write_bytes(b""),
    lambda path: os.truncate(path, path.stat().st_size // 2),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    Path.unlink,
    replace_by_fifo,
    replace_by_link,
]


@pytest.mark.filterwarnings("error")  # a damaged entry is rebuilt in silence
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["kernel.cubin", META_NAME])
def test_damage_is_a_miss_and_is_replaced(
    cache: Cache, file: str, damage: Callable[[Path], object]
) -> None:
    path = publish(cache)
    damage(path / file)
    assert cache.lookup(key()) is None
    with pytest.raises((CacheError, OSError)):
        read_entry(path)
    publish(cache)
    assert (data_of(cache), staging(cache)) == (DATA, [])


@pytest.mark.parametrize("changes", BAD_METAS)
def test_a_meta_that_only_its_checksum_vouches_for_is_a_miss(
    cache: Cache, changes: dict[str, object]
) -> None:
    path = publish(cache)
    publish(cache, "other")
    change(path, **changes)
    assert (names(cache), cache.lookup(key())) == (["other"], None)
    publish(cache)  # replaces it
    assert cache.lookup(key()) is not None


@pytest.mark.parametrize("key_name, variant", [("index_656", VARIANT), ("store_656", "nvrtc-1.0")])
def test_an_entry_in_the_place_of_another_is_a_miss(
    cache: Cache, key_name: str, variant: str
) -> None:
    path = publish(cache)
    other = cache.base / str(key(key_name)) / variant
    shutil.copytree(path, other, dirs_exist_ok=True)
    with pytest.raises(CacheError, match=f"its meta is that of {path.parent.name}/{path.name}"):
        read_entry(other)
    assert cache.lookup(key("index_656")) is None
    assert len(cache.entries()) == 1


@pytest.mark.parametrize("place", ["variant", "file"])
@pytest.mark.parametrize("action", ["clear", "publish", "publish the same"])
def test_a_link_in_the_place_of_an_entry_is_replaced_and_not_followed(
    cache: Cache, tmp_path: Path, place: str, action: str
) -> None:
    victim = make(tmp_path / "victim")
    (victim / "x").write_text("months of work")
    entry = publish(cache)
    path = {"variant": entry, "file": entry / "kernel.cubin"}[place]
    path.rename(tmp_path / "aside")
    path.symlink_to({"variant": victim, "file": victim / "x"}[place])

    fresh = Cache(cache.root, max_bytes=1)  # sweeps and evicts when it publishes
    if action == "clear":
        fresh.clear()
    else:
        name = "store_656" if action == "publish the same" else "new"
        publish(fresh, name)
        assert fresh.lookup(key(name)) is not None
    assert (victim / "x").read_text() == "months of work"
    assert os.listdir(victim) == ["x"]


def used(path: Path, unix_s: float) -> None:
    os.utime(path / META_NAME, (unix_s, unix_s))


def test_the_least_recently_used_go_first_and_the_newest_stays(cache: Cache) -> None:
    for number in range(4):
        used(publish(cache, f"k{number}"), time.time() - 1000 * (9 - number))
    assert cache.lookup(key("k0")) is not None  # used again: now the youngest
    each = 800 + len(DATA)
    publish(Cache(cache.root, max_bytes=4 * each), "new")
    assert names(cache) == ["k0", "k3", "new"]
    for number in range(2):
        publish(Cache(cache.root, max_bytes=1), f"n{number}")
        assert names(cache) == [f"n{number}"]


def test_a_publication_into_a_large_cache_does_little_work(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into 10,001 entries it took 38.9 s, in somebody's first call."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(store, "_MAX_MEASURED", 32)
    for number in range(100):
        used(publish(cache, f"k{number}", data=b"x"), number + 1)
    looked_at: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked_at.append(path) or scandir(path))
    small = Cache(cache.root, max_bytes=100)
    publish(small, "new")
    assert len(looked_at) <= 32 + store._MAX_EVICTED
    assert len(cache.entries()) == 101 - store._MAX_EVICTED
    for number in range(10):  # each makes it smaller, until it fits
        publish(small, f"new{number}")
    assert len(cache.entries()) < 10


def test_a_kill_before_the_rename_leaves_nothing_that_stays(cache: Cache) -> None:
    """Really killed between mkdir and rename: empty folders of keys stayed for ever."""
    child = os.fork()
    if child == 0:
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        publish(cache)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder = cache.base / str(key())
    assert list(folder.iterdir()) == []
    assert (cache.lookup(key()), cache.clear()) == (None, 0)
    assert not folder.exists()
    (left,) = (cache.base / ".staging").iterdir()
    os.utime(left, (time.time() - 7200,) * 2)
    folder.mkdir(mode=0o700)
    publish(Cache(cache.root, max_bytes=1 << 30), "other")
    assert not folder.exists()
    assert staging(cache) == []


def remove_after(patch: pytest.MonkeyPatch, owner: object, name: str, folder: Path) -> None:
    """Have another process remove `folder` right after our first call of `name` with it."""
    real, removals = getattr(owner, name), iter([shutil.rmtree])

    def interrupted(*args: object) -> object:
        try:
            return real(*args)
        finally:
            if folder.name in str(args):
                next(removals, lambda _: None)(folder)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(Path, "mkdir"), (store, "make_folders"), (os, "rename")]
)
def test_another_process_may_remove_the_folder_of_a_key_at_any_time(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, is_there: bool
) -> None:
    """As evictions do if it is empty: "cannot publish an entry: No such file or directory"."""
    folder = cache.base / str(key())
    if is_there:
        make(folder)
    remove_after(monkeypatch, owner, name, folder)
    publish(cache)
    assert (data_of(cache) == DATA, staging(cache)) == (owner is not os, [])


def test_two_processes_may_clear_at_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ended with "cannot clear: No such file or directory"."""
    folder, private_name = publish(cache).parent, store.private_name

    def other_process_is_faster() -> str:
        shutil.rmtree(folder)
        return private_name()

    monkeypatch.setattr(store, "private_name", other_process_is_faster)
    assert cache.clear() == 1


def test_clear_removes_entries_and_nothing_else(cache: Cache) -> None:
    publish(cache, "one")
    publish(cache, "one", variant="another")
    (publish(cache, "damaged") / META_NAME).write_bytes(b"")
    make(cache.base / "checkpoints" / "run1")
    (cache.base / "notes.txt").write_text("mine")
    with cache.lock(key(), timeout_s=1):
        (cache.base / ".locks" / "killed.lock").touch()
        assert cache.clear() == 3
        assert os.listdir(cache.base / ".locks") == [f"{key()}.lock"]
    left = {path.name for path in cache.base.iterdir() if not path.name.startswith(".")}
    assert left == {"checkpoints", "notes.txt"}
    assert staging(cache) == os.listdir(cache.base / ".locks") == []


def test_what_killed_processes_left_is_swept_and_nothing_else(cache: Cache) -> None:
    ages_s = {
        f"{HERE}.999999999.{TOKEN}": 7200,
        f"{HERE}.999999998.{TOKEN}": 600,  # it may live in another container
        f"elsewhere.999999998.{TOKEN}": -7200,
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


def test_the_lock_lets_one_thread_in_and_names_its_holder(cache: Cache, tmp_path: Path) -> None:
    inside = threading.Lock()

    def is_alone(_: int) -> bool:
        with cache.lock(key(), timeout_s=30) as held:
            alone = held and inside.acquire(blocking=False)
            time.sleep(0.002)
            inside.release()
            return alone

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_alone, range(8)))

    path = tmp_path / "x.lock"
    with build_lock(path, timeout_s=1, done=lambda: False):
        assert read_holder(path).startswith(f"pid {os.getpid()} on {HERE} since 20")
    assert not path.exists()


def test_a_wait_ends_when_there_is_nothing_left_to_build(cache: Cache) -> None:
    answers = iter([False, False, True])
    with cache.lock(key(), timeout_s=1) as held:
        assert held
        with cache.lock(key(), timeout_s=float("inf"), done=lambda: next(answers)) as second:
            assert not second


def test_a_lock_ends_with_its_holder_and_no_child_keeps_it(cache: Cache) -> None:
    """Killed while it holds the lock, with a forked child that lives on."""
    reads, writes = os.pipe()
    holder = os.fork()
    if holder == 0:
        with cache.lock(key(), timeout_s=1):
            if os.fork() == 0:
                os.close(writes)
                os.read(reads, 1)  # until the test ends
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(holder, 0)
    with cache.lock(key(), timeout_s=0) as held:
        assert held
    os.close(writes)
    os.close(reads)


def test_no_lock_is_no_obstacle(cache: Cache, tmp_path: Path) -> None:
    """There is nothing left to build, or no lock file can be made."""
    (tmp_path / "file").write_text("")
    (tmp_path / "x.lock").symlink_to(tmp_path / "file")
    waits = (
        cache.lock(key(), timeout_s=30, done=lambda: True),
        Cache(tmp_path / "file").lock(key(), timeout_s=30),
        build_lock(tmp_path / "x.lock", timeout_s=30, done=lambda: False),
    )
    lock_file = make(cache.base / ".locks") / f"{key()}.lock"
    with warnings.catch_warnings(), open(lock_file, "w") as held_elsewhere:
        fcntl.flock(held_elsewhere, fcntl.LOCK_EX)
        warnings.simplefilter("error")
        for one in waits:
            with one as held:
                assert not held
    assert (tmp_path / "file").read_text() == ""
