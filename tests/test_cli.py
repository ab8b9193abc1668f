"""The command line: what it prints, its exit status, one line and no traceback for a mistake.

Commands run in this process; two through bash show what a user's shell sees.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import needs_nvrtc
from paths import python_path
from tiny import Use

from jitkern.cache.store import Cache
from jitkern.cli import _COMMANDS, cache_cmd, main, ui
from jitkern.ops import store
from jitkern.ops._ops import SIZES

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]
Capture = pytest.CaptureFixture[str]

NO_NVRTC = (
    'JITKERN_NVRTC: /nowhere/libnvrtc.so is not a file; unset it, or pip install "jitkern[cuda]"'
)


pytestmark = pytest.mark.usefixtures("host_module")


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command, in this process."""
    try:
        status = main([str(arg) for arg in argv])
    except SystemExit as stop:  # --help and --version
        status = int(stop.code or 0)
    return status, *capsys.readouterr()


def one_line(capsys: Capture, *argv: object) -> tuple[int, str]:
    """Exit status and the message of a command that fails with one line."""
    status, _, err = run(capsys, *argv)
    assert err.startswith("jitkern: error: ") and err.count("\n") == 1, err
    return status, err.removeprefix("jitkern: error: ")


@pytest.mark.parametrize(
    "command", ["", *_COMMANDS, *(f"cache {name}" for name in ("list", "clear"))]
)
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0
    assert out.partition("example:\n")[2].startswith(f"  jitkern {command}".rstrip())
    if command == "warm":
        assert "only what you would" in " ".join(out.split())  # a record is code


@pytest.mark.parametrize(
    ("argv", "message", "see"),
    [
        ("", "required: COMMAND", ""),
        ("bnech --ci", "did you mean bench?", ""),
        ("cache", "required: ACTION", "cache"),
        ("cache lst", "did you mean list?", "cache"),
        ("cache list --jsn", "--jsn, did you mean --json?", "cache list"),
        ("cache clear --unused-for x", "--unused-for: 'x'", "cache clear"),
        ("cache list a b", "unrecognized arguments: a b", "cache list"),
        ("warm --op merge --element-size 6", "expected along with --head-dim, elem", "warm"),
        ("warm --arch 9.0", "--arch: expected along with --element-size", "warm"),
        ("warm --check --out x", "--out: given along with check", "warm"),
        ("warm --element-size 1073741824", "1 to 1073741823", "warm"),
        (f"warm --element-size 656,{'9' * 5000}", "expected bytes of a row", "warm"),
        ("warm --head-dim 64,0", "'0', expected elements of a head", "warm"),
        ("warm --element-size ,", "--element-size", "warm"),
        ("warm --element-size 656 --arch 9.0,x", "--arch: 'x', expected one of", "warm"),
        ("warm --element-size 656 --arch 9.0 --op frob", "--op: 'frob'", "warm"),
        ("warm --jobs 0", "--jobs: 0, expected 1 or more", "warm"),
        ("bench store", "required: --ci", "bench"),
        ("warm --elem 656", "--elem 656, did you mean --element-size?", "warm"),  # not abbreviated
    ],
)
def test_a_wrong_command_line_is_one_line_that_points_to_help(
    capsys: Capture, argv: str, message: str, see: str
) -> None:
    status, text = one_line(capsys, *argv.split())
    assert (status, message in text) == (2, True), text
    assert text.endswith(f" (see: {f'jitkern {see}'.strip()} --help)\n")


@pytest.mark.parametrize(
    ("name", "value", "status", "message"),
    [
        ("FREEZE", "maybe", 2, "JITKERN_FREEZE: 'maybe', expected 0, 1 or warn\n"),
        ("ARCH", "99", 2, "JITKERN_ARCH: "),
        ("ARCH", "", 2, "--arch: none is given, JITKERN_ARCH is not set, and there is no GPU"),
        ("NVRTC", "/nowhere/libnvrtc.so", 1, NO_NVRTC),
        ("CACHE_DIR", "/proc/version/cache", 1, "/proc/version/cache: cannot be written"),
        ("FREEZE", "1", 1, "and JITKERN_FREEZE=1 is set, which forbids to compile"),
    ],
)
@pytest.mark.usefixtures("empty_cache")
def test_a_wrong_variable_is_one_line(
    *, capsys: Capture, use: Use, name: str, value: str, status: int, message: str
) -> None:
    use(**{"ARCH": "9.0", name: value})
    # A row size of this test's own: nothing is in this process's memory.
    got, text = one_line(capsys, "warm", "--op", "store", "--element-size", "52429")
    assert (got, message in text) == (status, True), text


def test_sizes_of_rows_have_suffixes() -> None:
    assert ui.sizes(SIZES[0])("656,64k,2M") == [656, 65536, 2 << 20]


