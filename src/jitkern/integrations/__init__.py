"""Plug-ins for serving engines, one module each. An engine imports its own; jitkern imports none.

A plug-in replaces functions and classes of the engine by name, so it refuses versions that it was
not tried with, unless ``JITKERN_ANY_ENGINE=1``. What jitkern does not take goes to the engine's own
code. That is logged once, below the engine's logger, since vLLM gives a handler to no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module

from jitkern.env import process_environment, settings
from jitkern.errors import UnsupportedError

_said: set[tuple[str, str]] = set()


def require_version(engine: str, found: str, tried: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless this version of an engine was tried, or any is to be taken."""
    if found not in tried and not settings().any_engine:
        text = f"jitkern.integrations.{engine}: {engine} {found}, expected {' or '.join(tried)}"
        raise UnsupportedError(f"{text}; JITKERN_ANY_ENGINE=1 takes any version")


def say_once(engine: str, what: str, why: object = "") -> None:
    """Log ``what`` and ``why`` the first time that ``what`` comes, at level INFO."""
    if (engine, what) not in _said:
        _said.add((engine, what))
        logging.getLogger(f"{engine}.jitkern").info("%s%s", what, why)


def _plug_into(engine: str) -> None:
    """Entry point: enable the plug-in if the engine's list of plug-ins names jitkern."""
    names = process_environment().get(f"{engine.upper()}_PLUGINS", "")
    if "jitkern" in names.replace(",", " ").split():
        import_module(f"jitkern.integrations.{engine}").plugin()


plug_into_vllm: Callable[[], None] = partial(_plug_into, "vllm")
plug_into_sglang: Callable[[], None] = partial(_plug_into, "sglang")
