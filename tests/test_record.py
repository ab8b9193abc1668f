"""What a process writes about its loads: freeze, JITKERN_RECORD, JITKERN_LOG."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import MALLORY, as_user, needs_root
from needs import needs_nvrtc
from paths import TESTS, python_path
from tiny import SM_90, Use, put, tiny

import jitkern.ops.store
from jitkern import fs
from jitkern.cache import get
from jitkern.cache.get import freeze, unfreeze
from jitkern.errors import FrozenError
from jitkern.fs import write_whole
from jitkern.jit import record
from jitkern.jit.record import replay

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


@needs_nvrtc
def test_frozen_misses_name_what_to_warm(folder: Path, use: Use) -> None:
    kept = tiny().image(SM_90)
    freeze()
    assert tiny().image(SM_90) == kept
    with pytest.raises(FrozenError, match=r"tiny_5-.*jitkern warm --replay FILE --arch 9\.0"):
        tiny(5).image(SM_90)
    store = jitkern.ops.store.kernel(4304, 16, 4)  # which no other test has in this process
    with pytest.raises(FrozenError, match=r"warm --op store --element-size 4304 --arch 9\.0$"):
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
def test_what_is_recorded_is_what_was_compiled(
    folder: Path, tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    """Sources were read when the record was written: another text, or none any more."""
    file = tmp_path / "used.jsonl"
    use(RECORD=file)
    module = tiny()
    compiled = (folder / "tiny.cu").read_bytes()
    (folder / "tiny.cu").write_text("// edited\n")
    (folder / "half.cuh").unlink()
    module.image(SM_90)
    assert caplog.messages == []
    (one,) = replay(file)
    assert sorted(one.files) == ["./half.cuh", "./tiny.cu"]
    assert one.texts[one.files["./tiny.cu"]] == compiled


def write_headers(folder: Path, count: int, lines: int = 1) -> list[Path]:
    made = [folder / f"{number}.h" for number in range(count)]
    for file in made:
        file.write_text(f"// {file.name}\n" * lines)
    return made


def kinds_of(file: Path) -> list[str]:
    """Name of each specialisation, and first line of each text."""
    values = map(json.loads, file.read_bytes().splitlines())
    return sorted(v["text"].splitlines()[0] if "text" in v else v["args"][0] for v in values)


RANK = """
import sys
from pathlib import Path
from tiny import put
folder = Path(sys.argv[1])
headers = sorted(folder.glob("*.h"))
(folder / f"{sys.argv[2]}.ready").touch()
while len(list(folder.glob("*.ready"))) < 2:
    pass
for name in ("all", sys.argv[2]):
    put(folder / "used.jsonl", name, *headers)
"""


def test_ranks_that_record_at_once_write_each_text_once(
    tmp_path: Path, forked_python: Fresh
) -> None:
    """Each had looked before the others wrote: eight times 15 MB, more than replay takes."""
    write_headers(tmp_path, 40, lines=10_000)

    def start(name: str) -> None:
        forked_python(RANK, str(tmp_path), name, env={"PYTHONPATH": python_path(TESTS)})

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(start, ("rank0", "rank1")))
    file = tmp_path / "used.jsonl"
    texts = [f"// {number}.h" for number in range(40)]
    assert kinds_of(file) == sorted(["all", "rank0", "rank1", *texts])
    file.chmod(0o600)
    assert {one.used.args[0] for one in replay(file)} == {"all", "rank0", "rank1"}


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is there, by whoever, is not written again."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    for name in ("one", "two", "one"):
        put(tmp_path / "used.jsonl", name, *write_headers(tmp_path, 1))
    assert kinds_of(tmp_path / "used.jsonl") == ["// 0.h", "one", "two"]


def test_who_holds_the_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped while it recorded stopped all others."""
    monkeypatch.setenv("JITKERN_LOCK_TIMEOUT_S", "0.05")
    file = tmp_path / "used.jsonl"
    with file.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        put(file, "tiny")
    assert kinds_of(file) == ["tiny"]


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    """A writer that was killed; the next one's first line was part of it."""
    file = tmp_path / "used.jsonl"
    file.write_bytes(b'{"torn": ')
    put(file, "tiny")
    torn, line, rest = file.read_bytes().split(b"\n")
    assert (torn, rest) == (b'{"torn": ', b"")
    assert json.loads(line)["args"] == ["tiny"]


def test_what_cannot_be_recorded_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A record that grows too large, a full disk; the next is written."""
    file = tmp_path / "used.jsonl"
    headers = write_headers(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(record, "MAX_BYTES", 320)
        put(file, "fits", *headers)
        put(file, "large", *headers)
    with monkeypatch.context() as patch:
        patch.setattr(record.os, "write", lambda descriptor, data: 7)
        put(file, "full", *headers)
    put(file, "last", *headers)
    large, full = caplog.messages
    assert large.endswith("used.jsonl: it would have more than 320 bytes, large<> left out")
    assert re.search(r"used.jsonl: 7 of \d+ bytes written, the disk is full$", full)
    file.chmod(0o600)
    assert [one.used.args[0] for one in replay(file)] == ["fits", "last"]


@needs_nvrtc
def test_log_has_one_line_per_lookup(
    folder: Path, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    use(LOG="1")
    with caplog.at_level(logging.INFO, logger="jitkern"):
        tiny().image(SM_90)
        tiny().image(SM_90)
    first, second = caplog.messages
    assert first.startswith("jitkern: tiny_4-") and ": compiled, " in first
    assert ": cached, " in second and " ms (" in second


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


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a symbolic link, which is not followed here": Path.symlink_to,
    "a file of 2 names, expected one": Path.hardlink_to,
    "not a regular file": lambda file, victim: os.mkfifo(file),
    f"belongs to uid {MALLORY}": lambda file, victim: (file.touch(), os.chown(file, MALLORY, -1)),
}


@pytest.mark.parametrize("reason", PLANTED)
def test_a_record_is_not_written_into_what_is_planted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    if "uid" in reason and os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    victim, file = tmp_path / "victim", tmp_path / "used.jsonl"
    victim.write_text("months of work")
    PLANTED[reason](file, victim)
    put(file, "tiny")
    assert caplog.messages == [f"jitkern: JITKERN_RECORD: cannot write {file}: {reason}"]
    assert victim.read_text() == "months of work"


@needs_root
def test_a_user_may_record_into_a_file_that_root_has_made(open_place: Path) -> None:
    file = open_place / "used.jsonl"
    file.touch()
    file.chmod(0o666)
    open_place.chmod(0o755)  # in a directory like /tmp the kernel itself would refuse
    as_user(MALLORY, lambda: put(file, "tiny"))
    assert [str(one.used) for one in replay(file, trust=True)] == ["tiny<>"]