BINARY = bytes(range(256)) * 50
FILES: dict[str, bytes | None] = {
    "binary": BINARY,
    "cut.gz": gzip.compress(BINARY)[:40],
    "number": b"5",
    "deep": b"[" * 100_000,
    "a\nline": b"{}",
    "\udcff": b"{}",
    "none": None,
    ".": None,
    "/dev/null": None,
    "x" * 300: None,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("empty_cache")
def test_a_wrong_file_is_one_line_that_names_it(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = FILES[name]
    if content is not None:
        Path(name).write_bytes(content)
        Path(name).chmod(0o644)  # whatever the umask
    status, text = one_line(capsys, "warm", "--replay", name)
    assert status == 1
    assert name[:20].replace("\n", " ").encode("ascii", "backslashreplace").decode() in text or (
        repr(name)[1:-1] in text
    )


def shell(*argv: str, through: str = '"$@"', **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in bash, where `through` says what becomes of its output."""
    command = ["bash", "-c", through, "bash", sys.executable, "-m", "jitkern", *argv]
    merged = {**os.environ, "PYTHONPATH": python_path(), **env}
    return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=120)


def test_a_closed_pipe_a_full_disk_and_a_plain_terminal_are_no_traceback(tmp_path: Path) -> None:
    place = tmp_path / "caché"
    through = '"$@" | head -c 0; echo ${PIPESTATUS[0]}; "$@" --json > /dev/full; echo $?; exec "$@"'
    env = {"PYTHONIOENCODING": "ascii", "JITKERN_CACHE_DIR": str(place)}
    done = shell("cache", "list", through=through, **env)
    piped, full, *printed = done.stdout.splitlines()
    assert piped in "01"  # whether it was faster than head
    assert full == "1"
    assert done.stderr == "jitkern: error: No space left on device\n"
    assert printed == [f"0 entries, 0 B in {tmp_path}/cach\\xe9"]


def test_ctrl_c_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_cmd, "user_cache", stop)
    assert run(capsys, "cache", "list") == (130, "", "jitkern: error: interrupted\n")


def sources_of(out: str) -> list[str]:
    """The sources of the kernels in warm's table."""
    return re.findall(r"\d\.\d +(compiled|cached|memo) ", out)


@needs_nvrtc
def test_kernels_go_there_and_back(
    capsys: Capture, empty_cache: Path, tmp_path: Path, use: Use
) -> None:
    """Compiled, listed, carried elsewhere by tar, cleared, found there, and replayed."""
    record = tmp_path / "run.jsonl"
    use(RECORD=str(record))
    warm = ("warm", "--element-size", "144", "--op", "store", "--arch", "9.0,8.0", "--jobs", "2")
    status, out, err = run(capsys, *warm)
    assert (status, err, sources_of(out)) == (0, "", ["compiled"] * 4)  # of two index types
    assert out.splitlines()[-1].endswith(f"2 at a time, in {empty_cache}") and "\x1b" not in out
    assert len(Cache(empty_cache).entries()) >= 4
    use(RECORD="")
    listed = run(capsys, "cache", "list")[1]
    assert len(re.findall(r"^store +144, ", listed, re.MULTILINE)) == 4
    subprocess.run(["tar", "-C", empty_cache, "-cf", tmp_path / "kernels.tar", "v1"], check=True)
    assert "removed" in run(capsys, "cache", "clear")[1]
    assert run(capsys, "cache", "list")[1].startswith("0 entries")
    (tmp_path / "kernels").mkdir(mode=0o755)
    unpack = ["tar", "-C", tmp_path / "kernels", "-xf", tmp_path / "kernels.tar"]
    subprocess.run(unpack, check=True)
    use(CACHE_PATH=tmp_path / "kernels")
    assert str(tmp_path / "kernels") in run(capsys, "cache", "info")[1]
    store.kernel.cache_clear()
    assert sources_of(run(capsys, *warm)[1]) == ["cached"] * 4
    store.kernel.cache_clear()
    out_dir = tmp_path / "carried"
    status, out, err = run(capsys, "warm", "--replay", record, "--arch", "9.0", "--out", out_dir)
    assert (status, err, sources_of(out)) == (0, "", ["cached"] * 2)
    assert out.splitlines()[-1].endswith(f"JITKERN_CACHE_PATH={out_dir}")


@pytest.mark.parametrize("command", ["bench --ci", "warm --element-size 656"])
def test_without_torch_one_line_says_what_to_install(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # its import is an ImportError then
    status, text = one_line(capsys, *command.split())
    assert status == 1
    assert re.fullmatch(r"torch: import of torch .*; pip install torch\n", text)
