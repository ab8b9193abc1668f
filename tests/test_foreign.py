"""Records that somebody else has written: refused with one clear error, and never fatal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny import write_lines

from jitkern.fs import digest, sha256
from jitkern.jit.record import replay

TEXT = {"record": 2, "text": "int x;\n"}
PLACE = "./src/a.cu"
DIGEST = sha256(b"int x;\n")
LINE: dict[str, Any] = {
    "record": 2,
    "function": "load_jit",
    "args": ["a"],
    "options": {"device_files": [PLACE]},
    "arch": "9.0",
    "files": {PLACE: DIGEST},
}


OUTSIDE = "expected a place such as ./src/scale.cu"
BAD_PATHS = ("/etc/cron.d/x", "./../x", "./a//x", "./a\x1b", "jitkern:perf/copy.cu")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (5, ""),
        ({}, "record: None, expected 2"),
        ({**LINE, "record": 1}, "record: 1, expected 2"),
        ({**LINE, "function": "exec"}, "expected load_jit or load_aot"),
        ({**LINE, "args": []}, ""),
        ({**LINE, "args": [5]}, "expected load_jit or load_aot, and strings"),
        ({**LINE, "options": 5}, ""),
        ({**LINE, "options": {"cpp_files": "a.cc"}}, OUTSIDE),
        ({**LINE, "options": {"cpp_files": ["/etc/passwd"]}}, OUTSIDE),
        ({**LINE, "options": {"extra_include_paths": ["./../x"]}}, OUTSIDE),
        ({**LINE, "options": {"extra_include_paths": ["jitkern:../x"]}}, OUTSIDE),
        ({**LINE, "files": [PLACE]}, ""),
        ({**LINE, "files": {PLACE: 5}}, "the record has no text for ./src/a.cu"),
        *(({**LINE, "files": {path: DIGEST}}, OUTSIDE) for path in BAD_PATHS),
        ({"record": 2, "text": 5}, ""),
        ({"record": 2, "text": "\ud800"}, "'utf-8' codec"),
    ],
)
def test_lines_that_are_no_specialisation(tmp_path: Path, line: object, says: str) -> None:
    file = write_lines(tmp_path / "used.jsonl", TEXT, LINE, line)
    with pytest.raises(ValueError, match="not a recorded specialisation") as error:
        replay(file)
    message = str(error.value)
    assert message.startswith(f"{file}:3: not a recorded specialisation: ")
    assert says in message and message.isprintable() and len(message) < 500


def test_a_recording_that_others_could_have_write_lines(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "used.jsonl", TEXT, LINE)
    file.chmod(0o666)
    with pytest.raises(ValueError, match="lets others write it") as error:
        replay(file)
    assert str(error.value) == (
        f"{file}: its mode, 0666, lets others write it; if you trust them, replay it with: "
        f"jitkern warm --trust --replay {file}"
    )
    assert [one.used.args for one in replay(file, trust=True)] == [("a",)]


def test_files_that_are_no_record(tmp_path: Path) -> None:
    for lines in ([], [TEXT]):
        with pytest.raises(ValueError, match=r"jsonl: nothing is recorded in it; record a run wit"):
            replay(write_lines(tmp_path / "used.jsonl", *lines))
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            replay(file)


def test_a_record_lays_out_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    line = {**LINE, "files": {PLACE: DIGEST, "./src": DIGEST}}  # a file and a directory
    (one,) = replay(write_lines(tmp_path / "used.jsonl", TEXT, line))
    with pytest.raises(OSError, match="src"):
        one.unpack(tmp_path / "laid")
    line = {**LINE, "options": {**LINE["options"], "extra_include_paths": ["./.", "./more/inc"]}}
    (one,) = replay(write_lines(tmp_path / "used.jsonl", TEXT, line))
    tree = tmp_path / "laid" / digest(one.files)
    assert one.unpack(tmp_path / "laid").options == {
        "device_files": [str(tree / "src/a.cu")],
        "extra_include_paths": [str(tree), str(tree / "more/inc")],
    }
    assert sorted(path.name for path in tree.rglob("*")) == ["a.cu", "inc", "more", "src"]
