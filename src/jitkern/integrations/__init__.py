"""Plug-ins for serving engines, one module each. An engine imports its own; jitkern imports none.

A plug-in replaces functions and classes of the engine by name. It therefore refuses engine versions
that it was not tried with, unless ``JITKERN_ANY_ENGINE=1``. Calls that jitkern does not handle go
to the engine's own code. This is logged once, on a child of the engine's logger, because vLLM
configures no other logger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from jitkern.env import process_environment, settings
from jitkern.errors import UnsupportedError
from jitkern.names import no_attribute

__all__ = ["plug_into_sglang", "plug_into_vllm"]
_ENGINES = ("minisgl", "sglang", "vllm")

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        if name not in _ENGINES:
            raise no_attribute(__name__, name)
        return import_module(f"{__name__}.{name}")  # without the engine, its ImportError


def __dir__() -> list[str]:
    return sorted([*__all__, *_ENGINES])


_logged: set[tuple[str, str]] = set()


def require_version(engine: str, version: str, tried: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless this version of an engine was tried.

    The local part of a version is ignored: 0.33.0+cu129 is 0.33.0 built for another CUDA.
    """
    if version.partition("+")[0] not in tried:
        refuse(engine, f"{engine} {version}, expected {' or '.join(tried)}")


def refuse(engine: str, reason: str) -> None:
    """Raise UnsupportedError unless JITKERN_ANY_ENGINE allows untested engine versions."""
    if not settings().any_engine:
        text = f"jitkern.integrations.{engine}: {reason}"
        raise UnsupportedError(f"{text}; JITKERN_ANY_ENGINE=1 takes any version")


def log_once(engine: str, message: str, reason: object = "") -> None:
    """Log `message` and `reason` at level INFO, the first time for each `message`."""
    if (engine, message) not in _logged:
        _logged.add((engine, message))
        logging.getLogger(f"{engine}.jitkern").info("%s%s", message, reason)


def _plug_into(engine: str) -> None:
    """Entry point: enable the plug-in if the engine's list of plug-ins names jitkern."""
    names = process_environment().get(f"{engine.upper()}_PLUGINS", "")
    if "jitkern" in names.replace(",", " ").split():
        import_module(f"jitkern.integrations.{engine}").plugin()


plug_into_vllm: Callable[[], None] = partial(_plug_into, "vllm")
plug_into_sglang: Callable[[], None] = partial(_plug_into, "sglang")
