"""Loading a library that the cache has verified: from its file, or from memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import write_sources
from needs import needs_cxx
from test_attacks import build_library

from jitkern.cache import get
from jitkern.compilers.load import load_library
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.jit.loader import load_aot

pytestmark = needs_cxx


@pytest.fixture
def libraries(tmp_path: Path) -> dict[int, bytes]:
    return {value: build_library(tmp_path / "built", value, tmp_path / "mark") for value in (1, 2)}


def test_profilers_see_the_files_own_name(tmp_path: Path, libraries: dict[int, bytes]) -> None:
    file = tmp_path / "entry" / "tiny.so"
    file.parent.mkdir()
    file.write_bytes(libraries[1])
    module = load_library("tiny", libraries[1], file)
    assert module["value"]() == 1
    moved = file.with_name("moved.so")
    file.rename(moved)  # as from staging to its place
    assert str(moved) in Path("/proc/self/maps").read_text()
    assert load_library("tiny", libraries[1], moved)["value"]() == 1


def test_libraries_that_are_in_no_file(
    libraries: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a Python without memfd_create, such as uv's: the C library has it all the same."""
    assert load_library("tiny", libraries[1], None)["value"]() == 1
    monkeypatch.delattr(os, "memfd_create")
    assert load_library("tiny", libraries[2], None)["value"]() == 2
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # nor the C library
    with pytest.raises(CompileError) as caught:
        load_library("tiny", libraries[2], None)
    assert "no memfd_create here, expected glibc 2.27" in caught.value.log


def test_what_does_not_load_says_so_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny.so"
    file.write_bytes(b"no library")
    for place in (file, None):
        with pytest.raises(CompileError) as caught:
            load_library("tiny", b"no library", place)
        assert caught.value.message == "tiny: the library was built but does not load"
        assert caught.value.command == "dlopen tiny.so"
        assert "tiny.so: file too short" in caught.value.log
        assert "/proc" not in caught.value.log


@pytest.fixture
def nowhere_to_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JITKERN_CACHE_DIR", "/dev/null/cache")
    monkeypatch.setattr(get._private.value, "get", lambda reason: None)
    settings.cache_clear()
    get._caches.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()
    get._caches.cache_clear()


def test_a_build_that_can_be_kept_nowhere_is_loaded(tmp_path: Path, nowhere_to_write: None) -> None:
    source = str(write_sources(tmp_path / "sources", value=3) / "tiny.cc")
    assert load_aot("tiny", cpp_files=[source])["value"]() == 3
