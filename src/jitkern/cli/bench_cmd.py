"""``jitkern bench``: hand over to the harness in ``bench/`` of a source checkout."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import jitkern
from jitkern.errors import UnsupportedError

SUMMARY = "run the benchmarks of a source checkout"
DESCRIPTION = "Run the benchmark harness in bench/; it takes every option that follows."
EXAMPLE = "jitkern bench --help"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the options are the harness's."""


def run(args: argparse.Namespace) -> int:
    """Run the harness without options."""
    del args
    return forward([])


def forward(argv: list[str]) -> int:
    """Run the harness with `argv` and return its exit status.

    Raises
    ------
    UnsupportedError
        jitkern runs from an installed package, which holds no benchmarks.
    """
    root = Path(jitkern.__file__).resolve().parents[2]
    if not (root / "bench" / "__main__.py").is_file():
        raise UnsupportedError(
            "bench: the harness is not part of the installed package; clone the repository, then "
            "python -m bench"
        )
    sys.path.insert(0, str(root))
    status: int = import_module("bench.__main__").main(argv)
    return status or 0
