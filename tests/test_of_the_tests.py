"""A run of the tests leaves nothing in the temporary folder."""

from __future__ import annotations

import signal
from pathlib import Path

import forks
import pytest
from children import wait_until

KILLED = f"""
import os, sys, tempfile
sys.path.insert(0, {str(forks.HERE)!r})
from leftovers import temporary_folder
folder = temporary_folder()
left = tempfile.mkdtemp()
assert left.startswith(f"{{folder}}/") and os.environ["FAKE_NCCL_FOLDER"] == str(folder)
print(folder, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_nothing_is_left_in_the_temporary_folder(how: str) -> None:
    done = forks.run(KILLED, how)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("jitkern-tests-")
    wait_until(lambda: not folder.exists())
