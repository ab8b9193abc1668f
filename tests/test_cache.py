"""The cache by itself: layout, lookup, publish, damage, eviction, locks. Nothing is compiled."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
from entries import DATA, VARIANT, key, publish

from jitkern.cache.lock import build_lock, read_holder
from jitkern.cache.schema import META_NAME
from jitkern.cache.store import Cache
from jitkern.errors import CacheError, CompileError
from jitkern.fs import canonical_json, digest, make_folders, slug


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def staging(cache: Cache) -> list[str]:
    folder = cache.root / "v1" / ".staging"
    return os.listdir(folder) if folder.exists() else []


def test_layout_and_round_trip(cache: Cache) -> None:
    path = publish(cache)
    assert path == cache.root / "v1" / f"store_656-{digest('store_656')}" / "nvrtc-13.5"
    assert sorted(os.listdir(path)) == ["kernel.cubin", META_NAME]
    entry = cache.lookup(key())
    assert entry is not None
    assert entry.data == DATA
    assert entry.artefact == path / "kernel.cubin"
    meta = json.loads((path / META_NAME).read_text())
    assert meta["build_ms"] == 12.5
    assert meta["describe"]["arch"] == "9.0"
    assert staging(cache) == []


def test_nothing_on_disk_until_the_first_publish(cache: Cache) -> None:
    assert cache.lookup(key()) is None
    assert cache.entries() == []
    assert not cache.root.exists()


def test_the_exact_variant_or_any(cache: Cache) -> None:
    publish(cache, data=b"old", variant="nvrtc-12.9")
    assert cache.lookup(key(), VARIANT) is None
    found = cache.lookup(key())
    assert found is not None
    assert found.data == b"old"
    publish(cache, data=b"new")
    exact = cache.lookup(key(), VARIANT)
    assert exact is not None
    assert exact.data == b"new"
    assert (exact.key, exact.variant, exact.notes) == (key(), VARIANT, {"build_ms": 12.5})


def test_accepts_chooses_among_variants(cache: Cache) -> None:
    for number in range(3):
        cache.publish(key(), f"c++-13+{number}", {"a.so": b"x"}, {"number": number})
    found = cache.lookup(key(), accepts=lambda meta: bool(meta["number"] == 1))
    assert found is not None
    assert found.variant == "c++-13+1"


@pytest.mark.parametrize("kept", ["0", "1", "half", "all but 1", "flipped", "longer", "missing"])
@pytest.mark.parametrize("file", ["kernel.cubin", META_NAME])
def test_damage_is_a_miss_and_is_replaced(cache: Cache, file: str, kept: str) -> None:
    path = publish(cache) / file
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = {
        "0": b"",
        "1": data[:1],
        "half": data[:middle],
        "all but 1": data[:-1],
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "longer": data + b"x",
        "missing": None,
    }[kept]
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    if file == META_NAME and kept in ("all but 1",):
        assert cache.lookup(key()) is not None  # only the last line feed went
        return
    assert cache.lookup(key()) is None
    publish(cache)
    found = cache.lookup(key())
    assert found is not None
    assert found.data == DATA
    assert staging(cache) == []


def test_a_meta_of_another_kind_is_a_miss(cache: Cache) -> None:
    path = publish(cache) / META_NAME
    for text in ("[]", "{}", "null", '{"schema": 1}', "\x00" * 100):
        path.write_text(text)
        assert cache.lookup(key()) is None
    assert len(cache.verify()) == 1


def test_a_file_in_the_place_of_the_entry_is_replaced(cache: Cache) -> None:
    target = cache.root / "v1" / key().directory / VARIANT
    make_folders(target.parent)
    target.write_text("not a directory")
    assert cache.lookup(key()) is None
    publish(cache)
    assert cache.lookup(key()) is not None


def test_the_first_publication_stays_and_the_loser_has_its_own_bytes(cache: Cache) -> None:
    publish(cache, data=b"first")
    entry = cache.publish(key(), VARIANT, {"kernel.cubin": b"second"})
    assert entry.data == b"second"
    found = cache.lookup(key())
    assert found is not None
    assert found.data == b"first"
    assert staging(cache) == []


def test_what_is_staged_is_not_seen_before_it_is_committed(cache: Cache) -> None:
    with cache.stage(key(), VARIANT, {"kernel.cubin": DATA}) as staged:
        assert staged.artefact is not None
        assert staged.artefact.read_bytes() == DATA
        assert cache.lookup(key()) is None
        cache.commit(staged)
    assert cache.lookup(key()) is not None
    with (
        pytest.raises(CompileError, match="does not load"),
        cache.stage(key("other"), VARIANT, {"kernel.cubin": DATA}),
    ):
        raise CompileError("does not load", command="c++", log="undefined symbol")
    assert cache.lookup(key("other")) is None
    assert staging(cache) == []


def test_a_read_only_cache_is_never_written(cache: Cache) -> None:
    path = publish(cache)
    os.utime(path / META_NAME, (1, 1))
    reader = Cache(cache.root, read_only=True)
    assert reader.lookup(key()) is not None
    assert (path / META_NAME).stat().st_mtime == 1
    with pytest.raises(CacheError, match="read-only"):
        reader.publish(key("other"), VARIANT, {"kernel.cubin": DATA})


def test_unsafe_names_are_refused(cache: Cache) -> None:
    with pytest.raises(ValueError, match="files"):
        cache.publish(key(), VARIANT, {"../kernel.cubin": DATA})
    with pytest.raises(ValueError, match="variant"):
        cache.publish(key(), "../x", {"kernel.cubin": DATA})
    assert slug("../../a b<656, 2>") == "_.._a_b_656__2_"


def test_entries_tell_what_there_is(cache: Cache) -> None:
    publish(cache, "store_656")
    publish(cache, "index_8192")
    infos = cache.entries()
    assert [info.name for info in infos] == ["index_8192", "store_656"]
    assert infos[0].arch == "9.0"
    assert infos[0].args == "656"
    assert infos[0].bytes > len(DATA)
    assert infos[0].variant == "nvrtc-13.5"
    assert len(cache.clear().removed) == 2
    assert cache.entries() == []
    assert cache.lookup(key()) is None


def test_the_least_recently_used_go_first(cache: Cache) -> None:
    paths = [publish(cache, f"k{number}") for number in range(4)]
    for age, path in enumerate(reversed(paths)):
        os.utime(path / META_NAME, (time.time() - 1000 * (age + 1),) * 2)
    assert cache.lookup(key("k0")) is not None  # used again: now the youngest
    each = cache.entries()[0].bytes
    assert cache.prune(2 * each + 10) == 2
    assert [info.name for info in cache.entries()] == ["k0", "k3"]


def test_publishing_beyond_the_cap_evicts(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=3 * (len(DATA) + 800))
    for number in range(10):
        path = publish(cache, f"k{number}")
        os.utime(path / META_NAME, (number + 1,) * 2)
        assert path.exists()  # never the newest
    assert 1 <= len(cache.entries()) <= 3
    assert cache.entries()[-1].name == "k9"
    tiny = Cache(tmp_path, max_bytes=1)
    publish(tiny, "last")
    assert [info.name for info in tiny.entries()] == ["last"]


def test_equal_values_have_equal_digests() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert canonical_json({"é": 1}) == b'{"\\u00e9":1}'
    assert len(digest("x")) == 20


def test_lock_names_its_holder_and_lets_one_thread_in(cache: Cache) -> None:
    inside = threading.Semaphore(1)
    overlaps = []

    def work() -> None:
        with cache.lock(key(), timeout_s=30) as wait:
            overlaps.append(not inside.acquire(blocking=False))
            assert wait.held
            time.sleep(0.005)
            inside.release()

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 16

    path = cache.root / "v1" / ".locks" / "x.lock"
    with build_lock(path, timeout_s=1, done=lambda: False):
        holder = read_holder(path)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert read_holder(path) is None


def test_a_thread_that_waits_too_long_goes_on(cache: Cache) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.lock(key(), timeout_s=30):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(30)
    with (
        pytest.warns(RuntimeWarning, match="another thread"),
        cache.lock(key(), timeout_s=0.1) as wait,
    ):
        assert not wait.held
        assert wait.waited_ms >= 100
    leave.set()
    thread.join()


def test_no_lock_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Cache(tmp_path / "file").lock(key(), timeout_s=30) as wait:
            assert not wait.held


def test_a_failure_is_handed_on_for_a_while(cache: Cache) -> None:
    record = cache.failure(key())
    assert record.recent("", time.time()) is None
    record.write(CompileError("no", command="nvrtc", log="line 1", source="src"), "digest")
    known = record.recent("digest", time.time())
    assert known is not None
    assert str(known) == str(CompileError("no", command="nvrtc", log="line 1", source="src"))
    assert record.recent("other inputs", time.time()) is None
    assert record.recent("digest", time.time() + 60) is None
    record.path.write_text("{")
    assert record.recent("digest", time.time()) is None
    publish(cache)  # forgets it
    assert not record.path.exists()
