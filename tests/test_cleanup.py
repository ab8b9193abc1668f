"""What clear, eviction and sweeping delete: the cache's own, and nothing that others put there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import DATA, VARIANT, key, make, publish
from strangers import MALLORY, as_user, needs_root

from jitkern.cache import cleanup
from jitkern.cache.schema import META_NAME
from jitkern.cache.store import Cache
from jitkern.errors import CacheError
from jitkern.fs import digest

SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's files, of all shapes that jitkern could take for its own."""
    folder = tmp_path / "victim"
    for name in ("run1", VARIANT, key().directory):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights.so").write_text("months of work")
        os.utime(folder / name, (1, 1))
    for name in (f"{key().directory}.json", f"{os.uname().nodename}.999999999.{'0' * 16}"):
        (folder / name).write_text("months of work")
        os.utime(folder / name, (1, 1))
    return folder


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


# -- the tag ---------------------------------------------------------------------------------------


def test_the_first_publication_marks_the_cache(cache: Cache) -> None:
    publish(cache)
    text = (cache.root / "v1" / "CACHEDIR.TAG").read_text()
    assert text.startswith(SIGNATURE)
    assert "jitkern" in text
    assert [path.name for path in cache.root.iterdir()] == ["v1"]  # nothing beside it is marked


def test_a_cache_of_an_older_version_is_marked_by_the_next_publication(cache: Cache) -> None:
    publish(cache)
    base = cache.root / "v1"
    (base / "CACHEDIR.TAG").unlink()
    (base / ".bytes").write_text("4711")  # as older versions noted it
    for dry_run in (True, False):
        with pytest.raises(CacheError) as error:
            cache.clear(dry_run=dry_run)
        assert str(error.value) == (
            f"{base}: not cleared, for it holds no CACHEDIR.TAG of jitkern's: an older version has "
            "made it; compile anything into it, which marks it, or delete it by hand"
        )
    publish(Cache(cache.root), "another")
    assert (base / "CACHEDIR.TAG").exists()
    assert len(cache.clear().removed) == 2


@pytest.mark.parametrize(
    "stranger", ["checkpoints/run1/model.pt", "notes.txt", f"{key().directory}/notes.txt"]
)
def test_somebody_elses_directory_is_never_marked_nor_cleared(cache: Cache, stranger: str) -> None:
    """`JITKERN_CACHE_DIR=proj`, and there is a proj/v1: it lost its checkpoints."""
    file = cache.root / "v1" / stranger
    make(file.parent)
    file.write_text("months of work")
    entry = publish(cache)
    assert not (cache.root / "v1" / "CACHEDIR.TAG").exists()
    named = stranger if stranger.startswith(key().directory) else stranger.partition("/")[0]
    with pytest.raises(CacheError) as error:
        cache.clear()
    assert str(error.value) == (
        f"{cache.root / 'v1'}: not cleared, for it holds {named!r}, which jitkern has not written, "
        "and no CACHEDIR.TAG of jitkern's; if JITKERN_CACHE_DIR is right, move that elsewhere, or "
        "delete the entries by hand"
    )
    assert file.read_text() == "months of work"
    assert entry.exists()


def test_the_tag_of_another_program_is_not_ours(cache: Cache) -> None:
    publish(cache)
    (cache.root / "v1" / "CACHEDIR.TAG").write_text(SIGNATURE + "# made by pip\n")
    with pytest.raises(CacheError, match=r"no CACHEDIR\.TAG of jitkern's"):
        cache.clear()


def test_nothing_to_clear_is_no_error(cache: Cache) -> None:
    assert cache.clear() == cleanup.Cleared([], [])
    (cache.root / "v1").mkdir(parents=True)
    assert cache.clear() == cleanup.Cleared([], [])


# -- what goes and what stays ----------------------------------------------------------------------


def test_clear_leaves_what_others_have_put_into_a_cache(cache: Cache) -> None:
    gone = [publish(cache, name) for name in ("one", "two")]
    strange = publish(cache, "three")
    (strange / "diary.txt").write_text("dear diary")
    nested = publish(cache, "four")
    (nested / "deeper").mkdir()
    (cache.root / "v1" / "checkpoints" / "run1").mkdir(parents=True)
    left = sorted(
        [
            f"{key('three').directory}/{VARIANT}/diary.txt",
            f"{key('four').directory}/{VARIANT}/deeper",
            "checkpoints",
        ]
    )
    removed = sorted(f"{key(name).directory}/{VARIANT}" for name in ("one", "two"))

    planned = cache.clear(dry_run=True)
    assert (planned.removed, sorted(planned.left)) == (removed, left)
    assert all(path.exists() for path in gone)
    done = cache.clear()
    assert (done.removed, sorted(done.left)) == (removed, left)
    assert not any(path.parent.exists() for path in gone)
    assert (strange / "diary.txt").read_text() == "dear diary"
    assert (strange / "kernel.cubin").read_bytes() == DATA
    assert nested.is_dir()


@pytest.mark.parametrize("damage", ["no meta", "meta of zeros", "no artefact", "empty"])
def test_damaged_entries_go_by_what_jitkern_could_have_written(cache: Cache, damage: str) -> None:
    path = publish(cache)
    if damage in ("no meta", "empty"):
        (path / META_NAME).unlink()
    if damage in ("no artefact", "empty"):
        (path / "kernel.cubin").unlink()
    if damage == "meta of zeros":
        (path / META_NAME).write_bytes(bytes(100))
    assert len(cache.clear().removed) == 1
    assert not path.parent.exists()


