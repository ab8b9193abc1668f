"""Pools of pinned host memory, and pipelines, engines and rings that copy between them and GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.names import attach as _attach
from jitkern.offload.engine import OffloadEngine as OffloadEngine
from jitkern.offload.monitor import OverlapMonitor as OverlapMonitor
from jitkern.offload.monitor import OverlapStats as OverlapStats
from jitkern.offload.pipeline import PipelineRun as PipelineRun
from jitkern.offload.pipeline import PipelineSlot as PipelineSlot
from jitkern.offload.pipeline import SlotPipeline as SlotPipeline
from jitkern.offload.pool import PinnedPool as PinnedPool
from jitkern.offload.pool import PoolShare as PoolShare
from jitkern.offload.pool import PoolStats as PoolStats
from jitkern.offload.residency import MissPlan as MissPlan
from jitkern.offload.residency import ResidencyMap as ResidencyMap
from jitkern.offload.residency import ResidencyStats as ResidencyStats
from jitkern.offload.ring import DescriptorRing as DescriptorRing
from jitkern.offload.ring import RingServer as RingServer

if not TYPE_CHECKING:  # a type checker would take every name for one of the package
    __all__, __getattr__, __dir__ = _attach(__name__)
