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
from jitkern.names import NAMES as _NAMES
from jitkern.names import no_attribute as _no_attribute

__all__ = [*_NAMES[__name__]]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        raise _no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
