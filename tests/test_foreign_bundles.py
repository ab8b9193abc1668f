"""Recordings that somebody else has written: refused with one clear error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jitkern.fs import digest, sha256
from jitkern.jit.record import replay

TEXT = {"record": 2, "text": "int x;\n"}
PLACE = "./src/a.cu"
LINE: dict[str, Any] = {
    "record": 2,
    "function": "load_jit",
    "args": ["a"],
    "options": {"device_files": [PLACE]},
    "arch": "9.0",
    "files": {PLACE: sha256(b"int x;\n")},
}
DIGEST = LINE["files"][PLACE]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"record": 1}, "record: 1, expected 2"),
        ({"record": 2.0}, "record: 2.0, expected 2"),
        ({"record": None}, "record: None, expected 2"),
        ({"function": "exec"}, "function: expected load_jit or load_aot"),
        ({"function": ["load_jit"]}, "function: ['load_jit'], expected str"),
        ({"args": "abc"}, "args: 'abc', expected list"),
        ({"args": []}, "args: expected a list of strings, the name first"),
        ({"args": [5]}, "args: expected a list of strings, the name first"),
        ({"arch": None}, "arch: None, expected str"),
        ({"options": []}, "options: [], expected dict"),
        ({"options": {"cpp_files": "a.cc"}}, "options: cpp_files: expected a list of strings"),
        (
            {"options": {"cpp_files": ["/etc/passwd"]}},
            "options: cpp_files: '/etc/passwd', expected",
        ),
        ({"options": {"cpp_files": ["./no.cc"]}}, "options: cpp_files: './no.cc', expected one of"),
        (
            {"options": {"extra_include_paths": ["./../x"]}},
            "options: extra_include_paths: './../x'",
        ),
        ({"options": {"extra_include_paths": ["jitkern:../x"]}}, "options: extra_include_paths: "),
        ({"files": [PLACE]}, "files: ['./src/a.cu'], expected dict"),
        ({"files": {PLACE: 5}}, "files: './src/a.cu', expected a place"),
        ({"files": {"/etc/cron.d/x": DIGEST}}, "files: '/etc/cron.d/x', expected a place such as"),
        ({"files": {"./../x": DIGEST}}, "files: './../x', expected a place"),
        ({"files": {"./a//x": DIGEST}}, "files: './a//x', expected a place"),
        ({"files": {"jitkern:perf/copy.cu": DIGEST}}, "files: 'jitkern:perf/copy.cu', expected a"),
        ({"files": {"./" + "a/" * 600 + "x": DIGEST}}, "files: './a/a/a/"),
        ({"files": {"./" + "a" * 2000: DIGEST}}, "files: './aaaa"),
        ({"more": 5}, "expected an object of arch, args, files, function, options, record, or of"),
        ({"text": 5}, "expected an object of arch, args, files, function, options, record, or of"),
    ],
)
def test_lines_that_are_no_specialisation(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    file = tmp_path / "used.jsonl"
    lines = [TEXT, LINE, {**LINE, **changes}]
    file.write_text("\n".join(map(json.dumps, lines)))
    file.chmod(0o644)
    with pytest.raises(ValueError, match="not a recorded specialisation") as error:
        replay(file)
    assert str(error.value).startswith(f"{file}:3: not a recorded specialisation: {says}")


def test_a_recording_that_others_could_have_written(tmp_path: Path) -> None:
    file = tmp_path / "used.jsonl"
    file.write_text(f"{json.dumps(TEXT)}\n{json.dumps(LINE)}\n")
    file.chmod(0o666)
    with pytest.raises(ValueError, match="lets others write it") as error:
        replay(file)
    assert str(error.value) == (
        f"{file}: its mode, 0666, lets others write it; if you trust them, replay it with: "
        f"jitkern warm --trust --replay {file}"
    )
    assert [one.used.args for one in replay(file, trust=True)] == [("a",)]


def written(file: Path, *lines: object) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file.chmod(0o644)
    return file


FIRST_FORMAT = {name: LINE[name] for name in ("function", "args", "options", "arch")}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], ": nothing is recorded in it; record a run with JITKERN_RECORD=FILE"),
        (
            [TEXT],
            ": nothing is recorded in it; record a run with JITKERN_RECORD=FILE",
        ),
        ([LINE], f":1: the record has no text for '{PLACE}'"),
        (
            [FIRST_FORMAT],
            ":1: not a recorded specialisation: record: None, expected 2",
        ),
        ([{"schema": 1}], ":1: not a recorded specialisation: record: None, expected 2"),
        ([5], ":1: not a recorded specialisation: record: None, expected 2"),
        ([{"record": 2, "text": 5}], ":1: not a recorded specialisation: expected an object of "),
        ([{"record": 2, "text": "\ud800"}], ":1: not a recorded specialisation: 'utf-8' codec"),
    ],
)
def test_files_that_are_no_record(tmp_path: Path, lines: list[object], says: str) -> None:
    file = written(tmp_path / "used.jsonl", *lines)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}{says}')}"):
        replay(file)


def test_a_record_lays_out_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    line = {**LINE, "files": {PLACE: DIGEST, "./src": DIGEST}}  # a file and a directory
    (one,) = replay(written(tmp_path / "used.jsonl", TEXT, line))
    with pytest.raises(OSError, match="src"):
        one.unpack(tmp_path / "laid")
    assert list((tmp_path / "laid").iterdir()) == []
    line = {**LINE, "options": {**LINE["options"], "extra_include_paths": ["./.", "./more/inc"]}}
    (one,) = replay(written(tmp_path / "used.jsonl", TEXT, line))
    tree = tmp_path / "laid" / digest(one.files)
    assert one.unpack(tmp_path / "laid").options == {
        "device_files": [str(tree / "src/a.cu")],
        "extra_include_paths": [str(tree), str(tree / "more/inc")],
    }
    assert sorted(path.name for path in tree.rglob("*")) == ["a.cu", "inc", "more", "src"]


def test_a_source_that_this_version_does_not_have(tmp_path: Path) -> None:
    line = {**LINE, "options": {"device_files": ["jitkern:ops/gone.cu"]}, "files": {}}
    (one,) = replay(written(tmp_path / "used.jsonl", line))
    with pytest.raises(FileNotFoundError, match=r"gone\.cu: this version of jitkern has no such"):
        one.unpack(tmp_path)
