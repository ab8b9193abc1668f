"""The wheel of this tree, built once for all tests of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def wheel(session_cache: Path) -> Path:
    """Built once for all workers of the run: it takes as long as compiling the host module."""
    out = session_cache.parent / "wheel"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            build_wheel(out)
    (found,) = out.glob("*.whl")
    return found


def build_wheel(out: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-index", "-q"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "-w", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
