"""``jitkern completion``: a script that has bash or zsh complete jitkern's command lines.

It is made from the parser, so that it knows what the parser does, and starts no Python at a key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

SUMMARY = "print what makes the shell complete jitkern's commands"
DESCRIPTION = """\
Print a script for the shell: commands, options and their choices are completed, else file names."""
EXAMPLE = """
jitkern completion bash > ~/.local/share/bash-completion/completions/jitkern
jitkern completion zsh >> ~/.zshrc
"""

_SCRIPT = """\
_jitkern() {
  local at= word=${COMP_WORDS[COMP_CWORD]} offers= i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$at ${COMP_WORDS[i]}" in
      %(commands)s) at="$at ${COMP_WORDS[i]}" ;;
    esac
  done
  case "$at:$word" in
%(options)s
  esac
  case "$at ${COMP_WORDS[COMP_CWORD-1]}" in
%(values)s
  esac
  COMPREPLY=($(compgen -W "$offers" -- "$word"))
}
complete -o default -F _jitkern jitkern
"""
# zsh brings what bash's functions need; compinit it may have run already.
_ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
autoload -Uz bashcompinit && bashcompinit
"""


class _Command(NamedTuple):
    """A command, such as `` cache list``, and what may follow it."""

    path: str
    words: list[str]
    options: list[str]
    choices: dict[str, list[str]]  # what an option can have, where that is known


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell to complete in")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write((_ZSH if args.shell == "zsh" else "") + script(args.parser))
    return 0


def script(parser: argparse.ArgumentParser) -> str:
    """Return the function for the shell, made from all that `parser` knows."""
    commands = list(_commands(parser, ""))
    options, values = [], []
    for command in commands:
        options.append(f'    "{command.path}:-"*) offers="{" ".join(command.options)}" ;;')
        if command.words:
            options.append(f'    "{command.path}:"*) offers="{" ".join(command.words)}" ;;')
        for option, choices in command.choices.items():
            values.append(f'    "{command.path} {option}") offers="{" ".join(choices)}" ;;')
    paths = "|".join(f'"{command.path}"' for command in commands if command.path)
    return _SCRIPT % {
        "commands": paths,
        "options": "\n".join(options),
        "values": "\n".join(values),
    }


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[_Command]:
    words: list[str] = []
    options: list[str] = []
    choices_of: dict[str, list[str]] = {}
    inner: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            inner |= action.choices
        if not action.option_strings:
            words += choices
        elif choices:
            choices_of |= dict.fromkeys(action.option_strings, choices)
    yield _Command(path, words, options, choices_of)
    for name, command in inner.items():
        yield from _commands(command, f"{path} {name}")
