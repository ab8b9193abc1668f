"""The temporary folder of a run of the tests, which goes when the run ends, also when killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Reads until the writing end is closed, which the kernel does for a killed process.
_REMOVE = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(50):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)  # ranks may still be ending
"""


def temporary_folder() -> Path:
    """Make a folder that is removed after this process; all that it starts shall use it.

    It takes the place of /tmp, by TMPDIR, and of /dev/shm in the fake NCCL.
    """
    folder = Path(tempfile.mkdtemp(prefix="jitkern-tests-"))
    folder.chmod(0o1777)  # as /tmp: some tests are of several users
    reading, _held = os.pipe()
    command = [sys.executable, "-S", "-c", _REMOVE, str(folder)]
    subprocess.Popen(command, stdin=reading, start_new_session=True)
    os.close(reading)
    os.environ["TMPDIR"] = os.environ["FAKE_NCCL_FOLDER"] = str(folder)
    tempfile.tempdir = None  # asks TMPDIR again
    return folder
