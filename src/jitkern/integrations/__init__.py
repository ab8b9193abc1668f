"""Plug-ins for serving engines, one module each. An engine imports its own; jitkern imports none.

A plug-in replaces functions and classes of the engine by name, so it refuses versions that it was
not tried with, unless ``JITKERN_ANY_ENGINE=1``. A layout that jitkern does not take goes to the
engine's own code, which is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

from jitkern.env import process_environment, settings
from jitkern.errors import UnsupportedError

log: logging.Logger = logging.getLogger("jitkern")


def require_version(engine: str, found: str, tried: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless this version of an engine was tried, or any is to be taken."""
    if found not in tried and not settings().any_engine:
        text = f"jitkern.integrations.{engine}: {engine} {found}, expected {' or '.join(tried)}"
        raise UnsupportedError(f"{text}; JITKERN_ANY_ENGINE=1 takes any version")


@cache
def say_once(text: str) -> None:
    """Log a line, at level INFO, the first time that it comes."""
    log.info("%s", text)


def _plug_into(engine: str) -> None:
    """Import the plug-in and call it if the engine's variable names jitkern among its plug-ins."""
    names = process_environment().get(f"{engine.upper()}_PLUGINS", "")
    if "jitkern" in names.replace(",", " ").split():
        import_module(f"jitkern.integrations.{engine}").plugin()


plug_into_vllm: Callable[[], None] = partial(_plug_into, "vllm")
plug_into_sglang: Callable[[], None] = partial(_plug_into, "sglang")
"""Entry points of the engines, which call them in each process."""
