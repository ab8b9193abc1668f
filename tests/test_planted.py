"""Files that jitkern writes under names that somebody has planted a link, a FIFO or a file at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers import MALLORY, as_user, needs_root
from tiny import put

from jitkern import fs
from jitkern.fs import write_whole
from jitkern.jit.record import replay


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
