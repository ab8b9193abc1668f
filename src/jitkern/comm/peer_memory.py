"""``PeerMemory``: memory on each rank of a host that all of its ranks address."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jitkern.comm import peer_local, peer_range, peer_setup
from jitkern.comm.args import device_arg, seconds_arg
from jitkern.comm.guard import Guard, Position
from jitkern.comm.peer_args import bytes_arg, extent, ranks_arg
from jitkern.comm.peer_range import Range
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch


class PeerMemory:
    """Memory on each rank of a host that all of its ranks read and write: a collective call.

    On GPUs it is made by the driver's virtual memory management, on the CPU it is shared memory.
    Every rank maps the memory of all in rank order, one behind the other: a kernel finds rank
    ``r``'s at ``addresses[r]``, and a table that is split over the ranks is one tensor of
    :meth:`whole`. It begins as zeros. What a rank writes others see as the hardware has it: who
    reads has to come behind who writes, by :meth:`barrier` and streams, or by a kernel's flags.

    Before it is there, each rank reads what every other has written. Where a step fails in one
    rank, it raises in all, an error of the same kind, and nothing is left.

    The memory lives until the last rank has let go of it, and in each rank until it is closed and
    the last tensor of it is gone; the call that drops it waits for the GPU first. In a forked child
    it is not there: to touch it is SIGSEGV.

    Parameters
    ----------
    num_bytes : int
        Bytes of each rank, the same in all of them.
    group : torch.distributed.ProcessGroup or torch.distributed.Store
        How the ranks find each other: a gloo group of just these ranks, None for the default one,
        or a store that is this memory's own (a ``PrefixStore``).
    rank, size : int, optional
        This rank, and how many there are; by default as in the group. A store needs both.
    device : torch.device, optional
        Where this rank's memory lies, and from where it uses that of others. By default the current
        GPU, or the CPU where there is none.
    timeout_s : float
        Seconds that each step of the set-up, and a barrier, may take; at most 1e6.

    Attributes
    ----------
    rank, size : int
    device : torch.device
    num_bytes : int
        As given.
    share_bytes : int
        Bytes from one rank's memory to the next one's: ``num_bytes`` in whole pages of 2 MiB.

    Raises
    ------
    UnsupportedError
        Ranks on several hosts, or GPUs that cannot address each other's memory; it says which.
    CommTimeoutError
        Some ranks did not come within ``timeout_s``, or have ended; it names them.
    CommError
        Ranks do not fit together: they differ in ``num_bytes``, or two have one number.
    MemoryError
        A GPU has not that much left.
    RuntimeError
        There is no CUDA driver, or it refuses something; in its words.
    TypeError, ValueError
        A wrong argument.

    Examples
    --------
    >>> peers = PeerMemory(1 << 20, group)  # doctest: +SKIP
    >>> peers.tensor((256, 1024), torch.float32).fill_(peers.rank)  # doctest: +SKIP
    >>> peers.barrier()  # doctest: +SKIP
    >>> peers.remote(0, (256, 1024), torch.float32)  # of rank 0  # doctest: +SKIP
    """

    rank: int
    size: int
    device: torch.device
    num_bytes: int
    share_bytes: int
    _range: Range | None
    _maker = "PeerMemory"  # what the errors of a set-up begin with
    _settings: Mapping[str, Any] = {}  # more that all ranks must have in common

    def __init__(
        self,
        num_bytes: int,
        group: Any,
        *,
        rank: int | None = None,
        size: int | None = None,
        device: torch.device | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        num_bytes = bytes_arg(num_bytes)
        rank, size = ranks_arg(group, rank, size)
        where = device_arg("PeerMemory", "device", device)
        ordinal = _ordinal(where)
        self._num_barriers, self._num_met = 0, 0
        guard = Guard(
            *(self._maker, group, rank, size),
            timeout_s=timeout_s,
            position=self._position,
            facts={**peer_setup.facts(num_bytes, ordinal), **self._settings},
        )
        try:
            share_bytes = peer_setup.share_bytes_of(num_bytes, guard.cards)
            made = peer_setup.make_range(guard, share_bytes)
        except BaseException as error:
            guard.close("given up on")
            # Else those who are slower only hear that this process has ended.
            if isinstance(error, Exception) and not isinstance(error, TimeoutError):
                guard.wait_read()
            raise
        guard.wait_read()
        self._fill(made, rank, size, where, num_bytes, share_bytes, guard)

    @classmethod
    def of_devices(
        cls, num_bytes: int, devices: Sequence[Any], *, timeout_s: float = 600.0
    ) -> list[PeerMemory]:
        """Return one for each device of this process, which are ranks in this order.

        No other process takes part. A barrier is for threads: one for each rank.

        Parameters
        ----------
        num_bytes : int
            Bytes of each.
        devices : sequence of torch.device
            GPUs, or ``"cpu"`` as often as there are to be ranks.
        timeout_s : float
            Seconds that a step of the set-up, or a barrier, may take.

        Examples
        --------
        >>> import torch
        >>> from jitkern.comm import PeerMemory
        >>> mine, other = PeerMemory.of_devices(4096, ["cpu", "cpu"])
        >>> _ = mine.tensor([2], torch.int32).fill_(7)
        >>> other.remote(0, [3], torch.int32)
        tensor([7, 7, 0], dtype=torch.int32)
        """
        num_bytes, timeout_s = bytes_arg(num_bytes), seconds_arg("PeerMemory", timeout_s)
        places = [device_arg("PeerMemory", "devices", one) for one in devices]
        if not places or len({place.type for place in places}) > 1:
            came = ", ".join(map(str, places)) or "none"
            raise ValueError(f"PeerMemory: devices: {came}, expected some GPUs, or the CPU alone")
        made, share_bytes = peer_local.make_range(num_bytes, [*map(_ordinal, places)], timeout_s)
        met = peer_local.Threads(len(places), timeout_s)
        found = []
        for rank, place in enumerate(places):
            one = cls.__new__(cls)
            one._fill(made, rank, len(places), place, num_bytes, share_bytes, met)
            found.append(one)
        return found

    @staticmethod
    def page_bytes(device: torch.device | None = None) -> int:
        """Return what ``num_bytes`` is to be a multiple of for :meth:`whole`: no collective call.

        Parameters
        ----------
        device : torch.device, optional
            As for the memory. A GPU that cannot share any has pages, too.
        """
        # Where one rank's GPU has no such memory, all are to ask for the same, and all hear of it.
        return peer_range.piece_bytes(
            _ordinal(device_arg("PeerMemory.page_bytes", "device", device))
        ) or peer_range.piece_bytes(-1)

    # -- memory ------------------------------------------------------------------------------------

    def tensor(
        self, shape: int | Sequence[int], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """Return a tensor in this rank's memory.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : torch.dtype
        offset : int
            Where it begins, in bytes: a multiple of an item's.

        Raises
        ------
        TypeError, ValueError
            A wrong argument; it does not lie within ``num_bytes``.
        RuntimeError
            The memory is closed, or the process is a forked child.
        """
        return self._tensor("tensor", self.rank, shape, dtype, offset, self.num_bytes)

    def remote(
        self, rank: int, shape: int | Sequence[int], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        """Return a tensor in the memory of any rank, on this rank's device. As :meth:`tensor`."""
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"PeerMemory.remote: rank: {type_text(rank)}, expected an int")
        if not 0 <= rank < self.size:
            raise ValueError(f"PeerMemory.remote: rank: {rank}, expected 0 to {self.size - 1}")
        return self._tensor("remote", rank, shape, dtype, offset, self.num_bytes)

    def whole(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the memory of all ranks, in rank order.

        Raises
        ------
        ValueError
            ``num_bytes`` leaves gaps between the ranks; it says the next size that does not.
        TypeError, RuntimeError
            As :meth:`tensor`.
        """
        if self.num_bytes != self.share_bytes:
            raise ValueError(
                f"PeerMemory.whole: num_bytes: {self.num_bytes} leaves gaps between the ranks, "
                f"expected whole pages; {self.share_bytes} is the next"
            )
        return self._tensor("whole", 0, shape, dtype, 0, self.size * self.share_bytes)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the memory of each rank begins in this process, for kernels."""
        base = self._usable("addresses").base()
        return tuple(base + rank * self.share_bytes for rank in range(self.size))

    # -- together ----------------------------------------------------------------------------------

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when all ranks have come to it: on the host, it waits for no GPU.

        Parameters
        ----------
        timeout_s : float, optional
            By default that of the memory.

        Raises
        ------
        CommTimeoutError
            Some did not come in time, or have ended; it names them. No later one succeeds.
        CommError
            An earlier one has failed.
        """
        self._usable("barrier")
        if timeout_s is not None:
            timeout_s = seconds_arg("PeerMemory.barrier", timeout_s)
        met = self._met
        if isinstance(met, peer_local.Threads):
            met.barrier(self.rank, timeout_s)
            return
        met.check("barrier")
        self._num_barriers += 1
        number = self._num_barriers
        met.exchange("barrier", None, op="barrier", number=number, timeout_s=timeout_s)
        self._num_met = number
        met.wait_read()  # this may be the last that the process does

    def close(self) -> None:
        """Let go of the memory: this rank's when its last tensor is gone, too. Once is enough.

        The other ranks keep what they have mapped; their next barrier says who has closed it.
        """
        if self._range is None or os.getpid() != self._pid:
            return
        self._range = None
        if isinstance(self._met, Guard):
            self._met.close("closed")
        else:
            self._met.close(self.rank)

    def __enter__(self) -> PeerMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._range is None else ""
        return (
            f"PeerMemory({self.num_bytes} bytes of each rank, rank {self.rank} of {self.size} on "
            f"{self.device}{state})"
        )

    # -- inside ------------------------------------------------------------------------------------

    def _fill(
        self,
        made: Range,
        rank: int,
        size: int,
        device: torch.device,
        num_bytes: int,
        share_bytes: int,
        met: Guard | peer_local.Threads,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.num_bytes, self.share_bytes = num_bytes, share_bytes
        self._pid, self._met = os.getpid(), met
        self._range = made

    def _usable(self, what: str) -> Range:
        if os.getpid() != self._pid:
            text = "a forked child has no part of its parent's memory; make one of its own"
            raise RuntimeError(f"PeerMemory.{what}: {text}")
        if self._range is None:
            raise RuntimeError(f"PeerMemory.{what}: the memory is closed")
        return self._range

    def _tensor(
        self, call: str, rank: int, shape: Any, dtype: Any, offset: Any, limit_bytes: int
    ) -> torch.Tensor:
        made = self._usable(call)
        sizes, begin, count = extent(f"PeerMemory.{call}", shape, dtype, offset, limit_bytes)
        begin += rank * self.share_bytes
        found = _as_torch(made.view(begin, count, _ordinal(self.device)))
        return found.view(dtype).view(sizes)

    def _position(self) -> Position:
        return Position(self._num_barriers, self._num_met, "barrier" if self._num_barriers else "")


def _as_torch(view: Any) -> torch.Tensor:
    """Return the bytes of a view, on the device that it says: PyTorch does not ask the driver."""
    from torch.utils.dlpack import from_dlpack

    found: torch.Tensor = from_dlpack(view.__dlpack__())
    return found


def _ordinal(device: torch.device) -> int:
    return -1 if device.type == "cpu" else int(device.index)
