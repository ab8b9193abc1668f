"""What a process writes about its loads: freeze, JITKERN_RECORD, the log."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import needs_nvrtc
from paths import TESTS, python_path
from tiny import SM_90, Use, put, tiny, write_lines

import jitkern
import jitkern.ops.store
from jitkern import fs
from jitkern.cache import get
from jitkern.cache.get import freeze, unfreeze
from jitkern.compilers.sources import CSRC
from jitkern.errors import FrozenError
from jitkern.fs import write_whole
from jitkern.jit.record import read_record

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


@needs_nvrtc
def test_frozen_misses_name_what_to_warm(folder: Path, use: Use) -> None:
    kept = tiny().image(SM_90)
    freeze()
    assert tiny().image(SM_90) == kept
    with pytest.raises(FrozenError, match=r"tiny_5-.*jitkern warm --replay FILE --arch 9\.0"):
        tiny(5).image(SM_90)
    store = jitkern.ops.store.kernel(4304, 16, 4)  # which no other test has in this process
    with pytest.raises(FrozenError, match=r"^store_4304_.* warm --replay FILE --arch 9\.0$"):
        store.image(SM_90)
    unfreeze()
    assert tiny(5).image(SM_90)
    get._frozen = ""
    use(FREEZE="1")
    with pytest.raises(FrozenError):
        tiny(6).image(SM_90)
    unfreeze()  # goes before the environment
    assert tiny(6).image(SM_90)


@needs_nvrtc
@pytest.mark.parametrize("by", ["the call", "the environment"])
def test_frozen_to_warn_compiles_with_a_warning(
    folder: Path, empty_cache: Path, use: Use, by: str
) -> None:
    if by == "the call":
        freeze(mode="warn")
    else:
        use(FREEZE="warn")
    shipped = Path(jitkern.__file__).parent / "_prebuilt"
    with pytest.warns(RuntimeWarning) as caught:
        assert tiny(5).image(SM_90)
    (warning,) = caught
    key = tiny(5)._key(SM_90)
    (variant,) = (path.name for path in (empty_cache / "v1" / str(key)).iterdir())
    assert str(warning.message) == (
        f"jitkern: {key}/{variant}: not found in {empty_cache}, {shipped}, and jitkern is frozen "
        "to warn: it is compiled now; record a run with JITKERN_RECORD=FILE and build it "
        "beforehand with: jitkern warm --replay FILE --arch 9.0"
    )


def test_an_unknown_mode_freezes_nothing() -> None:
    with pytest.raises(ValueError) as raised:
        freeze("sometimes")  # type: ignore[arg-type]
    assert str(raised.value) == "freeze: mode: 'sometimes', expected 'raise' or 'warn'"
    assert get._freeze_mode() is None


def names_in(file: Path) -> list[str]:
    return [json.loads(line)["args"][0] for line in file.read_bytes().splitlines()]


def test_a_record_names_each_specialisation_once(tmp_path: Path) -> None:
    file = tmp_path / "used.jsonl"
    for name in ("one", "two", "one"):
        put(file, name, tmp_path / "src" / "a.cc", CSRC / "ops" / "store.cc")
    assert names_in(file) == ["one", "two"]
    options = json.loads(file.read_bytes().splitlines()[0])["options"]
    assert options["cpp_files"] == ["src/a.cc", "jitkern:ops/store.cc"]
    file.chmod(0o600)
    (tmp_path / "moved").mkdir()
    moved = file.rename(tmp_path / "moved" / file.name)
    files = [str(tmp_path / "moved" / "src" / "a.cc"), "jitkern:ops/store.cc"]
    assert [used.options["cpp_files"] for used in read_record(moved)] == [files, files]


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    """A writer that was killed; the next one's first line was part of it."""
    file = tmp_path / "used.jsonl"
    file.write_bytes(b'{"torn": ')
    put(file, "tiny")
    torn, line, rest = file.read_bytes().split(b"\n")
    assert (torn, rest) == (b'{"torn": ', b"")
    assert json.loads(line)["args"] == ["tiny"]


