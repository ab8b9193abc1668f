"""The command line: what it prints, its exit status, one line and no traceback for a mistake.

Commands run in this process; one through bash shows what a user's shell sees.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from entries import change, publish
from needs import needs_nvrtc
from paths import python_path
from tiny import Use

from jitkern.cache.store import Cache
from jitkern.cli import _COMMANDS, cache, main, ui
from jitkern.ops import store
from jitkern.ops._ops import SIZES
from jitkern.version import __version__

Capture = pytest.CaptureFixture[str]

NO_NVRTC = (
    'JITKERN_NVRTC: /nowhere/libnvrtc.so is not a file; unset it, or pip install "jitkern[cuda]"'
)


pytestmark = pytest.mark.usefixtures("host_module")


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of a command in this process."""
    try:
        status = main([str(arg) for arg in argv])
    except SystemExit as stop:  # --help and --version
        status = int(stop.code or 0)
    return status, *capsys.readouterr()


def one_line(capsys: Capture, *argv: object) -> tuple[int, str]:
    """Return exit status and message of a command that fails with one line."""
    status, _, err = run(capsys, *argv)
    assert err.startswith("jitkern: error: ") and err.count("\n") == 1, err
    return status, err.removeprefix("jitkern: error: ")


@pytest.mark.parametrize("command", ["", *_COMMANDS, "cache info", "cache clear"])
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0
    assert out.partition("example:\n")[2].startswith(f"  jitkern {command}".rstrip())
    assert run(capsys, "--version") == (0, f"jitkern {__version__}\n", "")


def test_the_action_of_cache_is_optional(capsys: Capture) -> None:
    assert run(capsys, "cache", "--help")[1].startswith("usage: jitkern cache [-h] [ACTION]\n")
    assert run(capsys, "cache") == run(capsys, "cache", "info")


def test_no_command_is_the_help(capsys: Capture) -> None:
    assert run(capsys) == run(capsys, "--help")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("bench --ci", "argument COMMAND: 'bench', expected doctor, warm, cache (see: jitkern -"),
        ("wram", "'wram', expected doctor, warm, cache; did you mean warm? (see: jitkern --help)"),
        ("--versoin", "unrecognized arguments: --versoin; did you mean --version? (see: jitkern -"),
        ("cache inof", "'inof', expected info, clear; did you mean info? (see: jitkern cache --h"),
        ("doctor --jsn", "unrecognized arguments: --jsn (see: jitkern doctor --help)\n"),
        ("warm --elem 656", "unrecognized arguments: --elem"),  # not abbreviated
        (
            "warm --rowbytes=656",
            "--rowbytes=656; did you mean --row-bytes? (see: jitkern warm --help)\n",
        ),
        ("warm --row-bytes 6 --op stroe", "; did you mean store_cache?\n"),
        (
            "warm --op indexing --arch 9.0",
            "--row-bytes: not given, expected for 'indexing', such as 656\n",
        ),
        ("warm --replay no.jsonl", "warm: --replay: 'no.jsonl', expected a file\n"),
        ("warm --arch 9.0", "--arch: expected along with --row-bytes, "),
        ("warm --row-bytes 656 --arch 7.0", "--arch: '7.0', expected one of 8.0, 8.6, "),
        (
            "warm --row-bytes 1000 --format fp8 --op indexing",
            "warm: --format: fp8 fits none of the ops indexing; add store_rows or gather_rows\n",
        ),
        (
            "warm --out /dev/null/x",
            "warm: --out: /dev/null/x: cannot be written: Not a directory; ",
        ),
        ("warm --check --out x", "warm: --out: 'x', expected none: a check writes nothing\n"),
        ("warm --row-bytes 2g", "'2g', expected bytes per row, 1 or more and under 1 GiB"),
        ("warm --head-dim 256m", "'256m', expected elements per head, 1 or more and under 2**28"),
        ("warm --row-bytes abc", "'abc', expected bytes per row, such as 656,64k (see: jitkern"),
        ("warm --head-dim 64.5", "'64.5', expected elements per head, such as 64,128 (see: jitk"),
        (f"warm --row-bytes 656,{'9' * 5000}", "expected bytes per row"),
        ("cache clear --ys", "unrecognized arguments: --ys (see: jitkern cache clear --help)\n"),
        ("warm --format fp88", "; did you mean fp8? (see: jitkern warm --help)\n"),
        ("warm --row-bytes ,", "--row-bytes: ',', expected at least one"),
        ("warm --row-bytes 656 --arch 9.0,7.5", "--arch: 7.5, expected 8.0 or newer"),
        ("warm --replay /dev/null", "/dev/null"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: Capture, argv: str, message: str) -> None:
    status, text = one_line(capsys, *argv.split())
    assert message in text
    assert status == (1 if "--replay /dev/null" in argv else 2)