def test_a_damaged_entry_with_a_strange_file_stays(cache: Cache) -> None:
    path = publish(cache)
    (path / META_NAME).write_bytes(b"")
    (path / "notes.txt").write_text("whose is this?")
    assert cache.clear().left == [f"{key().directory}/{VARIANT}/notes.txt"]
    assert path.exists()
    # In the place of an entry that is needed it is set aside, not deleted.
    publish(cache)
    (aside,) = (cache.root / "v1" / ".staging").iterdir()
    assert (aside / "notes.txt").read_text() == "whose is this?"
    os.utime(aside, (1, 1))
    publish(Cache(cache.root), "another")  # sweeps
    assert (aside / "notes.txt").exists()


def test_records_of_failures_are_cleared_and_nothing_else_of_that_directory(cache: Cache) -> None:
    publish(cache)
    failed = cache.root / "v1" / ".failed"
    failed.mkdir()
    for name in (f"{key().directory}.json", "notes.json", "notes.txt"):
        (failed / name).write_text("{}")
    cache.clear()
    assert sorted(os.listdir(failed)) == ["notes.json", "notes.txt"]


# -- links -----------------------------------------------------------------------------------------


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
    shutil.copy(base.with_name("v1.old") / "CACHEDIR.TAG", victim)
    base.symlink_to(victim)


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
    ids=lambda plant: plant.__name__,
)
@pytest.mark.parametrize("action", ["clear", "prune", "publish", "publish the same"])
def test_no_link_leads_out_of_the_cache(
    cache: Cache, victim: Path, plant: Callable[[Path, Path], None], action: str
) -> None:
    publish(cache)
    publish(cache, "other")
    plant(cache.root / "v1", victim)
    before = tree(victim)
    fresh = Cache(cache.root, max_bytes=1)  # sweeps and evicts when it publishes
    try:
        if action == "clear":
            fresh.clear()
        elif action == "prune":
            fresh.prune(0)
        else:
            publish(fresh, "store_656" if action == "publish the same" else "new")
    except CacheError as error:
        assert str(cache.root) in str(error)
    assert tree(victim) == before


def test_a_directory_that_is_swapped_for_a_link_while_it_is_cleared(
    cache: Cache, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(cache)
    before = tree(victim)
    name = cleanup.private_name

    def swap() -> str:  # called between looking and deleting
        (cache.root / "v1" / key().directory).rename(cache.root / "v1" / "away")
        (cache.root / "v1" / key().directory).symlink_to(victim)
        return name()

    monkeypatch.setattr(cleanup, "private_name", swap)
    with pytest.raises(CacheError, match="cannot clear: Not a directory"):
        cache.clear()
    assert tree(victim) == before


@needs_root
def test_a_link_that_another_user_plants_in_a_shared_cache(open_place: Path, victim: Path) -> None:
    cache = Cache(open_place / "shared")
    publish(cache)
    base = cache.root / "v1"
    cache.root.chmod(0o755)
    base.chmod(0o777)
    before = tree(victim)
    as_user(MALLORY, lambda: (base / f"evil-{digest('evil')}").symlink_to(victim))
    assert cache.clear().left == [f"evil-{digest('evil')}"]
    assert tree(victim) == before


# -- leftovers -------------------------------------------------------------------------------------


def test_dead_staging_is_swept_and_nothing_else(cache: Cache, tmp_path: Path) -> None:
    folder = cache.root / "v1" / ".staging"
    here, token = os.uname().nodename, "0123456789abcdef"
    ages_s = {
        f"{here}.{os.getpid()}.{token}": 3600,  # alive
        f"{here}.999999999.{token}": 3600,
        f"{here}.999999998.{token}": 1,  # dead, and young
        f"{here}.999999997.{token}": -3600,  # the clock was wrong
        f"elsewhere.999999999.{token}": 3600,
        f"elsewhere.999999998.{token}": 100_000,
        f"elsewhere.999999997.{token}": -100_000,
        "my-experiments": 100_000,
    }
    for name, age_s in ages_s.items():
        make(folder / name)
        (folder / name / "kernel.cubin").write_bytes(DATA)
        os.utime(folder / name, (time.time() - age_s,) * 2)
    nested = folder / f"{here}.999999996.{token}"
    make(nested / "inner")
    os.utime(nested, (1, 1))
    publish(cache)
    assert sorted(os.listdir(folder)) == sorted(
        [
            f"{here}.{os.getpid()}.{token}",
            f"{here}.999999998.{token}",
            f"elsewhere.999999999.{token}",
            "my-experiments",
            nested.name,
        ]
    )


@pytest.mark.parametrize("place", [".locks", ".failed"])
def test_half_written_files_of_the_dead_are_swept(cache: Cache, place: str) -> None:
    folder = make(cache.root / "v1" / place)
    dead = f".{key().directory}.lock.holder.{os.uname().nodename}.999999999.{'a' * 16}"
    for name in (dead, f"{key().directory}.lock"):
        (folder / name).write_text("{")
        os.utime(folder / name, (1, 1))
    publish(cache)
    assert os.listdir(folder) == [f"{key().directory}.lock"]
