"""Files that jitkern writes under names that somebody has planted a link, a FIFO or a file at."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers import MALLORY, as_user, needs_root

from jitkern import fs
from jitkern.fs import write_whole
from jitkern.jit.record import Specialisation, record, replay

USED = Specialisation("load_jit", ("tiny", "4"), {}, "9.0")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text("months of work")
    return file


# -- whole files -----------------------------------------------------------------------------------


def test_private_names_cannot_be_guessed() -> None:
    names = {fs.private_name() for _ in range(100)}
    assert len({name[-16:] for name in names}) == 100
    assert {name[:-17] for name in names} == {f"{os.uname().nodename}.{os.getpid()}"}


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_nobody_else_may_write_what_is_written(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "plain", b"x")
        record(USED, [], tmp_path / "used.jsonl")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"plain": 0o644 & ~umask, "used.jsonl": 0o644 & ~umask}


# -- JITKERN_RECORD --------------------------------------------------------------------------------


def recorded(file: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What is said aloud when `USED` is recorded into `file`."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="jitkern"):
        record(USED, [], file)
    return "\n".join(line.getMessage() for line in caplog.records)


PLANTS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "link": (lambda file, victim: file.symlink_to(victim), "a symbolic link, which is not foll"),
    "hard link": (lambda file, victim: os.link(victim, file), "a file of 2 names, expected one"),
    "fifo": (lambda file, victim: os.mkfifo(file), "not a regular file|No such device"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_record_is_written_into_no_file_that_was_planted(
    tmp_path: Path, victim: Path, caplog: pytest.LogCaptureFixture, plant: str
) -> None:
    file = tmp_path / "used.jsonl"
    make, reason = PLANTS[plant]
    make(file, victim)
    said = recorded(file, caplog)
    assert re.match(f"jitkern: JITKERN_RECORD: cannot write {file}.*({reason})", said), said
    assert victim.read_text() == "months of work"


@needs_root
def test_a_record_is_not_written_into_somebody_elses_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "used.jsonl"
    file.touch()
    os.chown(file, MALLORY, MALLORY)
    assert recorded(file, caplog).endswith(f"used.jsonl: belongs to uid {MALLORY}")
    assert file.read_bytes() == b""


@needs_root
def test_a_user_may_record_into_a_file_that_root_has_made(
    open_place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = open_place / "used.jsonl"
    file.touch()
    file.chmod(0o666)
    open_place.chmod(0o755)  # in a directory like /tmp the kernel itself would refuse
    as_user(MALLORY, lambda: record(USED, [], file))
    assert [str(one.used) for one in replay(file, trust=True)] == ["tiny<4> for 9.0"]


def test_a_record_of_no_text_is_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "used.jsonl"
    file.write_bytes(b"\xff\xfe\n")
    record(USED, [], file)
    assert file.read_bytes() == b"\xff\xfe\n" + USED.to_json(files={}).encode() + b"\n"
