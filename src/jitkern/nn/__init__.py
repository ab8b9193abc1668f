"""Modules whose parameters are split over ranks."""

from __future__ import annotations

from jitkern.nn.tp_embedding import TPEmbedding as TPEmbedding
