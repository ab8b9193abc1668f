"""The parsers of foreign input, fuzzed: each outcome is a sound value or one clear error.

``--hypothesis-profile thorough`` looks for more than the 200 examples of each.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from entries import VARIANT, key, sealed
from hypothesis import given
from hypothesis import strategies as st

from jitkern.cache.entry import Entry, parse_meta
from jitkern.cache.lock import FailureNote
from jitkern.compilers.sources import CSRC
from jitkern.errors import CacheError, CompileError
from jitkern.fs import sha256
from jitkern.jit.record import replay

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
META: dict[str, Any] = {
    "schema": 1,
    "route": "device",
    "name": key().name,
    "family": key().digest,
    "toolchain": VARIANT,
    "describe": {"op": "tiny", "args": ["656"], "arch": "9.0"},
    "artefact": "kernel.cubin",
    "files": {"kernel.cubin": {"bytes": 1, "sha256": sha256(b"x")}},
    "build_ms": 12.5,
}
TEXT = {"record": 2, "text": "int x;\n"}
LINE: dict[str, Any] = {
    "record": 2,
    "function": "load_jit",
    "args": ["tiny", "4"],
    "options": {
        "device_files": ["./src/tiny.cu", "jitkern:perf/copy.cu"],
        "device_wrappers": [["tiny", "Tiny<4>"]],
        "extra_include_paths": ["./inc"],
    },
    "arch": "9.0",
    "files": {"./src/tiny.cu": sha256(b"int x;\n")},
}
FAILURE = {"variant": "", "message": "m", "command": "c", "log": "l", "source": ""}


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """`value` with a part of it replaced, missing or more, somewhere."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(value)))
        what = draw(st.sampled_from(["inside", "gone", "more", "renamed"]))
        rest = {other: part for other, part in value.items() if other != name}
        if what == "gone":
            return rest
        if what == "more":
            return {**value, draw(TEXTS): draw(ANYTHING)}
        if what == "renamed":
            return {**rest, draw(TEXTS): value[name]}
        return {**rest, name: draw(changed(value[name]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [*value[:-1], draw(changed(value[-1]))]
    return draw(ANYTHING)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with some bytes changed, and cut short or with a part of it twice."""
    raw = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    at = draw(st.integers(0, len(raw)))
    return bytes(draw(st.sampled_from([raw, raw[:at], raw[at:], raw + raw[:at]])))


def texts(value: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Texts of JSON that are nearly `value`."""
    whole = changed(value).map(lambda one: json.dumps(one).encode())
    return whole | damaged(json.dumps(value).encode()) | st.binary(max_size=100)


def check_error(error: Exception, where: object) -> None:
    message = str(error)
    assert message.startswith(str(where))
    assert message.isprintable()
    assert len(message) < 1000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # 45 of the 50 ms that a publication takes
        yield tmp_path_factory.mktemp("fuzz")


@given(changed(META).map(lambda one: sealed(one) if isinstance(one, dict) else b"5") | texts(META))
def test_metas(raw: bytes) -> None:
    try:
        meta = parse_meta(raw, "where")
    except CacheError as error:
        check_error(error, "where: ")
        return
    entry = Entry(None, dict.fromkeys(meta["files"], b""), meta)
    assert entry.key.directory.endswith(f"-{meta['family']}")
    assert "/" not in entry.key.directory + entry.variant + entry.artefact_name
    assert parse_meta(sealed(meta), "again") == meta


@given(st.lists(texts(LINE) | texts(TEXT), max_size=4))
def test_recordings(place: Path, lines: list[bytes]) -> None:
    file = place / "used.jsonl"
    file.write_bytes(b"\n".join([json.dumps(TEXT).encode(), *lines]))
    file.chmod(0o644)
    folder = place / "laid out"
    try:
        found = replay(file)
    except ValueError as error:
        check_error(error, file)
        return
    for one in found:
        assert str(one.used).startswith(one.used.args[0])
        try:
            used = one.unpack(folder)
        except OSError:  # a file in the place of a directory, a name that no disk takes
            continue
        for path in used.options.get("device_files", ()):
            assert Path(path).is_relative_to(folder) or Path(path).is_relative_to(CSRC)
    assert set(os.listdir(place)) <= {"used.jsonl", "laid out", "cache", *BESIDE}
    shutil.rmtree(folder, ignore_errors=True)


# Files that the other tests of this module make in the same place.
BESIDE = ("x.json",)


@given(texts({**FAILURE, "at_unix_s": 1.5e9}))
def test_failures(place: Path, raw: bytes) -> None:
    record = FailureNote(place / "x.json")
    record.path.write_bytes(raw.replace(b"1500000000.0", str(time.time()).encode()))
    known = record.recent("", time.time())
    assert known is None or (isinstance(known, CompileError) and str(known))
