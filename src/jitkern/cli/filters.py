"""Which entries of the cache a command is about: the options that list, clear and export share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jitkern.cli import ui
from jitkern.ops._ops import op_names

if TYPE_CHECKING:
    from jitkern.cache.store import EntryInfo

OPTIONS = ("op", "arch", "unused_for", "larger_than")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; several of them together mean entries that fit all."""
    parser.add_argument(
        "--op", type=ui.names, action="extend", metavar="OP[,OP]", help="only these ops or kernels"
    )
    parser.add_argument(
        "--arch", type=ui.archs, action="extend", metavar="A[,A]", help="only these archs"
    )
    parser.add_argument(
        "--unused-for",
        type=ui.age_s,
        metavar="AGE",
        help="only what was used last before AGE: 12h, 30d, 8w",
    )
    parser.add_argument(
        "--larger-than",
        type=ui.byte_count,
        metavar="SIZE",
        help="only what has more bytes than SIZE: 100K, 1M",
    )


def given(args: argparse.Namespace) -> bool:
    """Tell whether any of the options was given."""
    return any(getattr(args, name) is not None for name in OPTIONS)


def chosen_by(
    args: argparse.Namespace, *, host_code_too: bool = False
) -> Callable[[EntryInfo], bool]:
    """Return what tells whether an entry fits.

    Parameters
    ----------
    host_code_too
        Host code, which has no arch, fits every choice of archs.
    """
    # An entry of jitkern's own has the op's short name; one of a user any name, a public one too.
    short = op_names()
    ops = {name for op in args.op or () for name in (op, short.get(op, op))}
    archs = {str(arch) for arch in args.arch or ()} | ({""} if host_code_too else set())
    before_unix_s = time.time() - (args.unused_for or 0)

    def fits(entry: EntryInfo) -> bool:
        return (
            (not args.op or entry.name in ops)
            and (not args.arch or entry.arch in archs)
            and (args.unused_for is None or entry.last_used < before_unix_s)
            and (args.larger_than is None or entry.bytes > args.larger_than)
        )

    return fits
