"""Pools of pinned host memory, and pipelines, engines and rings that copy between them and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.names import NAMES as _NAMES
from jitkern.names import no_attribute as _no_attribute
from jitkern.offload.engine import OffloadEngine as OffloadEngine
from jitkern.offload.monitor import OverlapMonitor as OverlapMonitor
from jitkern.offload.monitor import OverlapSnapshot as OverlapSnapshot
from jitkern.offload.pipeline import Run as Run
from jitkern.offload.pipeline import Slot as Slot
from jitkern.offload.pipeline import SlotPipeline as SlotPipeline
from jitkern.offload.pool import PinnedPool as PinnedPool
from jitkern.offload.pool import PoolStats as PoolStats
from jitkern.offload.pool import Share as Share
from jitkern.offload.ring import DescriptorRing as DescriptorRing
from jitkern.offload.ring import RingServer as RingServer
from jitkern.ops.block_buffers import BlockBuffers as BlockBuffers
from jitkern.ops.block_buffers import LayerSignals as LayerSignals
from jitkern.ops.copy_blocks import copy_blocks as copy_blocks
from jitkern.ops.memcpy_2d import memcpy_2d_async as memcpy_2d_async

__all__ = [*_NAMES[__name__]]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        raise _no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
