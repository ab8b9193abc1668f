"""``jitkern cache list | info | clear``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from jitkern.cache.entry import Entry
from jitkern.cache.get import caches, user_cache
from jitkern.cache.store import Cache
from jitkern.cli import ui
from jitkern.env import settings
from jitkern.errors import CacheError
from jitkern.ops._ops import op_names

SUMMARY = "look at the cache of compiled kernels, empty it"
DESCRIPTION = "The cache of compiled kernels: JITKERN_CACHE_DIR, else ~/.cache/jitkern."
EXAMPLE = """
jitkern cache list
jitkern cache clear --unused-for 30d
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
    ) -> argparse.ArgumentParser:
        text = f"{summary[0].upper()}{summary[1:]}."
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=summary, description=text, example=f"jitkern cache {name}{example}"
        )
        made.set_defaults(run=run)
        return made

    listed = add("list", _list, "list the entries", " --op store --unused-for 30d")
    info = add("info", _info, "show where the caches are and how full", "")
    text = "remove the sound entries, or those chosen, which list shows; anything else stays"
    clear = add("clear", _clear, text, " --unused-for 30d")
    for parser in (listed, info):
        ui.add_json(parser)
    for parser in (listed, clear):
        option = parser.add_argument
        text = "only these ops or kernels"
        option("--op", type=ui.names, action="extend", metavar="OP[,OP]", help=text)
        text = "only these archs"
        option("--arch", type=ui.archs, action="extend", metavar="A[,A]", help=text)
        text = "only what was used last before AGE: 12h, 30d, 8w"
        option("--unused-for", type=ui.age_s, metavar="AGE", help=text)


def _chosen_by(args: argparse.Namespace) -> Callable[[Entry], bool]:
    """Return a function that tells whether an entry fits all options; host code has no arch."""
    # An entry of jitkern's own has the op's short name; one of a user any name, a public one too.
    short = op_names()
    ops = {name for op in args.op or () for name in (op, short.get(op, op))}
    archs = {str(arch) for arch in args.arch or ()}
    before_unix_s = time.time() - (args.unused_for or 0)
    return lambda entry: (
        (not args.op or entry.key.op in ops)
        and (not args.arch or entry.key.arch in archs)
        and (args.unused_for is None or entry.last_used < before_unix_s)
    )


def _list(args: argparse.Namespace) -> int:
    cache = user_cache()
    everything = cache.entries()
    entries = sorted(
        filter(_chosen_by(args), everything),
        key=lambda e: (e.key.op, ui.natural(", ".join(e.key.args)), ui.natural(e.key.arch)),
    )
    size_bytes = sum(entry.size_bytes for entry in entries)
    if args.json:
        shown = [{**_shown(e), "last_used_unix_s": e.last_used, "path": e.path} for e in entries]
        directory = {"directory": cache.root, "not_searched": _untrusted(cache)}
        ui.say_json(**directory, all_entries=len(everything), bytes=size_bytes, entries=shown)
        return 0
    if entries:
        _print_entries(entries)
    count = f"{len(entries)} of " if len(entries) < len(everything) else ""
    ui.say(f"{count}{_entries(len(everything))}, {ui.bytes_text(size_bytes)} in {cache.root}")
    if reason := _untrusted(cache):
        ui.say(f"not searched: {reason}")
    return 0


def _info(args: argparse.Namespace) -> int:
    max_bytes = settings().cache_max_bytes
    found: list[dict[str, Any]] = []
    for origin, _source, cache in caches():
        sizes = [entry.size_bytes for entry in cache.entries()]
        described = {"origin": origin, "directory": str(cache.root), "entries": len(sizes)}
        found.append({**described, "bytes": sum(sizes), "not_searched": _untrusted(cache)})
    if args.json:
        ui.say_json(caches=found, max_bytes=max_bytes)
        return 0
    rows = [map(str, {**one, "bytes": ui.bytes_text(one["bytes"])}.values()) for one in found]
    ui.say(ui.table(("cache", "directory", "entries", "size", "not searched"), rows))
    ui.say(f"the least recently used go beyond {ui.bytes_text(max_bytes)}")
    return 0


def _untrusted(cache: Cache) -> str:
    """Say why nothing is loaded from `cache`; empty if it is."""
    try:
        cache.check()
    except CacheError as error:
        return str(error)
    return ""


def _clear(args: argparse.Namespace) -> int:
    cache = user_cache()
    removed = cache.clear(_chosen_by(args))
    ui.say(f"{_entries(removed)} removed from {cache.root}; {len(cache.paths())} left")
    return 0


def _shown(entry: Entry) -> dict[str, Any]:
    key = entry.key
    described = {"op": key.op, "parameters": ", ".join(key.args), "arch": key.arch}
    return {**described, "route": key.route, "variant": entry.variant, "bytes": entry.size_bytes}


def _print_entries(entries: Sequence[Entry]) -> None:
    columns = ("op", "parameters", "arch", "route", "built by", "bytes", "last used")
    now_unix_s = time.time()
    rows = [
        [*(str(value) or "-" for value in _shown(one).values()), _ago(now_unix_s - one.last_used)]
        for one in entries
    ]
    ui.say(ui.table(columns, rows))


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _ago(seconds: float) -> str:
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f} {unit} ago"
    return "now"