NO_ARCH = (
    "warm: --arch: none given, JITKERN_ARCH is not set, and there is no GPU to ask; expected one, "
    "such as 9.0\n"
)


@pytest.mark.parametrize(
    ("name", "value", "status", "message"),
    [
        ("FREEZE", "maybe", 2, "JITKERN_FREEZE: 'maybe', expected 0, 1 or warn\n"),
        ("ARCH", "99", 2, "JITKERN_ARCH: "),
        ("ARCH", "", 2, NO_ARCH),
        ("NVRTC", "/nowhere/libnvrtc.so", 1, NO_NVRTC),
        (
            "CACHE_DIR",
            "/dev/null",
            1,
            "/dev/null: cannot be written: Not a directory; set JITKERN_C",
        ),
        ("FREEZE", "1", 1, "and JITKERN_FREEZE=1 is set, which forbids to compile"),
    ],
)
@pytest.mark.usefixtures("empty_cache")
def test_a_wrong_variable_is_one_line(
    *, capsys: Capture, use: Use, name: str, value: str, status: int, message: str
) -> None:
    use(**{"ARCH": "9.0", name: value})
    # A row size of this test's own: nothing is in this process's memory.
    got, text = one_line(capsys, "warm", "--op", "store", "--row-bytes", "52429")
    assert (got, message in text) == (status, True), text


@pytest.mark.usefixtures("empty_cache")
def test_row_bytes_is_element_size_and_a_tiny_row_gets_a_note(capsys: Capture) -> None:
    """--row-bytes 2 was read as the size of a bf16 value, and 2 bytes per row were compiled."""
    warm = ("warm", "--op", "store", "--arch", "9.0", "--check")
    status, out, err = run(capsys, *warm, "--row-bytes", "52433,2", "--element-size", "16")
    assert status == 1
    assert set(re.findall(r"^jitkern_store_(\d+)B_", out, re.MULTILINE)) == {"52433", "2", "16"}
    note = "jitkern: note: --row-bytes 2, 16: bytes per row, not per value; a row of "
    assert err.startswith(note) and err.count("\n") == 2
    assert "note" not in run(capsys, *warm, "--row-bytes", "52433")[2]


@pytest.mark.usefixtures("empty_cache")
def test_a_large_head_dim_gets_a_note(capsys: Capture) -> None:
    warm = ("warm", "--arch", "9.0", "--check", "--head-dim")
    note = "jitkern: note: --head-dim 8192: elements of one head, not of all heads; "
    assert run(capsys, *warm, "4096,8192")[2].startswith(note)
    assert "note" not in run(capsys, *warm, "4096")[2]


def test_sizes_of_rows_have_suffixes() -> None:
    assert ui.sizes(SIZES[0])("656,64k,2M") == [656, 65536, 2 << 20]


@needs_nvrtc
@pytest.mark.usefixtures("empty_cache")
def test_kernels_of_a_format(capsys: Capture) -> None:
    """For both index types; the shape is that of the models."""
    warm = ("warm", "--format", "fp8_ds_mla,fp8_index_k", "--arch", "9.0")
    status, out, _ = run(capsys, *warm, "--check")
    assert status == 1
    kernels = r"^jitkern_(\w+_rows)_(fp8_ds_mla_4x128_128B|fp8_index_k_1x128)_bf16_v16_(i\d+) "
    ops, shapes = ("gather_rows", "store_rows"), ("fp8_ds_mla_4x128_128B", "fp8_index_k_1x128")
    expected = [*product(ops, shapes, ("i32", "i64"))]
    assert sorted(re.findall(kernels, out, re.M)) == expected
    status, out, _ = run(capsys, "warm", "--format", "fp8_ds_mla", "--op", "store_rows", *warm[3:])
    assert status == 0
    assert len(re.findall(r"^jitkern_store_rows_.* 9\.0 +compiled", out, re.M)) == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [("number", b"5"), ("deep", b"[" * 100_000), ("\udcff", b"{}"), ("none", None), (".", None)],
)
@pytest.mark.usefixtures("empty_cache")
def test_a_wrong_record_is_one_line_that_names_it(
    *, capsys: Capture, tmp_path: Path, name: str, content: bytes | None
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o644)  # whatever the umask
    status, text = one_line(capsys, "warm", "--replay", file)
    assert status in (1, 2)
    assert str(file).encode("ascii", "backslashreplace").decode() in text


