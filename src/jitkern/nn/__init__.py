"""Modules whose parameters are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.names import NAMES as _NAMES
from jitkern.names import no_attribute as _no_attribute
from jitkern.nn.tp_embedding import TPEmbedding as TPEmbedding

__all__ = [*_NAMES[__name__]]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        raise _no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
