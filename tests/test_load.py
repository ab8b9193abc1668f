"""The bytes that are loaded are those that were verified, whatever becomes of their file."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import write_sources
from needs import needs_cxx
from test_attacks import build_library

from jitkern.cache import get, search
from jitkern.cache.shelf import Shelf
from jitkern.compilers import load
from jitkern.compilers.load import load_library
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.jit.loader import load_aot

pytestmark = needs_cxx


@pytest.fixture
def libraries(tmp_path: Path) -> dict[int, bytes]:
    return {value: build_library(tmp_path / "built", value, tmp_path / "mark") for value in (1, 2)}


@pytest.fixture
def file(tmp_path: Path, libraries: dict[int, bytes]) -> Path:
    """A library of an entry that has been verified."""
    file = tmp_path / "entry" / "tiny.so"
    file.parent.mkdir()
    file.write_bytes(libraries[1])
    return file


def maps() -> str:
    return Path("/proc/self/maps").read_text()


def by_rename(file: Path, planted: Path) -> None:
    os.replace(planted, file)


def by_a_link(file: Path, planted: Path) -> None:
    file.unlink()
    file.symlink_to(planted)


def by_a_fifo(file: Path, planted: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def by_nothing(file: Path, planted: Path) -> None:
    file.unlink()


def by_another_directory(file: Path, planted: Path) -> None:
    file.parent.rename(file.parent.with_name("before"))
    file.parent.mkdir()
    os.replace(planted, file)


SWAPS = [by_rename, by_a_link, by_a_fifo, by_nothing, by_another_directory]


@pytest.fixture
def planted(tmp_path: Path, libraries: dict[int, bytes]) -> Path:
    planted = tmp_path / "planted.so"
    planted.write_bytes(libraries[2])
    return planted


@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_before_it_is_opened_again(
    file: Path,
    planted: Path,
    libraries: dict[int, bytes],
    swap: Callable[[Path, Path], None],
) -> None:
    swap(file, planted)
    before = maps().count("memfd:tiny.so")
    assert load_library("tiny", libraries[1], file)["value"]() == 1
    assert maps().count("memfd:tiny.so") > before


@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_between_reading_and_loading(
    file: Path,
    planted: Path,
    libraries: dict[int, bytes],
    monkeypatch: pytest.MonkeyPatch,
    swap: Callable[[Path, Path], None],
) -> None:
    original = load._load

    def swap_and_load(path: str) -> object:
        swap(file, planted)
        return original(path)

    monkeypatch.setattr(load, "_load", swap_and_load)
    assert load_library("tiny", libraries[1], file)["value"]() == 1


def test_swapped_while_an_entry_is_looked_up(
    tmp_path: Path, empty_cache: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way through the cache, swapped when all has been verified."""
    source = str(write_sources(tmp_path / "sources") / "tiny.cc")
    built = load_aot("tiny", cpp_files=[source])
    assert built["value"]() == 1
    (artefact,) = empty_cache.rglob("*.so")
    original = Shelf.lookup
    swapped = []

    def lookup(*args: object, **kwargs: object) -> object:
        entry = original(*args, **kwargs)  # type: ignore[arg-type]
        if entry is not None:
            by_a_link(artefact, planted)
            swapped.append(entry.path)
        return entry

    monkeypatch.setattr(Shelf, "lookup", lookup)
    assert load_aot("tiny", cpp_files=[source])["value"]() == 1
    assert len(swapped) == 1


def test_profilers_see_the_files_own_name(file: Path, libraries: dict[int, bytes]) -> None:
    module = load_library("tiny", libraries[1], file)
    assert str(file) in maps()
    moved = file.with_name("moved.so")
    file.rename(moved)  # as from staging to its place
    assert str(moved) in maps()
    del module


def test_debuggers_open_the_loaders_name(file: Path, libraries: dict[int, bytes]) -> None:
    load_library("tiny", libraries[1], file)
    status = file.stat()
    path = load._paths[status.st_dev, status.st_ino]
    file.unlink()
    command = ["cat", path]  # another process, for which the number stands for something else
    assert subprocess.run(command, capture_output=True, timeout=60).stdout == libraries[1]


def test_the_same_file_takes_one_descriptor(file: Path, libraries: dict[int, bytes]) -> None:
    load_library("tiny", libraries[1], file)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert load_library("tiny", libraries[1], file)["value"]() == 1
    assert len(os.listdir("/proc/self/fd")) == before


REUSED = """
import os, sys
from pathlib import Path
sys.modules["torch"] = None
import tvm_ffi
from jitkern.compilers import load

first, second = (Path(name) for name in sys.argv[1:])
assert load.load_library("first", first.read_bytes(), first)["value"]() == 1
(path,) = load._paths.values()
number = int(path.rpartition("/")[2])
os.close(number)  # as a daemon does that closes all it has inherited
assert load.load_library("second", second.read_bytes(), second)["value"]() == 2
assert load.load_library("first", first.read_bytes(), first)["value"]() == 1
os.closerange(3, 100)
assert load.load_library("second", second.read_bytes(), second)["value"]() == 2
assert load.load_library("first", first.read_bytes(), first)["value"]() == 1
if os.fork() == 0:
    os._exit(0 if load.load_library("first", first.read_bytes(), first)["value"]() == 1 else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_a_number_that_comes_up_again_is_another_library(
    tmp_path: Path,
    libraries: dict[int, bytes],
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """dlopen takes a name that it knows for the library that it has loaded by that name."""
    for value, data in libraries.items():
        (tmp_path / f"{value}.so").write_bytes(data)
    fresh_python(REUSED, str(tmp_path / "1.so"), str(tmp_path / "2.so"))


def test_a_library_that_is_in_no_file(libraries: dict[int, bytes]) -> None:
    assert load_library("tiny", libraries[2], None)["value"]() == 2


def test_a_python_without_memfd_create(
    libraries: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as uv's: the C library has it all the same."""
    monkeypatch.delattr(os, "memfd_create")
    assert load_library("tiny", libraries[2], None)["value"]() == 2


def test_a_machine_without_memfd_create(
    file: Path, libraries: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is loaded all the same; what is in none says what it lacks."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    assert load_library("tiny", libraries[1], file)["value"]() == 1
    with pytest.raises(CompileError) as caught:
        load_library("tiny", libraries[2], None)
    assert "no memfd_create here, expected glibc 2.27" in caught.value.log


def test_where_descriptors_have_no_names(
    file: Path, libraries: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_PROC", "/nowhere")
    assert load_library("tiny", libraries[1], file)["value"]() == 1


def test_what_does_not_load_says_so_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny.so"
    file.write_bytes(b"no library")
    with pytest.raises(CompileError) as caught:
        load_library("tiny", b"no library", file)
    assert caught.value.message == "tiny: the library was built but does not load"
    assert caught.value.command == "dlopen tiny.so"
    assert "tiny.so: file too short" in caught.value.log
    assert "/proc" not in caught.value.log


@pytest.fixture
def nowhere_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JITKERN_CACHE_DIR", "/dev/null/cache")
    monkeypatch.setattr(get, "private_cache", lambda reason: None)
    settings.cache_clear()
    search._shelves.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()
    search._shelves.cache_clear()


def test_a_build_that_can_be_kept_nowhere_is_loaded(tmp_path: Path, nowhere_to_write: None) -> None:
    source = str(write_sources(tmp_path / "sources", value=3) / "tiny.cc")
    assert load_aot("tiny", cpp_files=[source])["value"]() == 3
