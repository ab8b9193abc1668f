"""``jitkern cache list | info | clear | export | import | verify``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.cli import ui
from jitkern.env import settings
from jitkern.errors import CacheError

if TYPE_CHECKING:
    from jitkern.cache.bundle import Bundle
    from jitkern.cache.entry import Entry, EntryInfo
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
        return made

    add("list", "list the entries", "jitkern cache list")
    add("info", "show where the caches are and how full", "jitkern cache info")
    clear = add(
        "clear", "remove every entry; what jitkern has not written stays", "jitkern cache clear"
    )
    clear.add_argument(
        "--dry-run", action="store_true", help="only list what would go, and what would stay"
    )
    export = add(
        "export", "write entries into one file", "jitkern cache export kernels.jkb --arch 9.0"
    )
    export.add_argument("file", type=Path, metavar="FILE", help="the bundle to write")
    export.add_argument(
        "--op", type=ui.names, action="extend", metavar="OP[,OP]", help="only these ops"
    )
    export.add_argument(
        "--arch", type=ui.archs, action="extend", metavar="A[,A]", help="only these archs"
    )
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


def _list(_: argparse.Namespace) -> int:
    cache = _user_cache()
    entries = sorted(
        cache.entries(), key=lambda e: (e.name, ui.natural(e.args), ui.natural(e.arch), e.variant)
    )
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
    ui.say(_summary(entries, str(cache.root)))
    return 0


def _info(_: argparse.Namespace) -> int:
    from jitkern.cache.search import caches

    rows = []
    for origin, _source, cache in caches():
        entries = cache.entries()
        size = ui.bytes_text(sum(entry.bytes for entry in entries))
        rows.append((origin, str(cache.root), str(len(entries)), size, _rights(cache)))
    ui.console().print(ui.table(("cache", "directory", ">entries", ">size", "rights"), rows))
    ui.say(f"the least recently used go beyond {ui.bytes_text(settings().cache_max_bytes)}")
    return 0


def _rights(cache: Cache) -> str:
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
    cleared = cache.clear(dry_run=args.dry_run)
    if args.dry_run:
        for name in cleared.removed:
            ui.say(name)
    for name in cleared.left:
        ui.say(f"left alone, for jitkern has not written it: {name}")
    done = "would be removed" if args.dry_run else "removed"
    ui.say(f"{_entries(len(cleared.removed))} {done} from {cache.root}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from jitkern.cache.bundle import export_bundle

    wanted_archs = {str(arch) for arch in args.arch or ()}

    def select(entry: EntryInfo) -> bool:
        # Host code has no arch and goes with every choice of archs.
        arch_fits = not wanted_archs or not entry.arch or entry.arch in wanted_archs
        return arch_fits and (not args.op or entry.name in args.op)

    cache = _user_cache()
    if not any(select(entry) for entry in cache.entries()):
        raise CacheError(f"{cache.root}: nothing to export; build something with jitkern warm")
    count = export_bundle(cache, args.file, select)
    ui.say(f"{_entries(count)} in {args.file} ({ui.bytes_text(args.file.stat().st_size)})")
    return 0


def _import(args: argparse.Namespace) -> int:
    from jitkern.cache.bundle import MAX_UNPACKED_BYTES, import_bundle

    _require_file(args.file)
    cache = _user_cache()
    count = import_bundle(
        cache,
        args.file,
        trust=args.trust,
        max_unpacked_bytes=args.max_bytes or MAX_UNPACKED_BYTES,
        show=_show,
    )
    ui.say(f"{_entries(count)} imported into {cache.root}")
    return 0


def _show(bundle: Bundle) -> None:
    from jitkern.cache.trust import owner_and_mode

    columns = ("op", "parameters", "arch", "built by", ">bytes")
    ui.console().print(ui.table(columns, map(_brought, bundle.entries)))
    entries = _entries(len(bundle.entries))
    ui.say(f"{bundle.file}: {entries}, {owner_and_mode(bundle.status)}")


def _brought(entry: Entry) -> tuple[str, ...]:
    describe = entry.key.describe
    args = ", ".join(describe.get("args", ()))
    size_bytes = sum(map(len, entry.files.values()))
    op, arch = describe.get("op", entry.key.name), describe.get("arch")
    return (op, args or "-", arch or "-", entry.variant, f"{size_bytes:,}")


def _verify(args: argparse.Namespace) -> int:
    from jitkern.cache.bundle import MAX_UNPACKED_BYTES, read_bundle

    if args.file is not None:
        _require_file(args.file)
        bundle = read_bundle(args.file, max_unpacked_bytes=args.max_bytes or MAX_UNPACKED_BYTES)
        ui.say(f"{args.file}: ok, {_entries(len(bundle.entries))}")
        return 0
    cache = _user_cache()
    problems = cache.verify()
    for problem in problems:
        ui.say(problem)
    if problems:
        raise CacheError(
            f"{cache.root}: {len(problems)} damaged; they count as absent and are replaced on use"
        )
    ui.say(f"{cache.root}: ok, {_entries(len(cache.entries()))}")
    return 0


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise CacheError(f"{file}: no such bundle")


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


def _summary(entries: list[EntryInfo], root: str) -> str:
    return f"{_entries(len(entries))}, {ui.bytes_text(sum(e.bytes for e in entries))} in {root}"


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
