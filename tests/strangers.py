"""Other users of the machine, and what they plant: for tests that run as root."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MALLORY = 54321  # a uid that no machine has a user of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Run `act` in a child process of user `uid`."""

    def run() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        act()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0  # it has printed its traceback


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory like /tmp, in which everybody may write: pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="jitkern-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
