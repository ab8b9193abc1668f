"""Types in the signatures and results of public functions, for annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.cache.stats import KernelStats as KernelStats
from jitkern.comm.peer_reduce import AllReduceAlgorithm as AllReduceAlgorithm
from jitkern.env import FreezeMode as FreezeMode
from jitkern.jit.device import Wrapper as Wrapper
from jitkern.jit.loader import DeclaredWrapper as DeclaredWrapper
from jitkern.jit.loader import File as File
from jitkern.jit.loader import Files as Files
from jitkern.jit.template import CppArgs as CppArgs
from jitkern.names import attach as _attach
from jitkern.nn.tp_embedding import EmbeddingAlgorithm as EmbeddingAlgorithm
from jitkern.offload.engine import Blocks as Blocks
from jitkern.offload.pipeline import Copy as Copy
from jitkern.ops._ops import FormatName as FormatName
from jitkern.ops.merge import LseBase as LseBase
from jitkern.ops.merge import LseLayout as LseLayout
from jitkern.ops.store_rows import ScaleRule as ScaleRule
from jitkern.ops.unpack import Ring as Ring
from jitkern.warming import Outcome as Outcome

if not TYPE_CHECKING:  # a type checker would take every name for one of the package
    __all__, __getattr__, __dir__ = _attach(__name__)
