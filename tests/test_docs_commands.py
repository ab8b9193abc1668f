"""The commands of README and docs: all are parsed, and those that any machine can run are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command, check, commands, shows
from needs import needs_cxx, needs_nvrtc
from pages import ALL, ROOT, Block, blocks
from paths import python_path
from proved import unproved

from jitkern.arch import Arch
from jitkern.cli import main
from jitkern.env import settings
from jitkern.ops import store

CONSOLE = [block for block in (*ALL, *blocks("CONTRIBUTING.md")) if block.language == "console"]
RUN = [block for block in CONSOLE if any(one.is_run for one in commands(block.text))]


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_commands_and_options_are_there(block: Block) -> None:
    found = commands(block.text)
    assert found
    for command in found:
        check(command)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With what the commands name: records of a run. The GPU to compile for is an H200."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JITKERN_ARCH", "9.0")
    for name in ("kernels.jsonl", "run.jsonl"):
        monkeypatch.setenv("JITKERN_RECORD", str(tmp_path / name))
        settings.cache_clear()
        store.kernel.cache_clear()
        store.kernel(16, 16, 4).image(Arch.parse("9.0"))
        assert (tmp_path / name).exists()
    (tmp_path / "my_kernels").mkdir()
    monkeypatch.delenv("JITKERN_RECORD")
    settings.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    settings.cache_clear()


def run(command: Command, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    """Return what it prints; one that the page shows failing is to fail."""
    for name, value in command.variables.items():
        patch.setenv(name, value)
    if command.argv[0] == "jitkern":
        settings.cache_clear()
        status = main(command.argv[1:])
        printed = "".join(capsys.readouterr())
    else:
        started = command.argv
        if started[0] == "python":
            started = [sys.executable, str(ROOT / started[1]), *started[2:]]
        env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(started, env=env, capture_output=True, text=True)
        status, printed = done.returncode, done.stdout + done.stderr
    fails = any(": error: " in line for line in command.shown)
    assert bool(status) == fails, f"{command.line}\n{printed}"
    return printed


def param(block: Block) -> object:
    """An example takes seconds: it runs if it or its page has changed."""
    is_long = any(one.is_run and one.argv[0] == "python" for one in commands(block.text))
    proved = [unproved(f"commands {block.page}", block.page, "examples/*.py")] if is_long else []
    return pytest.param(block, marks=proved, id=str(block))


@needs_cxx
@needs_nvrtc
@pytest.mark.parametrize("block", list(map(param, RUN)))
def test_commands_run(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder of their own, one behind the other: `import` reads what `export` has written."""
    for command in commands(block.text):
        if command.is_run:
            with pytest.MonkeyPatch.context() as patch:
                printed = run(command, capsys, patch)
            settings.cache_clear()
            assert shows(command, printed), f"{command.line}\n{printed}"


def test_the_job_for_ci_starts_a_command_that_there_is() -> None:
    (job,) = [block.text for block in blocks("docs/bench-ci.md") if block.language == "yaml"]
    lines = re.findall(r"run: ((?:jitkern|pip) .+)", job)
    assert len(lines) == 3
    for line in lines:
        check(Command(line))
