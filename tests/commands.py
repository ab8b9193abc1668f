"""The commands of the documentation: parsed as a shell would, and against what they start."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from pages import ROOT

from jitkern.cli import _parser
from jitkern.env import VARIABLES

# Programs that pages start and that are somebody else's, with what they stand for.
YOURS = {"serve.py": "the reader's own server"}
NOT_CHECKED = {
    "install": "makes a directory of a group, as root",
    ".venv/bin/pre-commit": "another tool's",
    "docker": "another tool's",
}
"""What is neither run nor parsed, and why."""

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
    argv = command.argv
    program = argv[0]
    if program == "jitkern":
        _parser().parse_args(argv[1:])
    elif program == "python":
        _check_file(argv[1], argv[2:])
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(argv[1:])
        _check_file(args.training_script, args.training_script_args)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert argv[1] in targets
    elif program == "pip":
        _check_pip(argv[1:])
    elif program == "mkdir":
        assert not argv[-1].startswith("/")
    elif program == "export":
        assert command.variables
    else:
        assert program in NOT_CHECKED or program in _scripts(), command.line


def _scripts() -> set[str]:
    """Programs of this repository, by their paths."""
    return {path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/*.sh")}


def _check_file(name: str, argv: list[str]) -> None:
    if name in YOURS:
        return
    text = (ROOT / name).read_text()
    for word in argv:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{name} has no {word}"


def _check_pip(argv: list[str]) -> None:
    assert argv[0] in ("install", "wheel")
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for word in argv[1:]:
        for extra in re.findall(r"(?:jitkern|\.)\[(\w+)\]", word):
            assert re.search(rf"^{extra} = ", extras, re.MULTILINE), word


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
