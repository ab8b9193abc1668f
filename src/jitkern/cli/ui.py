"""What the commands share: arguments, errors, tables. Only argparse is imported with it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from jitkern.env import parse_bytes
from jitkern.errors import UnsupportedError
from jitkern.fs import require_writable as require_writable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from jitkern.arch import Arch
    from jitkern.ops._ops import Size

JSON_SCHEMA = 1
"""Of what ``--json`` prints: raised when a name goes or changes its meaning, not for a new one."""

# A pipe or a file has no width: wide enough for a path, and tables take only what they need.
_PIPE_WIDTH = 200


class UsageError(Exception):
    """The command line or the environment asks for something that cannot be: exit status 2."""


def require_torch() -> None:
    """Import torch for what is about to import it, maybe deep down.

    Raises
    ------
    UnsupportedError
        It is not installed, or broken; the message ends with what to install.
    """
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        reason = " ".join(str(error).split())
        raise UnsupportedError(f"torch: {reason}; pip install torch") from error


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and not a page of usage."""

    def __init__(self, *args: object, example: str = "", **kwargs: object) -> None:
        if example:
            kwargs["epilog"] = f"example:\n{textwrap.indent(example.strip(), '  ')}"
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        # Abbreviated options would break scripts whenever an option is added.
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.set_defaults(prog=self.prog)  # of the innermost command: the one that was meant

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Here and not in the outermost parser, whose help does not list the command's options.
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def sizes(of: Size) -> Callable[[str], list[int]]:
    """Return what parses ``656`` or ``256,64k``, as argparse's ``type``."""

    def size(text: str) -> int:
        found = parse_bytes(text)
        if not found or found > of.largest:
            raise argparse.ArgumentTypeError(f"{text!r}, expected {of.meaning}, 1 to {of.largest}")
        return found

    return lambda text: list(map(size, names(text)))


def byte_count(text: str) -> int:
    """Parse ``4G``, as argparse's ``type``."""
    found = parse_bytes(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}, expected bytes such as 4294967296 or 4G")
    return found


def age_s(text: str) -> int:
    """Parse ``90min``, ``12h``, ``30d`` or ``8w``, as argparse's ``type``: seconds."""
    match = re.fullmatch(r"([0-9]{1,6})(min|h|d|w)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an age such as 90min, 12h, 30d or 8w")
    return int(match[1]) * {"min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[match[2]]


def archs(text: str) -> list[Arch]:
    """Parse ``9.0,10.0``, as argparse's ``type``."""
    from jitkern.arch import Arch

    try:
        return [Arch.parse(part) for part in names(text)]
    except ValueError as error:
        # argparse says which argument it is.
        raise argparse.ArgumentTypeError(str(error).removeprefix("arch: ")) from None


def names(text: str) -> list[str]:
    """Parse ``a,b``, as argparse's ``type``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r}, expected at least one value")
    return parts


def count(text: str) -> int:
    """Parse a number of threads or runs, as argparse's ``type``."""
    if not re.fullmatch(r"[0-9]{1,19}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected 1 or more")
    return int(text)


def console(*, stderr: bool = False) -> Console:
    """Return a console for the stream as it is now; plain text where it is no terminal."""
    from rich.console import Console

    # A path may hold :x: and is no emoji.
    made = Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, emoji=False, width=_PIPE_WIDTH)
    return made


def table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table; a column whose name starts with ``>`` is right-aligned.

    Cells are taken literally: ``jitkern[cuda]`` is no markup here, and no cell steers the terminal.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if right else "left")
    for row in rows:
        made.add_row(*(Text(_visible(cell), style=_STYLES.get(cell, "")) for cell in row))
    return made


_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red", "failed": "bold red"}


@contextmanager
def progress(*, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what is told of each step: what it is, how many are done, and of how many.

    A bar on standard error that goes at the end. Where that is no terminal, nothing; or `lines`.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from jitkern.compilers.progress import quiet

    out = console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
    with quiet(), bar:
        task = bar.add_task("starting")

        def advance(what: str, done: int, steps: int) -> None:
            what = _visible(what)
            if lines and not out.is_terminal:
                out.print(f"{done}/{steps} {what}", markup=False)
            bar.update(task, description=what, completed=done, total=steps)

        yield advance


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def say_json(**fields: Any) -> None:
    """Write an object with `fields` to standard output, and the schema that it follows."""
    write_json({"schema": JSON_SCHEMA, **fields})


def write_json(value: dict[str, Any]) -> None:
    """Write `value` to standard output as it is: no console, which would wrap it."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def say(text: str) -> None:
    """Write a line, or several, to standard output, literally."""
    lines = "\n".join(map(_visible, text.split("\n")))
    console().print(lines, markup=False, soft_wrap=True)


def _visible(text: str) -> str:
    """Spell out what does not print: a name may come from a bundle, and be an escape sequence."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def bytes_text(count: int) -> str:
    """Return ``812 B``, ``7.9 KiB``, ``1.2 GiB``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def split_hint(error: Exception) -> tuple[str, str]:
    """Split ``what is wrong; what to do`` into its two parts."""
    reason, separator, hint = str(error).rpartition("; ")
    return (reason, hint) if separator else (hint, "")


def ms_text(ms: float) -> str:
    """Return milliseconds with the digits that a reader can use."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``8.0`` before ``10.0``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
