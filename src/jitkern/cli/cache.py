"""``jitkern cache info | clear``."""

from __future__ import annotations

import argparse

from jitkern.cache.get import Searched, caches, user_cache
from jitkern.cli import ui
from jitkern.env import settings
from jitkern.errors import CacheError
from jitkern.fs import size_text

SUMMARY = "show the caches of compiled kernels, or empty yours"
DESCRIPTION = "Show the caches of compiled kernels and libraries, or empty yours."
EXAMPLE = "jitkern cache info"
ACTIONS = {
    "info": "list the caches in the order of the search, with their sizes; the default",
    "clear": """\
delete the entries of JITKERN_CACHE_DIR (default: ~/.cache/jitkern), including a host module that
was built here; other files stay; `jitkern cache info` shows how many entries there are""",
}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", dest="action")
    for name, text in ACTIONS.items():
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            example=f"jitkern cache {name}",
        )
        action.set_defaults(parser=action)
    parser.usage = "jitkern cache [-h] [ACTION]"  # argparse shows it as required


def run(args: argparse.Namespace) -> int:
    if args.action == "clear":
        cache = user_cache()
        ui.say(f"{ui.entries(cache.clear())} removed from {cache.root}")
        return 0
    for searched in caches():
        ui.say(f"{searched.origin:18} {describe(searched)}")
    ui.say(f"JITKERN_CACHE_DIR holds at most {size_text(settings().cache_max_bytes)}")
    return 0


def require_folder(searched: Searched) -> None:
    """Raise CacheError for a folder of JITKERN_CACHE_PATH that does not exist."""
    cache = searched.cache
    if cache.read_only and searched.source != "shipped" and not cache.root.is_dir():
        raise CacheError(f"{cache.root}: no such directory; make it, or take it out of the path")


def describe(searched: Searched) -> str:
    """Return the folder, the number of entries, their size, and why nothing is loaded if so."""
    cache = searched.cache
    try:
        require_folder(searched)
    except CacheError as error:
        return str(error)
    sizes = [entry.size_bytes for entry in cache.entries()]
    text = f"{cache.root}: {ui.entries(len(sizes))}, {size_text(sum(sizes))}"
    try:
        cache.check()
    except CacheError as error:
        return f"{text}; not searched: {error}"
    return text
