"""Other users of the machine, and what they plant: for tests that run as root."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MALLORY = 54321  # a uid that no machine has a user of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


def as_user(uid: int, act: Callable[[], object]) -> str:
    """Run `act` in a child process of user `uid`; return what it returns, as text."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                text = str(act())
                status = 0
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(write_end, text.encode())
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text
    return text


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory like /tmp, in which everybody may write: pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="jitkern-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
