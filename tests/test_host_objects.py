"""JITKERN_HOST_OBJECTS: a source of the host module is compiled once, whatever tree it lies in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from needs import needs_cxx

from jitkern import env
from jitkern.cache.entry import Key
from jitkern.compilers import cxx
from jitkern.host import build as host_build

pytestmark = needs_cxx

Made = Callable[..., tuple[set[str], bytes]]


def csrc_of(folder: Path) -> Path:
    for name in ("include", "host"):
        (folder / name).mkdir(parents=True)
    (folder / "include" / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "host" / "precompiled.h").write_text("#pragma once\n#include <string>\n")
    (folder / "host" / "ask.cc").write_text('extern "C" int ask() { return 1; }\n')
    text = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    (folder / "host" / "reply.cc").write_text(text)
    return folder


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Build a tree; return the names of the sources that were compiled, and the library."""

    def build(csrc: Path, flags: str = "-O0") -> tuple[set[str], bytes]:
        compiled: set[str] = set()
        link = cxx.build

        def seen(*args: object, **options: object) -> cxx.Library:
            library = link(*args, **options)
            compiled.update(path.name for path in options["sources"])
            compiled.difference_update(path.name for path in options["compiled"])
            return library

        monkeypatch.setattr(cxx, "build", seen)
        key = Key("cxx", "demo", "0" * 20, {"op": "demo", "cflags": [flags]})
        library = host_build.build(key, csrc).files["demo.so"]
        monkeypatch.setattr(cxx, "build", link)
        return compiled, library

    monkeypatch.setenv("JITKERN_HOST_OBJECTS", str(tmp_path / "objects"))
    env.settings.cache_clear()
    return build


def test_another_tree_links_what_the_first_has_compiled(made: Made, tmp_path: Path) -> None:
    first, library = made(csrc_of(tmp_path / "a"))
    second, same = made(csrc_of(tmp_path / "b"))
    assert (first, second) == ({"ask.cc", "reply.cc"}, set())
    assert same == library


def test_what_changes_is_compiled(made: Made, tmp_path: Path) -> None:
    """A source alone; who includes a header; all for the precompiled one, and for other flags."""
    csrc = csrc_of(tmp_path / "a")
    _, before = made(csrc)
    (csrc / "host" / "ask.cc").write_text('extern "C" int ask() { return 2; }\n')
    assert made(csrc)[0] == {"ask.cc"}
    (csrc / "include" / "answer.h").write_text("#define ANSWER 43\n")
    compiled, after = made(csrc)
    assert compiled == {"reply.cc"}
    assert after != before
    (csrc / "host" / "answer.h").write_text("#define ANSWER 44\n")  # beside who quotes its name
    assert made(csrc)[0] == {"reply.cc"}
    (csrc / "include" / "other.h").write_text("#define OTHER 1\n")
    assert made(csrc)[0] == set()
    (csrc / "host" / "precompiled.h").write_text("#pragma once\n")
    assert made(csrc)[0] == {"ask.cc", "reply.cc"}
    assert made(csrc, "-O1")[0] == {"ask.cc", "reply.cc"}


def test_a_place_relative_to_this_process(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITKERN_HOST_OBJECTS", "near")
    env.settings.cache_clear()
    made(csrc_of(tmp_path / "a"))
    assert made(csrc_of(tmp_path / "b"))[0] == set()
    assert len(list((tmp_path / "near").glob("*.o"))) == 2


def test_nothing_is_kept_where_nobody_asks(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JITKERN_HOST_OBJECTS")
    env.settings.cache_clear()
    for name in ("a", "b"):
        assert made(csrc_of(tmp_path / name))[0] == {"ask.cc", "reply.cc"}
    assert not (tmp_path / "objects").exists()


@pytest.fixture(autouse=True)
def settings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> object:
    yield
    monkeypatch.undo()
    env.settings.cache_clear()
