"""The commands that delete, and those that take in what others have written: it is code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from entries import change, key, publish
from needs import needs_cxx
from owned import ME
from strangers import MALLORY, needs_root

from jitkern.cache.bundle import export_bundle, read_bundle
from jitkern.cache.store import Cache
from jitkern.cli import main, ui
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


# -- clear -----------------------------------------------------------------------------------------


def test_clear_says_what_goes_and_what_stays(capsys: Capture, empty_cache: Path) -> None:
    cache = Cache(empty_cache)
    publish(cache)
    (empty_cache / "v1" / "notes.txt").write_text("mine")
    said = "left alone, for jitkern has not written it: notes.txt\n"
    status, out, _ = run(capsys, "cache", "clear", "--dry-run")
    name = f"{key().directory}/nvrtc-13.5\n"
    assert (status, out) == (0, f"{name}{said}1 entry would be removed from {empty_cache}\n")
    assert len(cache.entries()) == 1
    status, out, _ = run(capsys, "cache", "clear")
    assert (status, out) == (0, f"{said}1 entry removed from {empty_cache}\n")
    assert cache.entries() == []
    assert (empty_cache / "v1" / "notes.txt").read_text() == "mine"


def test_clear_refuses_a_project(capsys: Capture, empty_cache: Path) -> None:
    checkpoints = empty_cache / "v1" / "checkpoints" / "run1"
    checkpoints.mkdir(parents=True)
    for option in ([], ["--dry-run"]):
        status, out, err = run(capsys, "cache", "clear", *option)
        assert (status, out) == (1, "")
        assert err.startswith(f"jitkern: error: {empty_cache / 'v1'}: not cleared, for it holds ")
        assert "'checkpoints'" in err
    assert checkpoints.is_dir()


# -- what is not searched --------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["list", "info"])
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_the_commands_say_that_a_cache_is_not_searched(
    capsys: Capture, empty_cache: Path, action: str, mode: int
) -> None:
    publish(Cache(empty_cache))
    empty_cache.chmod(mode)
    status, out, _ = run(capsys, "cache", action)
    assert status == 0
    reason = f"{empty_cache} (owner {ME}, mode 0777): everyone can change what is in it; chmod -R"
    assert (f"\nnot searched: {reason}" in out) == (mode == 0o777)
    assert ("others can write to it" in out) == (mode == 0o777 and action == "info")


def test_export_makes_nobodys_code_ours(capsys: Capture, empty_cache: Path, tmp_path: Path) -> None:
    """The bundle would belong to this user, and be imported without a question."""
    file = tmp_path / "k.jkb"
    publish(Cache(empty_cache), "index_8192")
    path = publish(Cache(empty_cache))
    path.chmod(0o777)
    status, _, err = run(capsys, "cache", "export", file)
    assert status == 1
    assert f"1 damaged or not trusted: {path} (owner {ME}, mode 0777): everyone can change" in err
    assert not file.exists()
    assert run(capsys, "cache", "export", file, "--op", "index_8192")[0] == 0
    assert [found.key.name for found in read_bundle(file).entries] == ["index_8192"]


def test_nothing_is_exported_from_where_others_may_write(
    capsys: Capture, empty_cache: Path, tmp_path: Path
) -> None:
    publish(Cache(empty_cache))
    empty_cache.chmod(0o777)
    status, _, err = run(capsys, "cache", "export", tmp_path / "k.jkb")
    assert status == 1
    assert "mode 0777): everyone can change what is in it" in err
    assert list(tmp_path.glob("*.jkb")) == []


# -- bundles ---------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    cache = Cache(tmp_path / "made")
    publish(cache)
    publish(cache, "index_8192")
    file = tmp_path / "k.jkb"
    export_bundle(cache, file)
    file.chmod(0o644)
    return file


def test_import_shows_what_comes_and_whose_it_is(
    capsys: Capture, empty_cache: Path, bundle: Path
) -> None:
    status, out, _ = run(capsys, "cache", "import", bundle)
    assert status == 0
    assert re.search(r"^op +parameters +arch +built by +bytes", out, re.MULTILINE)
    for op in ("index_8192", "store_656"):
        assert re.search(rf"^{op} +656 +9\.0 +nvrtc-13\.5 +4,096", out, re.MULTILINE)
    assert f"{bundle}: 2 entries, owner {ME}, mode 0644\n" in out
    assert out.endswith(f"2 entries imported into {empty_cache}\n")


@needs_root
def test_import_refuses_the_file_of_somebody_else(
    capsys: Capture, empty_cache: Path, bundle: Path
) -> None:
    os.chown(bundle, MALLORY, MALLORY)
    status, out, err = run(capsys, "cache", "import", bundle)
    assert status == 1
    assert f"2 entries, owner {MALLORY}, mode 0644" in out  # it is shown all the same
    assert err == (
        f"jitkern: error: {bundle}: it belongs to {MALLORY}; if you trust them, "
        f"import it with: jitkern cache import --trust {bundle}\n"
    )
    assert Cache(empty_cache).entries() == []
    assert run(capsys, "cache", "import", "--trust", bundle)[0] == 0
    assert len(Cache(empty_cache).entries()) == 2


def test_limits_of_a_bundle(capsys: Capture, empty_cache: Path, bundle: Path) -> None:
    for action in ("verify", "import"):
        status, _, err = run(capsys, "cache", action, "--max-bytes", "4K", bundle)
        assert status == 1
        assert "unpacks to more than 4096 bytes" in err
        assert run(capsys, "cache", action, "--max-bytes", "1M", bundle)[0] == 0
    status, _, err = run(capsys, "cache", "verify", "--max-bytes", "1M")
    assert (status, err.startswith("jitkern: error: cache verify: --max-bytes: ")) == (2, True)
    for bad in ("0", "-1", "plenty", "4X"):
        status, _, err = run(capsys, "cache", "import", f"--max-bytes={bad}", bundle)
        assert status == 2
        assert f"--max-bytes: '{bad}', expected bytes such as 4294967296 or 4G" in err


def test_nothing_in_a_table_steers_the_terminal(capsys: Capture, empty_cache: Path) -> None:
    cache = Cache(empty_cache)
    path = publish(cache)
    change(path, describe={"op": "\x1b[2Jgone\r", "args": ["a\nb", "\ud800"], "arch": "\x07"})
    status, out, _ = run(capsys, "cache", "list")
    assert status == 0
    assert "\\x1b[2Jgone\\r" in out
    assert "a\\nb, \\ud800" in out
    assert all(line.isprintable() for line in out.splitlines())
    ui.say("two\nlines of /tmp/:x:/[a]")
    assert capsys.readouterr().out == "two\nlines of /tmp/:x:/[a]\n"


def test_a_bad_entry_stops_no_command_but_the_export(
    capsys: Capture, empty_cache: Path, tmp_path: Path
) -> None:
    """`"describe": {"args": 5}` ended each of these in a TypeError."""
    cache = Cache(empty_cache)
    change(publish(cache), describe={"args": 5})
    publish(cache, "sound")
    for command in ("info", "list"):
        status, out, err = run(capsys, "cache", command)
        assert (status, err) == (0, "")
    assert "1 entry" in out
    status, _, err = run(capsys, "cache", "export", tmp_path / "k.jkb")
    assert status == 1
    assert "meta.json: describe: {'args': 5}, expected an object" in err
    status, out, err = run(capsys, "cache", "verify")
    assert status == 1
    assert "describe: {'args': 5}, expected an object" in out
    assert "1 damaged" in err


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
        f"jitkern: error: --replay: {recording}: its mode, 0666, lets everyone write it; if you "
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
