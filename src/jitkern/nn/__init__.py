"""Modules whose parameters are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.names import attach as _attach
from jitkern.nn.tp_embedding import TPEmbedding as TPEmbedding

if not TYPE_CHECKING:  # a type checker would take every name for one of the package
    __all__, __getattr__, __dir__ = _attach(__name__)
