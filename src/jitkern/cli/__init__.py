"""The command line: ``jitkern doctor``, ``jitkern warm`` and ``jitkern cache``.

Each command is a module with ``configure(parser)`` and ``run(args)``, which does the heavy imports.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from jitkern.arch import requested_archs
from jitkern.cli import cache, doctor, ui, warm
from jitkern.cli.ui import Parser, UsageError
from jitkern.env import settings
from jitkern.errors import CompileError, JitkernError, WarmError
from jitkern.version import __version__

_COMMANDS = {"doctor": doctor, "warm": warm, "cache": cache}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for a wrong command line.

    `argv` is without the program's name; by default the process's. Any other exception is a bug.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Latin-1 cannot print every path
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(str(error), 2)
    except (CompileError, WarmError) as error:  # its text has the compiler's log
        return _fail(str(error), 1)
    except JitkernError as error:
        return _fail(" ".join(str(error).split()), 1)
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # `jitkern doctor | head`, or a full disk: Python would flush at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1
        file = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{file}{error.strerror or error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _run(argv: list[str]) -> int:
    parser = _parser()
    args, extra = parser.parse_known_args(argv)
    if extra:
        args.parser.refuse(extra)
    if args.parser is parser:  # no command: as pip, which shows its help
        parser.print_help()
        return 0
    with warnings.catch_warnings():
        show = lambda message, *_: ui.note(str(message).removeprefix("jitkern: "))  # noqa: E731
        warnings.showwarning = show
        # Importing torch warns if NumPy is not installed; nothing here needs NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        if args.run is doctor.run:  # its table has a line for each
            warnings.simplefilter("ignore", RuntimeWarning)
        try:
            settings()
            if args.run is not doctor.run:
                requested_archs()
        except ValueError as error:
            raise UsageError(str(error)) from None
        status: int = args.run(args)
        return status


def _parser() -> Parser:
    parser = Parser(
        prog="jitkern",
        description="JIT-compiled CUDA kernels that move data in LLM inference.",
        example="jitkern doctor\njitkern warm --row-bytes 656 --arch 9.0",
    )
    parser.add_argument("--version", action="version", version=f"jitkern {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, example=module.EXAMPLE
        )
        module.configure(command)
        command.set_defaults(parser=command, run=module.run)
    return parser


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"jitkern: error: {message}\n")
    return status
