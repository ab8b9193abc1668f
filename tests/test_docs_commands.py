"""The commands of README and docs: all are parsed, and those that any machine can run are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import pytest
from needs import needs_cxx, needs_nvrtc
from pages import ALL, ROOT, Block, blocks
from paths import python_path

from jitkern.arch import Arch
from jitkern.cli import _parser, main
from jitkern.env import VARIABLES, settings
from jitkern.ops import store

YOURS = {"serve.py": "the reader's own server"}
# Other tools, whose options are not looked at.
OTHERS = {
    "install",
    ".venv/bin/pre-commit",
    "docker",
    "make",
    "pip",
    "mkdir",
    "export",
    "tar",
    "cp",
    "vllm",
}

# What runs on any machine in seconds, in a folder of its own.
_RUNS = ("warm", "doctor", "cache")
_RUN_FILES = ("examples/sparse_topk.py", "examples/paged_decode.py", "examples/radix_cache.py")


@dataclass
class Command:
    """One command, and what the page shows of its output."""

    line: str
    shown: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """Without a comment, and without where the output goes."""
        words = shlex.split(self.line, comments=True)
        ends = [at for at, word in enumerate(words) if word in (">", ">>")]
        return words[: ends[0]] if ends else words

    @property
    def variables(self) -> dict[str, str]:
        """Those in front of the command, or that it exports."""
        words = self.words[1:] if self.words[0] == "export" else self.words
        set_first = takewhile(lambda word: re.match("[A-Z_]+=", word), words)
        return dict(word.split("=", 1) for word in set_first)

    @property
    def argv(self) -> list[str]:
        words = self.words
        return words if words[0] == "export" else words[len(self.variables) :]

    @property
    def is_run(self) -> bool:
        argv = self.argv
        if any(word.startswith("/") or word.isupper() for word in argv):
            return False  # a place of the machine's, or a name that stands for any
        if argv[0] == "python":
            return argv[1] in _RUN_FILES
        if argv[0] == "mkdir":
            return True
        if argv[:2] == ["jitkern", "warm"] and "--op" not in argv and len(argv) > 2:
            return "--replay" in argv  # kernels of all ops for a size take a quarter of a minute
        return argv[0] == "jitkern" and argv[1] in _RUNS


def commands(text: str) -> list[Command]:
    """Return the commands behind the prompts ``$`` and, of root, ``#``."""
    found: list[Command] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith(("$ ", "# ")):
            found.append(Command(line[2:]))
        elif found:
            found[-1].shown.append(line)
    return found


def check(command: Command) -> None:
    """Fail where a command, an option, a file or a variable is not there."""
    own = [name for name in command.variables if name.startswith("JITKERN_")]
    assert set(own) <= set(VARIABLES), own
    program, *argv = command.argv
    if program == "jitkern":
        _parser().parse_args(argv)
    elif program in ("python", "torchrun"):
        script = next(word for word in argv if word.endswith(".py") or word == "-m")
        if script in YOURS or script == "-m":
            return
        text = (ROOT / script).read_text()
        for word in argv[argv.index(script) + 1 :]:
            if word.startswith("--"):
                assert f'"{word.partition("=")[0]}"' in text, f"{script} has no {word}"
    else:
        assert program in OTHERS or (ROOT / program).is_file(), command.line


_TIME = re.compile(r"\d+(?:\\\.\d+)?(?=\\? (?:us|ms|s|GB/s)\b)")


def as_pattern(line: str) -> str:
    """Return a pattern for a line of output: ``...`` is anything, a time is any."""
    text = _TIME.sub(r"\\d+(\\.\\d+)?", re.escape(line.strip()))
    return text.replace(r"\.\.\.", ".*")


def shows(command: Command, printed: str) -> bool:
    """Tell whether all lines that the page shows were printed, in this order."""
    came = iter(printed.splitlines())
    wanted = [line for line in command.shown if line.strip() not in ("", "...")]
    return all(any(re.fullmatch(as_pattern(line), got.strip()) for got in came) for line in wanted)


CONSOLE = [block for block in (*ALL, *blocks("CONTRIBUTING.md")) if block.language == "console"]
RUN = [block for block in CONSOLE if any(command.is_run for command in commands(block.text))]


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_commands_and_options_are_there(block: Block) -> None:
    found = commands(block.text)
    assert found
    for command in found:
        check(command)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def run(command: Command, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    """Return what it prints; one that the page shows failing is to fail."""
    for name, value in command.variables.items():
        patch.setenv(name, value)
    program, *argv = command.argv
    if program == "jitkern":
        if argv == ["cache", "clear"]:  # never the cache that all workers share
            patch.setenv("JITKERN_CACHE_DIR", os.path.abspath("cache"))
        settings.cache_clear()
        status = main(argv)
        printed = "".join(capsys.readouterr())
    else:
        if program == "python":
            program, argv[0] = sys.executable, str(ROOT / argv[0])
        env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([program, *argv], env=env, capture_output=True, text=True)
        status, printed = done.returncode, done.stdout + done.stderr
    fails = any(": error: " in line for line in command.shown)
    assert bool(status) == fails, f"{command.line}\n{printed}"
    return printed


def param(block: Block) -> object:
    """Mark blocks that start an example as slow: they take seconds."""
    is_long = any(
        command.is_run and command.argv[0] == "python" for command in commands(block.text)
    )
    return pytest.param(block, marks=[pytest.mark.slow] if is_long else [], id=str(block))


@needs_cxx
@needs_nvrtc
@pytest.mark.parametrize("block", list(map(param, RUN)))
def test_commands_run(block: Block, folder: None, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder of their own, one behind the other: `import` reads what `export` has written."""
    for command in commands(block.text):
        if command.is_run:
            with pytest.MonkeyPatch.context() as patch:
                printed = run(command, capsys, patch)
            settings.cache_clear()
            assert shows(command, printed), f"{command.line}\n{printed}"
