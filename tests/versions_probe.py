"""Run by tools/test_versions.py under other versions of Python, torch and tvm-ffi.

`make test` does not collect it: it tests an installed wheel, whose host module is built against the
oldest tvm-ffi.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from needs import needs_cxx, needs_nvrtc

import jitkern
from jitkern.host.library import find

ROOT = Path(__file__).resolve().parent.parent


def run_python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_is_used_as_it_is() -> None:
    """Its host module loads; nothing is built."""
    assert ROOT not in Path(jitkern.__file__).resolve().parents
    assert find().source == "shipped"


def test_doctor() -> None:
    run_python("-m", "jitkern", "doctor")


def test_readme() -> None:
    run_python("-c", (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0])


@needs_cxx
@needs_nvrtc
def test_own_kernel() -> None:
    """Its C++ form on the CPU, compared with PyTorch, and its device code compiled."""
    run_python(str(ROOT / "examples" / "own_kernel" / "own_kernel.py"), "--warm", "9.0")
