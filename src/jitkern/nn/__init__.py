"""Modules whose parameters are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.nn.tp_embedding import TPEmbedding as TPEmbedding

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        from jitkern.names import no_attribute

        raise no_attribute(__name__, name)
