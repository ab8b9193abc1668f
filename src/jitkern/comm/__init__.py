"""Ranks that compute together: communicators, with a deadline for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.comm.nccl import PyNCCLCommunicator as PyNCCLCommunicator
from jitkern.comm.nccl import init_pynccl as init_pynccl
from jitkern.comm.peer_comm import PeerCommunicator as PeerCommunicator
from jitkern.comm.peer_memory import PeerMemory as PeerMemory
from jitkern.comm.peer_reduce import PeerReducer as PeerReducer
from jitkern.comm.peer_rows import peer_gather as peer_gather
from jitkern.comm.peer_rows import peer_scatter as peer_scatter
from jitkern.comm.protocol import Communicator as Communicator
from jitkern.comm.protocol import ReduceOp as ReduceOp
from jitkern.comm.torch_comm import TorchCommunicator as TorchCommunicator
from jitkern.names import attach as _attach

if not TYPE_CHECKING:  # a type checker would take every name for one of the package
    __all__, __getattr__, __dir__ = _attach(__name__)
