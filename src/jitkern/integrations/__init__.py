"""Plug-ins for serving engines, one module each. An engine imports its own; jitkern imports none.

A plug-in replaces functions and classes of the engine by name, so it refuses versions that it was
not tried with, unless ``JITKERN_ANY_ENGINE=1``. A layout that jitkern does not take goes to the
engine's own code, which is logged once.
"""

from __future__ import annotations

import logging
from functools import cache

from jitkern.env import process_environment, settings
from jitkern.errors import UnsupportedError

log: logging.Logger = logging.getLogger("jitkern")


def require_version(engine: str, found: str, tried: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless this version of an engine was tried, or any is to be taken."""
    if found not in tried and not settings().any_engine:
        expected = " or ".join(tried)
        raise UnsupportedError(
            f"jitkern.integrations.{engine}: {engine} {found}, expected {expected}; "
            "JITKERN_ANY_ENGINE=1 takes any version"
        )


def is_named(variable: str) -> bool:
    """Tell whether an engine's list of plug-ins names jitkern: installing it is not enough."""
    return "jitkern" in process_environment().get(variable, "").replace(",", " ").split()


@cache
def say_once(text: str) -> None:
    """Log a line, at level INFO, the first time that it comes."""
    log.info("%s", text)


def plug_into_vllm() -> None:
    """Import the plug-in for vLLM if VLLM_PLUGINS names jitkern: vLLM calls this entry point."""
    if is_named("VLLM_PLUGINS"):
        from jitkern.integrations import vllm

        vllm.plugin()
