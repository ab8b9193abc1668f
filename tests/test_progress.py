"""A build that takes longer than a second says so on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import python_path

ROOT = Path(__file__).resolve().parent.parent

# Builds two steps that take as many seconds each as it is told; "from one second on" comes sooner.
BUILD = """
import logging, sys
from pathlib import Path
from jitkern.compilers import progress
from jitkern.compilers.ninja import Step, run_ninja
folder, seconds, level, quiet = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
if level:
    logging.basicConfig(level=level, format="%(message)s")
progress._FIRST_S = 0.3
work = ("sh", "-c", f"sleep {seconds}")
steps = [Step("a", (), work), Step("b", ("a",), work)]
if quiet:
    with progress.quiet():
        run_ninja("slow", folder, steps)
else:
    run_ninja("slow", folder, steps)
print("rich" in sys.modules)
"""


def build(
    folder: Path, *, seconds: str = "1", terminal: bool = True, level: str = "", quiet: str = ""
) -> tuple[str, str]:
    """What it says on standard error, and whether rich was imported."""
    command = [sys.executable, "-c", BUILD, str(folder), seconds, level, quiet]
    env = {**os.environ, "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": "100"}
    above, below = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=below) as process:
        os.close(below)
        said = b""
        try:
            while chunk := os.read(above, 4096):
                said += chunk
        except OSError:  # how a terminal ends
            pass
        os.close(above)
        assert process.stdout is not None
        rich = process.stdout.read().decode().strip()
    assert process.returncode == 0, said
    return said.decode(), rich


def test_on_a_terminal(tmp_path: Path) -> None:
    said, rich = build(tmp_path, seconds="2")
    lines = re.findall(r"jitkern: building slow: (?:(\d/2) steps, )?\d+ s", said)
    assert "1/2" in lines
    assert "\n" not in said.replace("\r\n", "").strip("\n"), "one line, written over"
    assert said.rstrip().endswith("\x1b[2K"), "which goes at the end"
    assert rich == "True"


def test_a_quick_build_says_nothing(tmp_path: Path) -> None:
    assert build(tmp_path, seconds="0") == ("", "False")


def test_beside_another_display(tmp_path: Path) -> None:
    assert build(tmp_path, quiet="quiet") == ("", "False")


@pytest.mark.parametrize(
    ("level", "expected"), [("", ""), ("INFO", r"jitkern: building slow: \d+ s\n")]
)
def test_where_there_is_no_terminal(level: str, expected: str, tmp_path: Path) -> None:
    said, rich = build(tmp_path, terminal=False, level=level)
    assert re.fullmatch(expected, said)
    assert rich == "False"
