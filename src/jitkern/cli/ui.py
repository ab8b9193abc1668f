"""What the commands share: arguments, errors, tables."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from jitkern.arch import Arch
from jitkern.env import parse_bytes
from jitkern.errors import UnsupportedError
from jitkern.ops._ops import Size

JSON_SCHEMA = 1
"""Version of the output of ``--json``: raised if a name goes or changes its meaning."""


class UsageError(Exception):
    """The command line or the environment is wrong: exit status 2."""


def require_torch() -> None:
    """Import torch; raise UnsupportedError, with what to install, if that fails."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        raise UnsupportedError(f"torch: {error}; pip install torch") from error


# -- arguments -------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, with the nearest command or option."""

    def __init__(self, *, example: str = "", **kwargs: Any) -> None:
        if example:
            kwargs["epilog"] = f"example:\n{textwrap.indent(example.strip(), '  ')}"
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        # Abbreviated options would break scripts whenever an option is added.
        super().__init__(allow_abbrev=False, **kwargs)
        self.set_defaults(prog=self.prog)  # the innermost command's

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Here, because the outermost parser does not know a command's options.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            text = " ".join(unknown)
            self.error(f"unrecognized arguments: {text}{_did_you_mean(unknown[0], options)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message):
            message += _did_you_mean(match[1], re.findall(r"[\w-]+", match[2]))
        raise UsageError(f"{message} (see: {self.prog} --help)")


def _did_you_mean(word: str, words: Sequence[str]) -> str:
    from difflib import get_close_matches

    word = word.partition("=")[0]
    begin = [one for one in words if len(word) > 2 and one.startswith(word)]
    nearest = begin or get_close_matches(word, words, n=1)
    return f", did you mean {nearest[0]}?" if nearest else ""


def sizes(of: Size) -> Callable[[str], list[int]]:
    """Return a parser of ``656`` or ``256,64k``, as argparse's ``type``."""

    def size(text: str) -> int:
        value = parse_bytes(text)
        if not value or value > of.largest:
            raise argparse.ArgumentTypeError(f"{text!r}, expected {of.meaning}, 1 to {of.largest}")
        return value

    return lambda text: list(map(size, names(text)))


def age_s(text: str) -> int:
    """Parse ``90min``, ``12h``, ``30d`` or ``8w`` to seconds, as argparse's ``type``."""
    match = re.fullmatch(r"([0-9]{1,6})(min|h|d|w)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an age such as 90min, 12h, 30d or 8w")
    return int(match[1]) * {"min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[match[2]]


def archs(text: str) -> list[Arch]:
    """Parse ``9.0,10.0``, as argparse's ``type``."""
    try:
        return [Arch.parse(part) for part in names(text)]
    except ValueError as error:  # argparse names the argument
        raise argparse.ArgumentTypeError(str(error).removeprefix("arch: ")) from None


def names(text: str) -> list[str]:
    """Parse ``a,b``, as argparse's ``type``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r}, expected at least one value")
    return parts


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


# -- output ----------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return aligned columns; one whose name starts with ``>`` is right-aligned."""
    # Not rich's, which takes 24 s for 10,000 rows.
    names = [name.removeprefix(">") for name in columns]
    shown = [names, *([visible(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    align = [str.rjust if name[:1] == ">" else str.ljust for name in columns]
    lines = []
    for row in shown:
        cells = (a(cell, width) for a, cell, width in zip(align, row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def progress(*, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function for each step's name, the steps done, and the steps in all.

    It moves a bar on standard error, if that is a terminal; otherwise `lines` prints lines.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    out = Console(stderr=True, highlight=False, emoji=False)  # a path may hold :x:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
    with bar:
        task = bar.add_task("starting")

        def advance(what: str, done: int, steps: int) -> None:
            if lines and not out.is_terminal:
                out.print(f"{done}/{steps} {visible(what)}", markup=False)
            bar.update(task, description=visible(what), completed=done, total=steps)

        yield advance


def say(text: str) -> None:
    """Write a line, or several, to standard output, literally."""
    sys.stdout.write("\n".join(map(visible, text.split("\n"))) + "\n")


def say_json(**fields: Any) -> None:
    """Write `fields` and their schema to standard output, as one object."""
    sys.stdout.write(json.dumps({"schema": JSON_SCHEMA, **fields}, indent=1, default=str) + "\n")


def visible(text: str) -> str:
    """Escape control characters: a name from a bundle could be an escape sequence."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def bytes_text(count: int) -> str:
    """Return ``812 B``, ``7.9 KiB``, ``1.2 GiB``."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def ms_text(ms: float) -> str:
    """Return milliseconds with the digits that a reader can use."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``8.0`` before ``10.0``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
