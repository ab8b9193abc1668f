"""The commands of the documentation: parsed as a shell would, and against what they start."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from pages import ROOT

from jitkern.cli import _parser
from jitkern.env import VARIABLES

YOURS = {"serve.py": "the reader's own server"}
# Other tools, whose options are not looked at.
OTHERS = {"install", ".venv/bin/pre-commit", "docker", "make", "pip", "mkdir", "export"}

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
        found = {}
        for word in words:
            name, sign, value = word.partition("=")
            if not sign or not re.fullmatch(r"[A-Z_]+", name):
                break
            found[name] = value
        return found

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
