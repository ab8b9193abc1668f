"""``jitkern warm``: compile kernels before they are needed, on any machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.cli import ui
from jitkern.errors import JitkernError, WarmError
from jitkern.ops._ops import OPS, SIZES, op_names

if TYPE_CHECKING:
    from jitkern.warming import Job, Outcome

SUMMARY = "compile kernels before they are needed, with or without a GPU"
DESCRIPTION = """\
Compile kernels into the cache, for the archs of --arch, else of JITKERN_ARCH, else of the GPUs
present. Needs no GPU. The host module is built first, so that a first request pays nothing; with
no option nothing else is. What the cache has is not built again."""
_NAMES = list(op_names())
_FIRST = [op.function for op in OPS if op.has_kernels][:2]
_NO_KERNELS = [op.function for op in OPS if not op.has_kernels]
EXAMPLE = f"""
jitkern warm --element-size 656
jitkern warm --element-size 256,1024 --op {",".join(_FIRST)} --arch 9.0,10.0 --out kernels/
jitkern warm --element-size 1024 --head-dim 64,128 --arch 9.0
jitkern warm --replay run.jsonl --arch 9.0
jitkern warm --replay run.jsonl --check
"""
JSON_VERSION = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    for size in SIZES:
        ops = [op.function for op in OPS if op.has_kernels and op.sized_by == size.name]
        parser.add_argument(
            size.option,
            type=ui.sizes(size),
            action="extend",
            metavar=size.unit,
            help=f"{size.meaning}, for {', '.join(ops)}; several as 64,1k or by repeating the "
            "option",
        )
    parser.add_argument(
        "--op",
        type=ui.names,
        action="extend",
        metavar="OP[,OP]",
        help=f"of {', '.join(_NAMES)}; default: all of which a size is given; there is nothing to "
        f"compile for {', '.join(_NO_KERNELS)}",
    )
    parser.add_argument(
        "--arch",
        type=ui.archs,
        action="extend",
        metavar="A[,A]",
        help="such as 9.0,10.0; default: JITKERN_ARCH, else the GPUs present; of --replay those "
        "that were recorded",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        action="append",
        metavar="FILE",
        help="build what JITKERN_RECORD=FILE has written, on any machine; it brings sources and "
        "flags to compile: replay only what you would run; may be repeated",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="replay even what other users could have written",
    )
    parser.add_argument(
        "--load",
        action="store_true",
        help="also load the libraries that are replayed, to see that they do; that runs their code",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile nothing: list what is missing, and exit with 1 if anything is",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write all that was asked for into DIR, a cache for JITKERN_CACHE_PATH",
    )
    parser.add_argument(
        "--jobs",
        type=ui.count,
        metavar="N",
        help="compiles at a time; default: the cores, as far as memory allows",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


COLUMNS = ("op", "parameters", "arch", "source", ">ms", ">bytes")

# The option of each argument of warm() that is checked there.
_OPTIONS = {"ops": "--op", "archs": "--arch", "files": "--replay", "out": "--out"}
_OPTIONS |= {f"{size.name}s": size.option for size in SIZES}


def run(args: argparse.Namespace) -> int:
    """Have all that is asked for, and print what became of it."""
    from jitkern.arch import requested_archs
    from jitkern.cache.get import user_cache
    from jitkern.warming import default_threads, warm

    start = time.perf_counter()
    sizes = {f"{size.name}s": getattr(args, size.name) or () for size in SIZES}
    for option in ("trust", "load"):
        if getattr(args, option) and not args.replay:
            raise ui.UsageError(f"warm: --{option}: expected along with --replay FILE")
    if args.arch and not (args.replay or any(sizes.values())):
        options = ", ".join(size.option for size in SIZES)
        raise ui.UsageError(f"warm: --arch: expected along with {options} or --replay")
    threads = args.jobs or default_threads()
    failure: WarmError | None = None
    with ui.progress() as tell:

        def progress(job: Job, done: int, steps: int) -> None:
            tell(str(job), done, steps)

        try:
            if any(sizes.values()) and not args.arch and not requested_archs():
                ui.require_torch()  # which is asked for the GPUs
            outcomes: Sequence[Outcome] = warm(
                args.op,
                archs=args.arch or None,
                files=args.replay or (),
                check=args.check,
                trust=args.trust,
                load=args.load,
                out=args.out,
                threads=threads,
                progress=progress,
                **sizes,
            )
        except WarmError as error:
            outcomes, failure = error.outcomes, error
        except (ValueError, OSError) as error:
            raise _of_options(error) from error

    took_s = time.perf_counter() - start
    if args.json:
        ui.write_json(_json(outcomes, user_cache().root, took_s))
    else:
        shown = [o for o in outcomes if o.lookup is None] if args.check else outcomes
        if shown:
            ui.console().print(ui.table(COLUMNS, map(_cells, shown)))
        ui.say(f"{_tally(outcomes)} in {took_s:.1f} s, {threads} at a time, in {user_cache().root}")
        if args.out is not None:
            count = sum(o.lookup is not None and not o.is_everywhere for o in outcomes)
            ui.say(f"{count} entries in {args.out}; use them with JITKERN_CACHE_PATH={args.out}")
    if failure is not None:
        raise failure
    num_missing = sum(outcome.source == "missing" for outcome in outcomes)
    if num_missing:
        raise JitkernError(
            f"{num_missing} of {len(outcomes)} missing; the same without --check compiles them"
        )
    return 0


def _of_options(error: ValueError | OSError) -> Exception:
    """Return an error that names the option instead of warm()'s argument; any other is a bug."""
    text = str(error.strerror if isinstance(error, OSError) else error)
    argument, _, reason = text.removeprefix("warm: ").partition(": ")
    if argument == "JITKERN_ARCH":
        return ui.UsageError(text)
    if not text.startswith("warm: ") or argument not in _OPTIONS:
        return error
    for size in SIZES:
        reason = reason.replace(f"{size.name}s", size.option)
    reason = reason.replace("archs=['9.0']", "--arch 9.0")
    if argument == "files":
        return JitkernError(f"--replay: {reason}")
    return ui.UsageError(f"warm: {_OPTIONS[argument]}: {reason}")


def _cells(outcome: Outcome) -> tuple[str, ...]:
    ms = "-" if outcome.ms is None else ui.ms_text(outcome.ms)
    size = "-" if outcome.bytes is None else f"{outcome.bytes:,}"
    return (outcome.name, outcome.parameters, outcome.arch or "-", outcome.source, ms, size)


def _tally(outcomes: Sequence[Outcome]) -> str:
    sources = [outcome.source for outcome in outcomes]
    order = ("compiled", "cached", "shipped", "memo", "missing", "failed")
    parts = [f"{sources.count(source)} {source}" for source in order if source in sources]
    total = sum(outcome.bytes or 0 for outcome in outcomes)
    return f"{', '.join(parts)}, {ui.bytes_text(total)}"


def _json(outcomes: Sequence[Outcome], cache: Path, took_s: float) -> dict[str, Any]:
    jobs = [
        {
            "name": outcome.name,
            "parameters": outcome.parameters,
            "arch": outcome.arch,
            "source": outcome.source,
            "ms": outcome.ms,
            "bytes": outcome.bytes,
            "error": None if outcome.error is None else str(outcome.error),
        }
        for outcome in outcomes
    ]
    return {"version": JSON_VERSION, "cache": str(cache), "seconds": took_s, "jobs": jobs}
