"""`jitkern completion`: the shell itself completes, with what the parser knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jitkern.cli import main

# What readline does: the words are split, the function fills COMPREPLY.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_jitkern jitkern "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
COMMANDS = {"warm", "doctor", "cache", "demo", "bench", "completion"}


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    file = tmp_path / "jitkern.bash"
    file.write_text(capsys.readouterr().out)
    return file


def complete(script: Path, *words: str) -> list[str]:
    command = ["bash", "-uc", COMPLETE, "bash", str(script), "jitkern", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["d"], ["doctor", "demo"]),
        (["cache", ""], ["list", "info", "clear", "export", "import", "verify"]),
        (["cache", "cl"], ["clear"]),
        (["cache", "clear", "--d"], ["--down-to", "--dry-run"]),
        (["cache", "clear", "--dry-run", "--down"], ["--down-to"]),
        (["cache", "list", "--op", "cache", "--j"], ["--json"]),
        (["cache", "list", "clear", "--d"], []),
        (["cache", "import", "ker"], []),  # a file: readline's own
        (["bench", "--gate", ""], ["all", "counts", "none"]),
        (["bench", "--device", "c"], ["cuda", "cpu"]),
        (["bench", "--json", ""], []),
        (["warm", "--head"], ["--head-dim"]),
        (["completion", ""], ["bash", "zsh"]),
        (["--v"], ["--version"]),
        (["frob", "--v"], ["--version"]),
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: list[str]) -> None:
    assert complete(script, *words) == expected


def test_every_command_is_offered(script: Path) -> None:
    assert set(complete(script, "")) >= COMMANDS


def test_bash_asks_readline_for_files(script: Path) -> None:
    registered = subprocess.run(
        ["bash", "-c", f'source "{script}"; complete -p jitkern'], capture_output=True, text=True
    )
    assert registered.stdout == "complete -o default -F _jitkern jitkern\n"


def test_zsh_has_the_same_behind_what_it_needs(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(script.read_text())
    assert out.removesuffix(script.read_text()) == (
        "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
        "autoload -Uz bashcompinit && bashcompinit\n"
    )
