"""`jitkern warm --replay` takes in what others have written: it is code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from needs import needs_cxx

from jitkern.cli import main
from jitkern.fs import sha256
from jitkern.host import module as host

Capture = pytest.CaptureFixture[str]

# A library whose constructor leaves a mark: it runs when the library is loaded.
MARKING = """\
#include <cstdio>
__attribute__((constructor)) static void mark() {
  if (std::FILE* file = std::fopen(MARK, "w")) std::fclose(file);
}
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int __tvm_ffi_nothing(void*, const void*, int, void*) { return 0; }
"""


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> None:
    """Build the host module in the session's cache, not once more in each test's empty one."""
    host.module()


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command, in this process."""
    status = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return status, out, err


# -- recordings ------------------------------------------------------------------------------------


def write_record(file: Path, source: str) -> None:
    """A record of one library that somebody else has written."""
    line = {
        "record": 2,
        "function": "load_aot",
        "args": ["marking"],
        "options": {
            "cpp_files": ["./marking.cc"],
            "extra_cflags": [f"-DMARK='\"{file.parent}/mark\"'"],
        },
        "arch": "",
        "files": {"./marking.cc": sha256(source.encode())},
    }
    file.write_text(f"{json.dumps({'record': 2, 'text': source})}\n{json.dumps(line)}\n")
    file.chmod(0o644)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    file = tmp_path / "used.jsonl"
    write_record(file, MARKING)
    return file


@needs_cxx
def test_replay_builds_and_does_not_load(
    capsys: Capture, empty_cache: Path, recording: Path
) -> None:
    mark = recording.parent / "mark"
    for source in ("compiled", "cached"):
        status, out, err = run(capsys, "warm", "--replay", recording)
        assert (status, err) == (0, "")
        assert re.search(rf"^marking .* {source} ", out, re.MULTILINE)
        assert not mark.exists()
    assert run(capsys, "warm", "--replay", recording, "--load")[0] == 0
    assert mark.exists()


@needs_cxx
def test_a_library_that_does_not_load_is_found_by_load(
    capsys: Capture, empty_cache: Path, recording: Path
) -> None:
    write_record(recording, 'extern "C" int missing;\nint* needed = &missing;\n')
    assert run(capsys, "warm", "--replay", recording)[0] == 0
    status, _, err = run(capsys, "warm", "--replay", recording, "--load")
    assert status == 1
    assert "the library was built but does not load" in err


def test_replay_refuses_what_others_could_have_written(
    capsys: Capture, empty_cache: Path, recording: Path
) -> None:
    recording.chmod(0o666)
    status, out, err = run(capsys, "warm", "--replay", recording)
    assert (status, out) == (1, "")
    assert err == (
        f"jitkern: error: --replay: {recording}: its mode, 0666, lets others write it; if you "
        f"trust them, replay it with: jitkern warm --trust --replay {recording}\n"
    )


@pytest.mark.parametrize("option", ["--trust", "--load"])
def test_options_of_replay_come_with_it(capsys: Capture, option: str) -> None:
    status, _, err = run(capsys, "warm", "--element-size", "656", option)
    assert status == 2
    assert f"warm: {option}: expected along with --replay FILE" in err


@pytest.mark.parametrize("command", ["cache import", "warm"])
def test_help_says_that_it_is_code(capsys: Capture, command: str) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "only what you would" in text
