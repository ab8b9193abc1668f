"""``PeerCommunicator``: small sums over the ranks' own memory, all else over a communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.comm import peer_kernel
from jitkern.comm.args import communicator_arg, deadline_arg, device_arg, seconds_arg
from jitkern.comm.peer_memory import PeerMemory
from jitkern.comm.peer_reduce import Algorithm, PeerReducer
from jitkern.comm.protocol import Communicator, ReduceOp
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Up to so many bytes a sum goes over peer memory, by the number of ranks. Of two H200s: 0.43 of
# NCCL's time at 4 MiB, the largest that was measured. Of more ranks nothing was: where the two
# shots of 2 ranks still take a third of it.
_MAX_BYTES = {2: 4 << 20}
_MAX_BYTES_OF_MORE = 1 << 20
_WORKSPACE_FOR_BYTES = 4 << 20  # larger sums take several rounds of it


class _Workspaces(PeerMemory):
    """Memory whose ranks have the same settings: with others they would hear of no error."""

    _maker = "PeerCommunicator"

    def __init__(self, num_bytes: int, group: Any, settings: Mapping[str, Any], **how: Any) -> None:
        self._settings = settings
        super().__init__(num_bytes, group, **how)


class PeerCommunicator:
    """A :class:`Communicator` of the ranks of one host, whose small sums are one kernel of ours.

    ``all_reduce`` and ``reduce_scatter`` with ``"sum"``, of fp32, fp16 and bf16 and up to
    ``max_bytes``, go over a :class:`PeerMemory`. Everything else goes to ``comm``. Those sums are
    made in fp32, in the order of ranks, and rounded once: all ranks have the same bits, and an item
    has the same bits however many others are summed beside it. So with a ``max_bytes`` that no
    tensor exceeds a model's results do not depend on the size of its batches, as far as its sums
    go.

    All calls of a rank are on one stream, or in an order that streams have; a CUDA graph can
    capture them. Making one is collective. ``comm`` is used, and stays its owner's.

    Parameters
    ----------
    comm : Communicator
        Of at most 8 ranks, of one host.
    group : torch.distributed.ProcessGroup or torch.distributed.Store
        How the ranks make their memory, as for :class:`PeerMemory`; in the order of `comm`.
    max_bytes : int, optional
        The largest tensor that goes over peer memory, on all ranks; 0: none, and no rank is met. By
        default as measured.
    algorithm : "auto", "one_shot" or "two_shot"
        As for :meth:`PeerReducer.all_reduce`, on all ranks; the bits are the same.
    device : torch.device, optional
        By default the current GPU, or the CPU where there is none.
    deadline_s : float
        Seconds that a small sum waits for other ranks, on the device; ``math.inf``: for ever.
    timeout_s : float
        Seconds that each step of the set-up, and of :meth:`reset`, may take.

    Attributes
    ----------
    max_bytes : int

    Raises
    ------
    UnsupportedError
        Ranks on several hosts, or GPUs that cannot address each other's memory.
    CommTimeoutError, CommError
        As for :class:`PeerMemory`; ranks differ in ``max_bytes`` or ``algorithm``.
    TypeError, ValueError
        A wrong argument, or more than 8 ranks.

    Examples
    --------
    >>> comm = PeerCommunicator(init_pynccl(...), group)  # doctest: +SKIP
    >>> comm.all_reduce(x)  # doctest: +SKIP
    """

    def __init__(
        self,
        comm: Communicator,
        group: Any,
        *,
        max_bytes: int | None = None,
        algorithm: Algorithm = "auto",
        device: torch.device | None = None,
        deadline_s: float = 10.0,
        timeout_s: float = 600.0,
    ) -> None:
        import torch

        communicator_arg("PeerCommunicator", comm)
        if max_bytes is None:
            max_bytes = _MAX_BYTES.get(comm.size, _MAX_BYTES_OF_MORE)
        elif isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
            raise TypeError(f"PeerCommunicator: max_bytes: {type_text(max_bytes)}, expected an int")
        elif max_bytes < 0:
            raise ValueError(f"PeerCommunicator: max_bytes: {max_bytes}, expected 0 or more")
        if algorithm not in ("auto", "one_shot", "two_shot"):
            raise ValueError(
                f"PeerCommunicator: algorithm: {algorithm!r}, expected 'auto', 'one_shot' or "
                "'two_shot'"
            )
        if comm.size > peer_kernel.MOST_RANKS:
            raise ValueError(
                f"PeerCommunicator: comm: {comm.size} ranks, expected at most "
                f"{peer_kernel.MOST_RANKS}; use it as it is"
            )
        deadline_s = deadline_arg("PeerCommunicator", "deadline_s", deadline_s)
        timeout_s = seconds_arg("PeerCommunicator", timeout_s)
        where = device_arg("PeerCommunicator", "device", device)
        self._comm, self._algorithm = comm, algorithm
        self._dtypes = (torch.float32, torch.float16, torch.bfloat16)
        self.max_bytes: int = max_bytes if comm.size > 1 else 0
        self._peers: PeerMemory | None = None
        if self.max_bytes == 0:
            return
        num_bytes = PeerReducer.workspace_bytes_for(
            comm.size, min(self.max_bytes, _WORKSPACE_FOR_BYTES)
        )
        # What decides how a sum goes: one shot here and two there would be wrong sums.
        limit = peer_kernel.measured_one_shot_bytes(comm.size, where)
        settings = {"max_bytes": self.max_bytes, "algorithm": algorithm, "one_shot_bytes": limit}
        self._peers = _Workspaces(
            *(num_bytes, group, settings),
            rank=comm.rank, size=comm.size, device=where, timeout_s=timeout_s,
        )  # fmt: skip
        own = self._peers.tensor(num_bytes, torch.uint8)  # keeps the memory, also past close()
        self._reducer = PeerReducer(
            *(self._peers.addresses, comm.rank, comm.size, num_bytes),
            device=where, deadline_s=deadline_s, one_shot_bytes=limit, owner=own,
        )  # fmt: skip
        self._reducer.reset()
        self._peers.barrier()

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``size - 1``."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._comm.size

    @property
    def reducer(self) -> PeerReducer | None:
        """What small sums go by, of this rank; None where all go to ``comm``."""
        return None if self._peers is None else self._reducer

    def __repr__(self) -> str:
        return f"PeerCommunicator({self._comm!r}, sums up to {self.max_bytes} bytes by peer memory)"

    # -- calls -------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` over all ranks, in place; see :meth:`Communicator.all_reduce`."""
        if self._is_small(x, op):
            self._reducer.all_reduce(x, algorithm=self._algorithm)
        else:
            self._comm.all_reduce(x, op)

    def reduce_scatter(self, output: Tensor, x: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce ``x`` and write part ``rank`` of it; see :meth:`Communicator.reduce_scatter`."""
        if self._is_small(x, op):
            self._reducer.reduce_scatter(output, x)
        else:
            self._comm.reduce_scatter(output, x, op)

    def all_gather(self, output: Tensor, x: Tensor) -> None:
        """Write every rank's ``x`` to ``output``; see :meth:`Communicator.all_gather`."""
        self._comm.all_gather(output, x)

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Write rank ``src``'s ``x`` to all ranks'; see :meth:`Communicator.broadcast`."""
        self._comm.broadcast(x, src)

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``; see :meth:`Communicator.send`."""
        self._comm.send(x, dst)

    def recv(self, x: Tensor, src: int) -> None:
        """Write to ``x`` what rank ``src`` sends; see :meth:`Communicator.recv`."""
        self._comm.recv(x, src)

    def all_to_all(
        self,
        output: Tensor,
        x: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> None:
        """Send part r of ``x`` to rank r, and so on; see :meth:`Communicator.all_to_all`."""
        self._comm.all_to_all(output, x, output_splits, input_splits)

    def barrier(self) -> None:
        """Return when every rank has come to it; see :meth:`Communicator.barrier`."""
        self._comm.barrier()

    def _is_small(self, x: Any, op: Any) -> bool:
        # What is no tensor is for `comm` to refuse.
        try:
            return op == "sum" and 0 < x.nbytes <= self.max_bytes and x.dtype in self._dtypes
        except AttributeError:
            return False

    # -- the end -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Go on after a CommTimeoutError of a small sum: all ranks call it, none in another call.

        Raises
        ------
        CommTimeoutError
            Some did not come within ``timeout_s``, or have ended.
        """
        if self._peers is None:
            return
        # A rank whose GPU is late would write its values to what others have cleared already.
        self._reducer.synchronize()
        self._peers.barrier()
        self._reducer.reset()
        self._peers.barrier()

    def close(self) -> None:
        """Let go of the memory; later sums go to ``comm``, so all ranks call it at the same time.

        Graphs that hold sums must be gone. Once is enough.
        """
        self.max_bytes = 0
        if self._peers is not None:
            self._peers.close()
            del self._reducer
            self._peers = None

    def __enter__(self) -> PeerCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
