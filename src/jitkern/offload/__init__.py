"""Host memory for GPUs: pools of pinned memory, and what moves blocks between them and the GPU."""

from __future__ import annotations

from jitkern.offload.pipeline import SlotPipeline as SlotPipeline
from jitkern.offload.pool import PinnedPool as PinnedPool
from jitkern.offload.pool import PoolStats as PoolStats
from jitkern.offload.share import PoolHandle as PoolHandle
from jitkern.offload.share import Share as Share
