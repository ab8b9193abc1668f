"""``PeerCommunicator``: small sums over peer memory, other calls by a communicator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jitkern.args import choice_arg, device_arg, int_arg, seconds_arg
from jitkern.comm.args import communicator_arg
from jitkern.comm.peer_memory import PeerMemoryOf
from jitkern.comm.peer_reduce import ALGORITHMS, MAX_RANKS, AllReduceAlgorithm, PeerReducer
from jitkern.comm.protocol import Closing, Communicator, ReduceOp


class PeerCommunicator(Closing):
    """A ``Communicator`` for the ranks of one host, with small sums over peer memory.

    A ``PeerReducer`` runs ``all_reduce`` and ``reduce_scatter`` with ``"sum"`` for fp32, fp16 and
    bf16 tensors of up to ``max_bytes``. All other calls are passed to ``comm``; ``close`` does not
    close it. Up to ``max_bytes``, the sum of an element has the same bits whatever the size of the
    tensor, so a model's sums do not depend on its batch size. Making one is collective, and raises
    the errors of ``PeerMemory``.

    Parameters
    ----------
    comm : Communicator
        At most 8 ranks, on one host.
    group : torch.distributed.ProcessGroup or torch.distributed.Store, optional
        As for ``PeerMemory``, with the same ranks as `comm`.
    max_bytes : int, optional
        The largest tensor that is summed over peer memory, the same on all ranks. Default: 4 MiB
        with two ranks, 1 MiB with more. 0: no peer memory; making it is then not collective.
    algorithm : "auto", "one_shot" or "two_shot"
        As for ``PeerReducer.all_reduce``; the same on all ranks.
    device : torch.device, str or int, optional
        By default the current GPU, or the CPU if there is none.
    device_timeout_s : float
        Seconds that the kernel of a small sum waits for other ranks; ``math.inf``: forever.
    timeout_s : float
        Seconds that the host waits in each step of the set-up, and of ``reset``.
    """

    def __init__(
        self,
        comm: Communicator,
        group: Any = None,
        *,
        max_bytes: int | None = None,
        algorithm: AllReduceAlgorithm = "auto",
        device: torch.device | str | int | None = None,
        device_timeout_s: float = 10.0,
        timeout_s: float = 600.0,
    ) -> None:
        call = "PeerCommunicator"
        communicator_arg(call, comm)
        if max_bytes is None:
            # Two H200s take 0.43 of NCCL's time at 4 MiB, the largest size measured, and a third of
            # it at 1 MiB. More ranks are not measured.
            max_bytes = 4 << 20 if comm.world_size == 2 else 1 << 20
        max_bytes = int_arg(call, "max_bytes", max_bytes, 0)
        choice_arg(call, "algorithm", algorithm, [*ALGORITHMS])
        if comm.world_size > MAX_RANKS:
            expected = f"expected at most {MAX_RANKS}; use it as it is"
            raise ValueError(f"{call}: comm: {comm.world_size} ranks, {expected}")
        device_timeout_s = seconds_arg(call, device_timeout_s, "device_timeout_s", math.inf)
        timeout_s = seconds_arg(call, timeout_s)
        where = device_arg(call, "device", device)
        self._comm, self._algorithm = comm, algorithm
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        self.all_gather, self.broadcast = comm.all_gather, comm.broadcast
        self.send, self.recv, self.barrier = comm.send, comm.recv, comm.barrier
        self._dtypes = (torch.float32, torch.float16, torch.bfloat16)
        self.max_bytes: int = max_bytes if comm.world_size > 1 else 0
        self.reducer: PeerReducer | None = None
        """This rank's part of small sums; None if all sums go to ``comm``."""
        if self.max_bytes == 0:
            return
        most = min(self.max_bytes, 4 << 20)  # larger sums take several rounds
        num_bytes = PeerReducer.workspace_bytes_for(comm.world_size, most)
        ranks: dict[str, Any] = {"rank": comm.rank, "world_size": comm.world_size, "device": where}
        # If one rank took one shot and another one two, sums would be wrong.
        same = {"max_bytes": self.max_bytes, "algorithm": algorithm}
        self._peers = PeerMemoryOf(call, same, num_bytes, group=group, **ranks, timeout_s=timeout_s)
        self.reducer = PeerReducer(
            self._peers.addresses,
            **ranks,
            workspace_bytes=num_bytes,
            device_timeout_s=device_timeout_s,
            owner=self._peers.tensor(num_bytes, torch.uint8),
        )
        self.reducer.reset()
        self._peers.barrier()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place; see ``Communicator.all_reduce``."""
        if self.reducer is not None and self._is_small(x, op):
            self.reducer.all_reduce(x, algorithm=self._algorithm)
        else:
            self._comm.all_reduce(x, op)

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` and write part ``rank`` of it; see ``Communicator.reduce_scatter``."""
        if self.reducer is not None and self._is_small(x, op):
            self.reducer.reduce_scatter(output, x)
        else:
            self._comm.reduce_scatter(output, x, op)

    def _is_small(self, x: Any, op: Any) -> bool:
        try:
            return op == "sum" and 0 < x.nbytes <= self.max_bytes and x.dtype in self._dtypes
        except AttributeError:
            return False  # not a tensor: `comm` raises

    def reset(self) -> None:
        """Recover from a CommTimeoutError of a small sum. Collective, with no call in progress."""
        if self.reducer is None:
            return
        # A rank whose GPU is late would write to workspaces that others have cleared.
        self.reducer._synchronize()
        self._peers.barrier()
        self.reducer.reset()
        self._peers.barrier()

    def close(self) -> None:
        """Release the memory; a second call does nothing. Later sums go to ``comm``.

        So all ranks must close it at the same point. First delete graphs that captured sums.
        """
        if self.reducer is not None:
            self.max_bytes, self.reducer = 0, None
            self._peers.close()