@needs_nvrtc
def test_log_has_one_line_per_lookup(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jitkern"):
        tiny().image(SM_90)
        tiny().image(SM_90)
    first, second = caplog.messages
    assert re.match(r"jitkern: tiny_4-\w+/nvrtc-[\d.]+ for 9\.0: compiled, [\d.]+ ms \(/", first)
    assert ": cached, " in second


@needs_nvrtc
def test_log_goes_to_stderr_where_nobody_configured_logging(
    folder: Path, forked_python: Fresh
) -> None:
    env = {"JITKERN_LOG": "1", "PYTHONPATH": python_path(TESTS)}
    code = "from tiny import SM_90, tiny; tiny().image(SM_90)"
    assert "compiled" in forked_python(code, env=env).stderr


def test_private_names_cannot_be_guessed() -> None:
    names = {fs.private_name() for _ in range(100)}
    assert len({name[-16:] for name in names}) == 100
    assert {name[:-17] for name in names} == {f"{os.uname().nodename}.{os.getpid()}"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_write_what_is_written(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "plain", b"x")
        put(tmp_path / "used.jsonl", "tiny")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"plain": 0o644 & ~umask, "used.jsonl": 0o644 & ~umask}


def test_a_file_is_replaced_and_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has it open, or mapped, keeps what it had; a failure leaves the old one."""
    file = tmp_path / "lib.so"
    write_whole(file, b"old")
    with open(file, "rb") as opened:
        write_whole(file, b"new")
        assert (opened.read(), file.read_bytes()) == (b"old", b"new")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"other")
    assert (file.read_bytes(), os.listdir(tmp_path)) == (b"new", ["lib.so"])


def test_a_record_makes_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "typo" / "used.jsonl"
    put(file, "tiny")
    text = f"jitkern: JITKERN_RECORD: cannot write {file}: No such file or directory"
    assert caplog.messages == [text] and not file.parent.exists()


ON_CPU = """
import torch, jitkern
jitkern.indexing(torch.zeros(4, 4), torch.tensor([1]))
"""


def test_a_run_on_the_cpu_says_that_nothing_was_recorded(
    forked_python: Fresh, tmp_path: Path
) -> None:
    file = tmp_path / "used.jsonl"
    said = forked_python(ON_CPU, env={"JITKERN_RECORD": str(file)}).stderr
    assert said.endswith(f"{file}: nothing was recorded: calls on the CPU need no kernels\n")


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a symbolic link, which is not followed here": Path.symlink_to,
    "not a regular file": lambda file, victim: os.mkfifo(file),
}


@pytest.mark.parametrize("reason", PLANTED)
def test_a_record_is_not_written_into_what_is_planted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    victim, file = tmp_path / "victim", tmp_path / "used.jsonl"
    victim.write_text("months of work")
    PLANTED[reason](file, victim)
    put(file, "tiny")
    assert caplog.messages == [f"jitkern: JITKERN_RECORD: cannot write {file}: {reason}"]
    assert victim.read_text() == "months of work"


LINE: dict[str, Any] = {
    "record": 3,
    "function": "load_jit",
    "args": ["a"],
    "options": {"device_files": ["src/a.cu"]},
    "arch": "9.0",
}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (5, ""),
        ({}, "record: None, expected 3"),
        ({**LINE, "record": 2}, "record: 2, expected 3"),
        ({**LINE, "function": "exec"}, "expected load_jit or load_aot"),
        ({**LINE, "args": []}, ""),
        ({**LINE, "args": [5]}, "expected load_jit or load_aot, and strings"),
        ({**LINE, "options": 5}, ""),
        ({**LINE, "options": {"cpp_files": "a.cc"}}, "cpp_files: expected a list"),
        ({**LINE, "options": {"cpp_files": [5]}}, ""),
        ({**LINE, "function": "\x1b" * 600}, ""),
    ],
)
def test_lines_that_are_no_specialisation(tmp_path: Path, line: object, says: str) -> None:
    file = write_lines(tmp_path / "used.jsonl", LINE, line)
    with pytest.raises(ValueError) as caught:
        read_record(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:2: not a recorded specialisation: ")
    assert says in message and message.isprintable() and len(message) < 500


def test_a_record_that_others_could_have_written(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "used.jsonl", LINE)
    file.chmod(0o666)
    text = f"^{file}: its mode, 0666, lets others write it; it is code: replay a copy of your own$"
    with pytest.raises(ValueError, match=text):
        read_record(file)


def test_files_that_are_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"jsonl: nothing is recorded in it; record a run wit"):
        read_record(write_lines(tmp_path / "used.jsonl"))
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_record(file)
