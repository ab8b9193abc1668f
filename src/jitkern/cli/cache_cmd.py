"""``jitkern cache list | info | clear | export | import | verify``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.cli import filters, ui
from jitkern.env import settings
from jitkern.errors import CacheError

if TYPE_CHECKING:
    from jitkern.cache.bundle import Bundle
    from jitkern.cache.entry import Entry
    from jitkern.cache.store import Cache

SUMMARY = "look at the cache of compiled kernels, empty it, carry it elsewhere"
DESCRIPTION = "The cache of compiled kernels: JITKERN_CACHE_DIR, else ~/.cache/jitkern."
EXAMPLE = """
jitkern cache list
jitkern cache export kernels.jkb --arch 9.0
jitkern cache import kernels.jkb
"""
_CODE = "It is code, which runs wherever it is loaded: import only what you would install."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(name: str, summary: str, example: str, more: str = "") -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}. {more}".rstrip()
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=summary, description=description, example=example
        )
        made.set_defaults(action=_ACTIONS[name])
        ui.add_json(made)
        return made

    listed = add("list", "list the entries", "jitkern cache list --op store --unused-for 30d")
    add("info", "show where the caches are and how full", "jitkern cache info")
    clear = add(
        "clear",
        "remove every entry, or those chosen; what jitkern has not written stays",
        "jitkern cache clear --unused-for 30d\njitkern cache clear --down-to 1G",
    )
    clear.add_argument(
        "--down-to",
        type=ui.byte_count,
        metavar="SIZE",
        help="only the least recently used, until SIZE remains: 512M, 1G",
    )
    clear.add_argument(
        "--dry-run", action="store_true", help="only list what would go, and what would stay"
    )
    export = add(
        "export", "write entries into one file", "jitkern cache export kernels.jkb --arch 9.0"
    )
    export.add_argument("file", type=Path, metavar="FILE", help="the bundle to write")
    for chooser in (listed, clear, export):
        filters.add_options(chooser)
    imported = add(
        "import", "publish the entries of a bundle", "jitkern cache import kernels.jkb", _CODE
    )
    imported.add_argument("file", type=Path, metavar="FILE", help="a bundle")
    imported.add_argument(
        "--trust", action="store_true", help="import even what other users could have written"
    )
    verify = add(
        "verify", "check every checksum of a bundle or of the cache", "jitkern cache verify k.jkb"
    )
    verify.add_argument(
        "file", type=Path, metavar="FILE", nargs="?", help="a bundle; without it, the cache itself"
    )
    for reader in (imported, verify):
        reader.add_argument(
            "--max-bytes",
            type=ui.byte_count,
            metavar="N",
            help="unpacked bytes that a bundle may have, such as 4G; default 1G",
        )


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    status: int = args.action(args)
    return status


def _user_cache() -> Cache:
    from jitkern.cache.search import user_cache

    return user_cache()


def _list(args: argparse.Namespace) -> int:
    cache = _user_cache()
    everything = cache.entries()
    entries = sorted(
        filter(filters.chosen_by(args), everything),
        key=lambda e: (e.name, ui.natural(e.args), ui.natural(e.arch), e.variant),
    )
    size_bytes = sum(entry.bytes for entry in entries)
    if args.json:
        ui.say_json(
            directory=cache.root,
            not_searched=_untrusted(cache),
            all_entries=len(everything),
            bytes=size_bytes,
            entries=[
                {
                    "op": entry.name,
                    "parameters": entry.args,
                    "arch": entry.arch,
                    "route": entry.route,
                    "variant": entry.variant,
                    "bytes": entry.bytes,
                    "last_used_unix_s": round(entry.last_used, 3),
                    "path": entry.path,
                }
                for entry in entries
            ],
        )
        return 0
    if entries:
        now_unix_s = time.time()
        rows = [
            (
                entry.name,
                entry.args or "-",
                entry.arch or "-",
                entry.route,
                entry.variant,
                f"{entry.bytes:,}",
                _ago(now_unix_s - entry.last_used),
            )
            for entry in entries
        ]
        columns = ("op", "parameters", "arch", "route", "built by", ">bytes", "last used")
        ui.console().print(ui.table(columns, rows))
    count = _entries(len(entries))
    if filters.given(args):
        count = f"{len(entries)} of {_entries(len(everything))}"
    ui.say(f"{count}, {ui.bytes_text(size_bytes)} in {cache.root}")
    if reason := _untrusted(cache):
        ui.say(f"not searched: {reason}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from jitkern.cache.search import caches

    max_bytes = settings().cache_max_bytes
    found: list[dict[str, Any]] = []
    for origin, _source, cache in caches():
        entries = cache.entries()
        found.append(
            {
                "origin": origin,
                "directory": str(cache.root),
                "entries": len(entries),
                "bytes": sum(entry.bytes for entry in entries),
                "rights": _rights(cache),
                "not_searched": _untrusted(cache),
            }
        )
    if args.json:
        ui.say_json(caches=found, max_bytes=max_bytes)
        return 0
    rows = [
        (
            one["origin"],
            one["directory"],
            str(one["entries"]),
            ui.bytes_text(one["bytes"]),
            one["rights"],
        )
        for one in found
    ]
    ui.console().print(ui.table(("cache", "directory", ">entries", ">size", "rights"), rows))
    for one in found:
        if one["not_searched"]:
            ui.say(f"not searched: {one['not_searched']}")
    ui.say(f"the least recently used go beyond {ui.bytes_text(max_bytes)}")
    return 0


def _untrusted(cache: Cache) -> str:
    """Say why nothing is loaded from `cache`; empty where that is not so."""
    try:
        cache.place.check()
    except CacheError as error:
        return str(error)
    return ""


def _rights(cache: Cache) -> str:
    if _untrusted(cache):
        return "others can write to it"
    if cache.read_only:
        return "read only" if cache.root.is_dir() else "absent"
    if not cache.root.exists():
        return "made by the first compile"
    try:
        ui.require_writable(cache.root, "")
    except CacheError:
        return "cannot be written"
    return "writable"


def _clear(args: argparse.Namespace) -> int:
    cache = _user_cache()
    everything = cache.entries()
    only: set[str] | None = None
    if args.down_to is not None:
        if filters.given(args):
            raise ui.UsageError(
                "cache clear: --down-to: it chooses by last use, expected without "
                "--op, --arch, --unused-for and --larger-than"
            )
        only = set(cache.beyond(args.down_to))
    elif filters.given(args):
        only = set(map(str, filter(filters.chosen_by(args), everything)))
    cleared = cache.clear(only=only, dry_run=args.dry_run)
    if args.json:
        ui.say_json(
            directory=cache.root,
            dry_run=args.dry_run,
            removed=cleared.removed,
            left_alone=cleared.left,
        )
        return 0
    if args.dry_run:
        for name in cleared.removed:
            ui.say(name)
    for name in cleared.left:
        ui.say(f"left alone, for jitkern has not written it: {name}")
    done = "would be removed" if args.dry_run else "removed"
    left = ""
    if only is not None:
        gone = set(cleared.removed)
        sizes = [entry.bytes for entry in everything if str(entry) not in gone]
        left = f"; what is left: {_entries(len(sizes))}, {ui.bytes_text(sum(sizes))}"
    ui.say(f"{_entries(len(cleared.removed))} {done} from {cache.root}{left}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from jitkern.cache.bundle import export_bundle

    if args.file.is_dir():
        raise CacheError(f"{args.file}: a directory, expected a file to write")
    # What the kernels need goes along with them.
    select = filters.chosen_by(args, host_code_too=True)
    cache = _user_cache()
    everything = cache.entries()
    if not any(map(select, everything)):
        if everything:
            raise CacheError(
                f"{cache.root}: nothing to export: none of {_entries(len(everything))} is what was "
                "asked for; jitkern cache list shows them"
            )
        if damaged := cache.verify():
            raise CacheError(f"{cache.root}: nothing to export, and damaged: {damaged[0]}")
        raise CacheError(f"{cache.root}: nothing to export; build something with jitkern warm")
    count = export_bundle(cache, args.file, select)
    size_bytes = args.file.stat().st_size
    if args.json:
        ui.say_json(file=args.file, entries=count, bytes=size_bytes)
        return 0
    ui.say(f"{_entries(count)} in {args.file} ({ui.bytes_text(size_bytes)})")
    return 0


def _import(args: argparse.Namespace) -> int:
    from jitkern.cache.bundle import MAX_UNPACKED_BYTES, import_bundle

    _require_file(args.file)
    cache = _user_cache()
    brought: list[dict[str, Any]] = []

    def show(bundle: Bundle) -> None:
        brought.extend(map(_brought, bundle.entries))
        if not args.json:
            _show(bundle, brought)

    count = import_bundle(
        cache,
        args.file,
        trust=args.trust,
        max_unpacked_bytes=args.max_bytes or MAX_UNPACKED_BYTES,
        show=show,
    )
    if args.json:
        ui.say_json(file=args.file, directory=cache.root, entries=brought)
        return 0
    ui.say(f"{_entries(count)} imported into {cache.root}")
    return 0


def _show(bundle: Bundle, brought: list[dict[str, Any]]) -> None:
    from jitkern.cache.strangers import owner_and_mode

    rows = [
        (
            one["op"],
            one["parameters"] or "-",
            one["arch"] or "-",
            one["variant"],
            f"{one['bytes']:,}",
        )
        for one in brought
    ]
    ui.console().print(ui.table(("op", "parameters", "arch", "built by", ">bytes"), rows))
    ui.say(f"{bundle.file}: {_entries(len(brought))}, {owner_and_mode(bundle.status)}")


def _brought(entry: Entry) -> dict[str, Any]:
    key = entry.key
    return {
        "op": key.op,
        "parameters": ", ".join(key.args),
        "arch": key.arch,
        "route": key.route,
        "variant": entry.variant,
        "bytes": sum(map(len, entry.files.values())),
    }


def _verify(args: argparse.Namespace) -> int:
    from jitkern.cache.bundle import MAX_UNPACKED_BYTES, read_bundle

    if args.file is not None:
        _require_file(args.file)
        bundle = read_bundle(args.file, max_unpacked_bytes=args.max_bytes or MAX_UNPACKED_BYTES)
        _verified(args, args.file, len(bundle.entries), [])
        return 0
    if args.max_bytes is not None:
        raise ui.UsageError("cache verify: --max-bytes: expected along with FILE, a bundle")
    cache = _user_cache()
    problems = cache.verify()
    _verified(args, cache.root, len(cache.entries()), problems)
    if problems:
        raise CacheError(
            f"{cache.root}: {len(problems)} damaged; they count as absent and are replaced on use"
        )
    return 0


def _verified(args: argparse.Namespace, what: Path, count: int, problems: list[str]) -> None:
    if args.json:
        ui.say_json(verified=what, entries=count, problems=problems)
        return
    for problem in problems:
        ui.say(problem)
    if not problems:
        ui.say(f"{what}: ok, {_entries(count)}")


def _require_file(file: Path) -> None:
    if not file.is_file():
        wrong = "not a regular file, expected a bundle" if file.exists() else "no such bundle"
        raise CacheError(f"{file}: {wrong}")


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _ago(seconds: float) -> str:
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f} {unit} ago"
    return "now"


_ACTIONS = {
    "list": _list,
    "info": _info,
    "clear": _clear,
    "export": _export,
    "import": _import,
    "verify": _verify,
}
