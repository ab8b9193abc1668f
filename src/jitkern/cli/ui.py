"""Arguments, errors and output that the commands share."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from jitkern.env import parse_bytes
from jitkern.errors import UnsupportedError
from jitkern.names import did_you_mean
from jitkern.ops._ops import Size


class UsageError(Exception):
    """The command line or the environment is wrong: exit status 2."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def __init__(self, *, example: str = "", **kwargs: Any) -> None:
        if example:
            kwargs["epilog"] = f"example:\n{textwrap.indent(example.strip(), '  ')}"
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        # Abbreviated options would break scripts when an option is added.
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")

    def refuse(self, extra: Sequence[str]) -> NoReturn:
        """Raise the error of arguments that the parser does not know."""
        unknown = [text.partition("=")[0] for text in extra if text.startswith("-")]
        options = [option for action in self._actions for option in action.option_strings]
        hint = did_you_mean(unknown[0], options) if unknown else ""
        self.error(f"unrecognized arguments: {' '.join(extra)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse suggests a choice from Python 3.14 on.
        if action.choices is not None and value not in action.choices:
            text = f"{value!r}, expected {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"{text}{did_you_mean(value, [*action.choices])}")


def require_torch() -> None:
    """Import torch; raise UnsupportedError, with what to install, if that fails."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        raise UnsupportedError(f"torch: {error}; pip install torch") from error


# -- arguments -------------------------------------------------------------------------------------


def sizes(size: Size) -> Callable[[str], list[Any]]:
    """Return a parser of ``656`` or ``256,64k``, or of names, as argparse's ``type``."""

    def parse(text: str) -> list[Any]:
        values = []
        for name in names(text):
            value = name if size.choices else parse_bytes(name)
            if not size.accepts(value):
                hint, expected = did_you_mean(name, size.choices), size.expected
                if value is None:
                    expected = f"{size.meaning}, such as {size.example}"
                raise argparse.ArgumentTypeError(f"{name!r}, expected {expected}{hint}")
            values.append(value)
        return values

    return parse


def names(text: str) -> list[str]:
    """Parse ``a,b``, as argparse's ``type``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r}, expected at least one value")
    return parts


# -- output ----------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return aligned columns; one whose name starts with ``>`` is right-aligned."""
    names = [name.removeprefix(">") for name in columns]
    lines = [names, *([visible(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.rjust if name[:1] == ">" else str.ljust for name in columns]
    texts = []
    for line in lines:
        cells = (a(cell, width) for a, cell, width in zip(align, line, widths, strict=True))
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"


def say(text: str) -> None:
    """Write a line, or several, to standard output."""
    sys.stdout.write("\n".join(map(visible, text.split("\n"))) + "\n")


def note(text: str) -> None:
    """Write a note to standard error: the command goes on."""
    sys.stderr.write(f"jitkern: note: {visible(text)}\n")


def visible(text: str) -> str:
    """Escape control characters: a name in a record could be an escape sequence."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
