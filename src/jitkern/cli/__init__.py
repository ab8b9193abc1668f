"""The command line: ``jitkern warm | doctor | cache | demo | bench``.

Each command is a module with ``configure(parser)`` and ``run(args)``; what is heavy is imported
when it runs, so that ``jitkern --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from jitkern import __version__
from jitkern.cli import bench_cmd, cache_cmd, demo, doctor, warm
from jitkern.cli.ui import Parser, UsageError
from jitkern.env import settings
from jitkern.errors import CompileError, JitkernError

_COMMANDS = {
    "warm": warm,
    "doctor": doctor,
    "cache": cache_cmd,
    "demo": demo,
    "bench": bench_cmd,
}

_EXAMPLE = """
jitkern doctor
jitkern warm --element-size 656 --arch 9.0
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for a wrong command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; by default those of the process.

    Examples
    --------
    >>> main(["cache", "info"])  # doctest: +SKIP
    0
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(str(error), 2)
    except JitkernError as error:
        # One line, but for what a compiler has to say: all of its log helps.
        text = str(error)
        return _fail(text if isinstance(error, CompileError) else " ".join(text.split()), 1)
    except BrokenPipeError:
        # `jitkern cache list | head`: nobody reads on; Python's flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        what = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{what}{error.strerror or error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _run(argv: list[str]) -> int:
    # torch says so while it is imported, wherever NumPy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    parser = _parser()
    if argv[:1] == ["bench"] and not bench_cmd.GUARD_OPTIONS & set(argv):
        # A checkout's harness has its own options: nothing of them is looked at here.
        return bench_cmd.forward(argv[1:])
    args = parser.parse_args(argv)
    try:
        settings()
    except ValueError as error:
        raise UsageError(str(error)) from None
    status: int = args.run(args)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jitkern",
        description="JIT-compiled CUDA kernels that move data in LLM inference.",
        example=_EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=f"jitkern {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, example=module.EXAMPLE
        )
        module.configure(command)
        command.set_defaults(run=module.run)
    return parser


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"jitkern: error: {message}\n")
    return status
