"""``jitkern warm``: compile kernels before they are needed, on any machine."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.arch import requested_archs
from jitkern.cache.get import user_cache
from jitkern.cli import ui
from jitkern.errors import JitkernError, WarmError
from jitkern.ops._ops import OPS, SIZES, op_names

if TYPE_CHECKING:
    from jitkern.warming import Outcome

SUMMARY = "compile kernels before they are needed, with or without a GPU"
DESCRIPTION = """\
Compile kernels into the cache, for the archs of --arch, else of JITKERN_ARCH, else of the GPUs
present. Needs no GPU. The host module is built first, so that a first request pays nothing; without
options nothing else is. What the cache has is not built again."""
_WITH_KERNELS = [op for op in OPS if op.has_kernels]
_NO_KERNELS = ", ".join(op.function for op in OPS if not op.has_kernels)
EXAMPLE = f"""
jitkern warm --element-size 656
jitkern warm --element-size 256,1024 --op {",".join(op.function for op in _WITH_KERNELS[:2])} \
--arch 9.0,10.0 --out kernels/
jitkern warm --element-size 1024 --head-dim 64,128 --arch 9.0
jitkern warm --replay run.jsonl --arch 9.0
jitkern warm --replay run.jsonl --check
"""
COLUMNS = ("op", "parameters", "arch", "source", ">ms", ">bytes")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for size in SIZES:
        ops = ", ".join(op.function for op in _WITH_KERNELS if op.sized_by == size.name)
        text = f"{size.meaning}, for {ops}; several as 64,1k or by repeating the option"
        sizes = ui.sizes(size)
        add(size.option, type=sizes, action="extend", metavar=size.unit, help=text)
    text = f"of {', '.join(op_names())}; default: all of which a size is given; there is nothing "
    text += f"to compile for {_NO_KERNELS}"
    add("--op", type=ui.names, action="extend", metavar="OP[,OP]", help=text)
    text = "such as 9.0,10.0; default: JITKERN_ARCH, else the GPUs present; of --replay those that "
    text += "were recorded"
    add("--arch", type=ui.archs, action="extend", metavar="A[,A]", help=text)
    text = "build what JITKERN_RECORD=FILE has written; it names sources and flags to compile: "
    text += "replay only what you would run; may be repeated"
    add("--replay", type=Path, action="append", metavar="FILE", help=text)
    text = "compile nothing: list what is missing, and exit with 1 if anything is"
    add("--check", action="store_true", help=text)
    text = "also write all that was asked for into DIR, a cache for JITKERN_CACHE_PATH"
    add("--out", type=Path, metavar="DIR", help=text)
    text = "compiles at a time; default: the cores, as far as memory allows"
    add("--jobs", type=int, metavar="N", help=text)
    ui.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Build what is missing, and print the result of each job."""
    from jitkern.warming import default_threads, warm

    start = time.perf_counter()
    sizes = {f"{size.name}s": getattr(args, size.name) or () for size in SIZES}
    if args.arch and not (args.replay or any(sizes.values())):
        options = ", ".join(size.option for size in SIZES)
        raise ui.UsageError(f"warm: --arch: expected along with {options} or --replay")
    threads = default_threads() if args.jobs is None else args.jobs
    failure: WarmError | None = None
    with ui.progress() as tell:
        try:
            if any(sizes.values()) and not args.arch and not requested_archs():
                ui.require_torch()  # which is asked for the GPUs
            outcomes: Sequence[Outcome] = warm(
                args.op,
                archs=args.arch,
                files=args.replay or (),
                check=args.check,
                out=args.out,
                threads=threads,
                progress=lambda one, done, steps: tell(str(one), done, steps),
                **sizes,
            )
        except WarmError as error:
            outcomes, failure = error.outcomes, error
        except ValueError as error:
            raise _of_options(error) from error
    took_s, cache = time.perf_counter() - start, user_cache().root
    if args.json:
        names = ("name", "parameters", "arch", "source", "ms", "bytes", "error")
        jobs = [{name: getattr(one, name) for name in names} for one in outcomes]
        ui.say_json(cache=cache, seconds=took_s, jobs=jobs)
    else:
        shown = [one for one in outcomes if one.lookup is None or not args.check]
        if shown:
            ui.say(ui.table(COLUMNS, map(_cells, shown)))
        ui.say(f"{_tally(outcomes)} in {took_s:.1f} s, {threads} at a time, in {cache}")
        if args.out is not None:
            count = sum(one.is_to_copy for one in outcomes)
            ui.say(f"{count} entries in {args.out}; use them with JITKERN_CACHE_PATH={args.out}")
    if failure is not None:
        raise failure
    if missing := sum(one.source == "missing" for one in outcomes):
        raise JitkernError(
            f"{missing} of {len(outcomes)} missing; the same without --check compiles them"
        )
    return 0


def _of_options(error: ValueError) -> Exception:
    """Return an error that names options instead of warm()'s arguments; any other is a bug."""
    text = str(error)
    if text.startswith("warm: files: "):
        return JitkernError(text.replace("warm: files", "--replay", 1))
    if not text.startswith(("warm: ", "JITKERN_ARCH: ")):
        return error
    text = text.replace("archs=['9.0']", "--arch 9.0")
    options = {"ops": "--op", "archs": "--arch", "out": "--out", "threads": "--jobs"}
    for argument, option in {**options, **{f"{s.name}s": s.option for s in SIZES}}.items():
        text = re.sub(rf"\b{argument}\b", option, text)
    return ui.UsageError(text)


def _cells(one: Outcome) -> tuple[str, ...]:
    ms = "-" if one.ms is None else ui.ms_text(one.ms)
    size = "-" if one.bytes is None else f"{one.bytes:,}"
    return (one.name, one.parameters, one.arch or "-", one.source, ms, size)


def _tally(outcomes: Sequence[Outcome]) -> str:
    sources = [one.source for one in outcomes]
    order = ("compiled", "cached", "shipped", "memo", "missing", "failed")
    parts = [f"{sources.count(source)} {source}" for source in order if source in sources]
    total = sum(one.bytes or 0 for one in outcomes)
    return f"{', '.join(parts)}, {ui.bytes_text(total)}"