def test_a_closed_pipe_a_full_disk_and_a_plain_terminal_are_no_traceback(tmp_path: Path) -> None:
    through = '"$@" | head -c 0; echo ${PIPESTATUS[0]}; "$@" > /dev/full; echo $?; exec "$@"'
    command = [sys.executable, "-m", "jitkern", "cache", "clear"]
    env = {**os.environ, "PYTHONPATH": python_path(), "PYTHONIOENCODING": "ascii"}
    env["JITKERN_CACHE_DIR"] = str(tmp_path / "caché")
    bash = ["bash", "-c", through, "bash", *command]
    done = subprocess.run(bash, env=env, capture_output=True, text=True, timeout=120)
    piped, full, *printed = done.stdout.splitlines()
    assert piped in "01"  # whether it was faster than head
    assert full == "1"
    assert done.stderr == "jitkern: error: No space left on device\n"
    assert printed == [f"0 entries removed from {tmp_path}/cach\\xe9"]


@pytest.mark.usefixtures("empty_cache")
def test_a_warning_is_a_note(capsys: Capture, use: Use) -> None:
    """It was Python's: a path, a line number and a line of source."""
    use(CACHEDIR="/x")
    note = "jitkern: note: JITKERN_CACHEDIR: no setting of this name, so it does nothing; "
    status, _, err = run(capsys, "cache", "info")
    assert (status, err) == (0, f"{note}did you mean JITKERN_CACHE_DIR?\n")


def test_ctrl_c_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "user_cache", stop)
    assert run(capsys, "cache", "clear") == (130, "", "jitkern: error: interrupted\n")


def sources_of(out: str) -> list[str]:
    """The sources of the kernels in warm's table."""
    return re.findall(r"\d\.\d +(compiled|cached|memo) ", out)


@needs_nvrtc
def test_kernels_are_compiled_shown_cleared_and_replayed(
    capsys: Capture, empty_cache: Path, tmp_path: Path, use: Use
) -> None:
    record = tmp_path / "run.jsonl"
    use(RECORD=str(record))
    warm = ("warm", "--row-bytes", "144", "--op", "store", "--arch", "9.0,8.0")
    status, out, err = run(capsys, *warm)
    assert (status, err, sources_of(out)) == (0, "", ["compiled"] * 4)  # of two index types
    assert out.splitlines()[-1].endswith(f", in {empty_cache}") and "\x1b" not in out
    use(RECORD="")
    store.kernel.cache_clear()
    assert sources_of(run(capsys, *warm)[1]) == ["cached"] * 4
    entries = len(Cache(empty_cache).entries())
    assert f"{empty_cache}: {entries} entries, " in run(capsys, "cache")[1]
    said = f"{entries} entries removed from {empty_cache}\n"
    assert run(capsys, "cache", "clear") == (0, said, "")
    store.kernel.cache_clear()
    out_dir = tmp_path / "carried"
    status, out, err = run(capsys, "warm", "--replay", record, "--arch", "9.0", "--out", out_dir)
    assert (status, err, sources_of(out)) == (0, "", ["compiled"] * 2)
    assert out.splitlines()[-1].endswith(f"JITKERN_CACHE_PATH={out_dir}")


def test_a_folder_of_the_path_that_does_not_exist(capsys: Capture, use: Use) -> None:
    use(CACHE_PATH="/nowhere")
    assert " /nowhere: no such directory; make it, or take it out" in run(capsys, "cache")[1]


def test_a_cache_that_others_may_write(capsys: Capture, empty_cache: Path) -> None:
    path = publish(Cache(empty_cache))
    empty_cache.chmod(0o777)
    reason = f"{empty_cache}: its mode, 0777, lets others write it; chmod -R"
    assert f"not searched: {reason}" in run(capsys, "cache", "info")[1]
    status, text = one_line(capsys, "cache", "clear")
    assert status == 1 and text.startswith(reason)
    assert path.exists()


def test_a_bad_entry_stops_no_command(capsys: Capture, empty_cache: Path) -> None:
    """`"describe": {"args": 5}` ended each in a TypeError."""
    change(publish(Cache(empty_cache)), describe={"args": 5})
    status, out, err = run(capsys, "cache", "info")
    assert (status, err, ": 0 entries" in out) == (0, "", True)
    assert run(capsys, "cache", "clear")[1] == f"1 entry removed from {empty_cache}\n"


def test_nothing_in_a_table_steers_the_terminal(capsys: Capture) -> None:
    ui.say(ui.table(("a", ">b"), [("\x1b[2Jgone\r", "\ud800"), ("", "12345678")]))
    out = capsys.readouterr().out
    assert "\\x1b[2Jgone\\r    \\ud800" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_without_torch_one_line_says_what_to_install(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # its import is an ImportError then
    status, text = one_line(capsys, "warm", "--row-bytes", "656")
    assert status == 1
    assert re.fullmatch(r"torch: import of torch .*; pip install torch\n", text)
