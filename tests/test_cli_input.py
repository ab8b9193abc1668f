"""No command answers input with a traceback, whatever it is; a bug of jitkern's own shows one."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import python_path

from jitkern.cli import cache_cmd, main, ui
from jitkern.env import settings
from jitkern.ops._ops import SIZES

ROOT = Path(__file__).resolve().parent.parent
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    status = main([str(arg) for arg in argv])
    return status, *capsys.readouterr()


def child(
    *argv: str, through: str = '"$@"', check_stderr: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in bash, where `through` says what becomes of its output."""
    command = ["bash", "-c", through, "bash", sys.executable, "-m", "jitkern", *argv]
    merged = {**os.environ, "PYTHONPATH": python_path(), **env}
    return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("text", "sizes"), [("656", [656]), ("64k,1K", [65536, 1024]), ("2M", [2 << 20])]
)
def test_sizes_of_rows_have_suffixes(text: str, sizes: list[int]) -> None:
    assert ui.sizes(SIZES[0])(text) == sizes


# ------------------------------------------------------------------------------------ usage errors


@pytest.mark.parametrize(
    ("argv", "says", "see"),
    [
        ("--frob", "the following arguments are required: COMMAND", "jitkern"),
        ("cache", "the following arguments are required: ACTION", "jitkern cache"),
        ("cache list --frob", "unrecognized arguments: --frob", "jitkern cache list"),
        ("cache list frob", "unrecognized arguments: frob", "jitkern cache list"),
        ("cache clear --down-to x", None, "jitkern cache clear"),
        ("cache export", "the following arguments are required: FILE", "jitkern cache export"),
        ("cache import a b", "unrecognized arguments: b", "jitkern cache import"),
        ("doctor --frob", "unrecognized arguments: --frob", "jitkern doctor"),
        ("demo now", "unrecognized arguments: now", "jitkern demo"),
        (
            "warm --op store",
            "warm: --op: 'store', expected along with --element-size, bytes of a row",
            "jitkern warm",
        ),
        ("bench --ci --update", "bench: --update: needs --baseline PATH", "jitkern bench"),
        ("bench --ci --gate no", None, "jitkern bench"),
        ("completion fish", None, "jitkern completion"),
    ],
)
def test_a_usage_error_points_to_the_help_of_its_command(
    capsys: Capture, argv: str, says: str | None, see: str
) -> None:
    status, out, err = run(capsys, *argv.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.endswith(f" (see: {see} --help)\n")
    if says is not None:
        assert err == f"jitkern: error: {says} (see: {see} --help)\n"
    with pytest.raises(SystemExit) as stop:
        main([*see.split()[1:], "--help"])
    assert stop.value.code == 0


def test_a_bad_variable_points_to_no_help(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITKERN_FREEZE", "maybe")
    settings.cache_clear()
    said = "jitkern: error: JITKERN_FREEZE: 'maybe', expected 0, 1 or warn\n"
    assert run(capsys, "cache", "list") == (2, "", said)
    monkeypatch.undo()
    settings.cache_clear()


# --------------------------------------------------------------------------------------- odd files

BINARY = bytes(range(256)) * 50
FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": BINARY,
    "utf16": "{}".encode("utf-16"),
    "gzip": gzip.compress(BINARY),
    "cut.gz": gzip.compress(BINARY)[:40],
    "number": b"5",
    "list": b"[]",
    "object": b"{}",
    "deep": b"[" * 100_000,
    "a\nline": b"{}",
    "\udcff": b"{}",
}
READERS = ["cache import", "cache verify", "warm --replay"]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "odd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def one_line(capsys: Capture, *argv: object) -> str:
    status, _, err = run(capsys, *argv)
    assert status in (1, 2)
    assert err.startswith("jitkern: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("reader", READERS)
def test_a_wrong_file_is_one_line(
    capsys: Capture, empty_cache: Path, odd: Path, reader: str, name: str
) -> None:
    if (reader, name) == ("warm --replay", "empty"):
        pytest.skip("a recording of nothing")
    file = odd / name
    file.write_bytes(FILES[name])
    file.chmod(0o644)
    shown = "odd/a line" if "\n" in name else f"odd/{name}".encode("unicode_escape").decode()
    err = one_line(capsys, *reader.split(), file)
    assert "odd/" in err
    assert shown.split("\\u")[0] in err or repr(name)[1:-1] in err


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", [".", "none", "folder/none", "file/none", "/dev/null", "x" * 300])
def test_what_is_no_file_is_one_line(
    capsys: Capture, empty_cache: Path, odd: Path, reader: str, name: str
) -> None:
    (odd / "file").touch()
    assert name[:20] in one_line(capsys, *reader.split(), name)


def test_only_what_is_wrong_with_a_record_is_said_of_replay(
    capsys: Capture, empty_cache: Path, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise ValueError("no such rows")

    monkeypatch.setattr("jitkern.warming.op_jobs", wrong)
    status, _, err = run(capsys, "warm", "--element-size", "656", "--arch", "9.0", "--check")
    assert (status, "--replay" in err, "ValueError: no such rows" in err) == (1, False, True)
    (odd / "r.jsonl").write_text("{}")
    (odd / "r.jsonl").chmod(0o600)  # whatever the umask
    err = one_line(capsys, "warm", "--replay", "r.jsonl")
    assert err.startswith("jitkern: error: --replay: r.jsonl:1: ")


@pytest.mark.parametrize("cxx", ["'", 'g++ "-O2'])
def test_an_open_quote_in_cxx(
    capsys: Capture, session_cache: Path, monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    settings.cache_clear()
    out = run(capsys, "doctor", "--json")[1]
    monkeypatch.undo()
    settings.cache_clear()
    (check,) = (check for check in json.loads(out)["checks"] if check["what"] == "c++")
    assert check["found"].startswith(f"CXX: {cxx!r}: No closing quotation")
    assert check["fix"] == "install g++ (apt install g++), or set CXX to a C++ compiler"


# ----------------------------------------------------------------------------------------- streams


def test_nobody_reads_on(empty_cache: Path) -> None:
    done = child("cache", "list", through='"$@" | head -c 0; echo ${PIPESTATUS[0]}')
    assert done.stdout in ("0\n", "1\n")  # whether it was faster than head
    assert done.stderr == ""


def test_a_full_disk(empty_cache: Path) -> None:
    done = child("cache", "list", "--json", through='"$@" > /dev/full')
    assert (done.returncode, done.stderr) == (1, "jitkern: error: No space left on device\n")


@pytest.mark.parametrize("through", ['"$@" >&-', '"$@" 2>&-', '"$@" >&- 2>&-'])
def test_a_closed_stream(empty_cache: Path, through: str) -> None:
    done = child("cache", "list", through=through)
    shown = "" if through.startswith('"$@" >') else f"0 entries, 0 B in {empty_cache}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


def test_a_terminal_without_the_letters(tmp_path: Path) -> None:
    place = tmp_path / "caché"
    done = child("cache", "list", PYTHONIOENCODING="ascii", JITKERN_CACHE_DIR=str(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"0 entries, 0 B in {tmp_path}/cach\\xe9\n"


def test_ctrl_c(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_cmd, "_user_cache", interrupted)
    assert run(capsys, "cache", "list") == (130, "", "jitkern: error: interrupted\n")


def test_a_bug_shows_where_it_is_and_whom_to_tell(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong() -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr(cache_cmd, "_user_cache", wrong)
    status, out, err = run(capsys, "cache", "list")
    assert (status, out) == (1, "")
    *trace, error, advice = err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert error == "LookupError: no such thing"
    assert advice == (
        "jitkern: this is a bug of jitkern's: please report it to its maintainers, with all of the "
        "lines above, the command, and what jitkern doctor prints"
    )
