"""``PeerMemory``: memory on each rank of a host that all ranks can address."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from jitkern.args import device_arg, int_arg, type_text
from jitkern.comm.args import namespace
from jitkern.comm.descriptors import Descriptors, hand_over
from jitkern.comm.protocol import Closing
from jitkern.comm.rendezvous import PeerInfo, Rendezvous, boot_id
from jitkern.errors import UnsupportedError
from jitkern.fs import make_memory
from jitkern.host import library as host

PAGE_BYTES = 2 << 20
"""A rank's share is whole pages: the granularity of cuMemCreate on all GPUs, a huge page."""
_MAX_BYTES = 1 << 46  # per rank: less than a process can address
_PATTERN_BYTES = 512
_INSTEAD = "use init_pynccl's all_reduce between them"


class PeerMemory(Closing):
    """Memory on each rank of a host that all ranks can read and write. Making one is collective.

    Each rank maps the memory of all ranks, in rank order; that of rank ``r`` starts at
    ``addresses[r]``. It starts as zeros. You must order reads after writes, by ``barrier`` and
    streams, or by flags in the memory.

    If a step of the set-up fails on one rank, all ranks raise an error of the same kind. A rank
    unmaps the memory when it is closed and its last tensor is deleted, after waiting for the GPU. A
    forked child does not have the memory: touching it is SIGSEGV.

    Parameters
    ----------
    num_bytes : int
        Bytes per rank, the same on all ranks.
    group : torch.distributed.ProcessGroup or torch.distributed.Store, optional
        A gloo group of exactly these ranks, or a store that nothing else uses. Default: torch's
        default group.
    rank, world_size : int, optional
        This rank and the number of ranks. Default: those of the group. Required with a store.
    device : torch.device, str or int, optional
        Where this rank's memory lies. By default the current GPU, or the CPU if there is none.
    timeout_s : float
        Seconds that a rank waits for the others in each step of the set-up and in a barrier; at
        most 1e6.

    Attributes
    ----------
    rank, world_size, device, num_bytes, share_bytes
        ``share_bytes`` is the distance between the memory of two ranks: ``num_bytes``, rounded up
        to pages of 2 MiB.

    Raises
    ------
    UnsupportedError
        Ranks are on several hosts, or GPUs cannot access each other's memory; it says which.
    CommTimeoutError, CommError
        Ranks did not arrive in time or have ended, and it names them; or their arguments differ.
    MemoryError, RuntimeError
        A GPU has too little free memory; there is no CUDA driver, or it reports an error.
    """

    _user = "PeerMemory"  # what errors name
    _same: Mapping[str, Any] = MappingProxyType({})  # further settings that all ranks share

    def __init__(
        self,
        num_bytes: int,
        group: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.num_bytes: int = int_arg("PeerMemory", "num_bytes", num_bytes, 1, _MAX_BYTES)
        self.device: torch.device = device_arg("PeerMemory", "device", device)
        self._num_barriers, self._pid = 0, os.getpid()
        ordinal = -1 if self.device.index is None else self.device.index
        facts = {
            "num_bytes": self.num_bytes,
            "device": self.device.type,
            **self._same,
            "_place": str(self.device),
            "_host": _host(),
            "_can_share": ordinal < 0 or bool(host.module()["gpu_shares_memory"](ordinal)),
        }
        ranks = (rank, world_size)
        self._rendezvous = Rendezvous(
            self._user, group, *ranks, timeout_s=timeout_s, position=self._position, facts=facts
        )
        self.rank: int = self._rendezvous.rank
        self.world_size: int = self._rendezvous.world_size
        try:
            _require_sharing(self._rendezvous.peers)
            self.share_bytes: int = -(-self.num_bytes // PAGE_BYTES) * PAGE_BYTES
            self._range: Any = _make_range(self._rendezvous, self.share_bytes, ordinal)
        except BaseException as error:
            self._rendezvous.fail(error)
            raise

    def tensor(
        self, shape: int | Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Return a tensor in this rank's memory, from ``offset_bytes`` on.

        Raises TypeError or ValueError for a wrong argument, such as an ``offset_bytes`` that is no
        multiple of the item size; RuntimeError if the memory is closed, or in a forked child.
        """
        return self._tensor("tensor", self.rank, shape, dtype, offset_bytes, self.num_bytes)

    def remote(
        self, rank: int, shape: int | Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> Tensor:
        """Return a tensor in the memory of any rank, on this rank's device. See ``tensor``."""
        rank = int_arg("PeerMemory.remote", "rank", rank, 0, self.world_size - 1)
        return self._tensor("remote", rank, shape, dtype, offset_bytes, self.num_bytes)

    def whole(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory of all ranks, in rank order. See ``tensor``.

        ValueError if ``num_bytes`` is no multiple of 2 MiB; the message has the next multiple.
        """
        if self.num_bytes != self.share_bytes:
            came = f"num_bytes: {self.num_bytes} leaves gaps between the ranks"
            expected = f"whole pages; {self.share_bytes} is the next"
            raise ValueError(f"PeerMemory.whole: {came}, expected {expected}")
        return self._tensor("whole", 0, shape, dtype, 0, self.world_size * self.share_bytes)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of each rank's memory in this process, for kernels."""
        base = self._usable("addresses").base()
        return tuple(base + rank * self.share_bytes for rank in range(self.world_size))

    def barrier(self) -> None:
        """Return after all ranks have called it. The host waits for the ranks, not for GPUs.

        CommTimeoutError names ranks that did not arrive in time or have ended. All later barriers
        then fail.
        """
        self._usable("barrier")
        self._num_barriers += 1
        self._rendezvous.exchange("barrier", number=self._num_barriers)

    def close(self) -> None:
        """Release the memory; a second call does nothing. Tensors keep the mapping alive.

        The other ranks keep their mappings; their next barrier names the rank that closed it.
        """
        if self._range is not None and os.getpid() == self._pid:
            self._range = None
            self._rendezvous.close()

    def __repr__(self) -> str:
        state = ", closed" if self._range is None else ""
        where = f"rank {self.rank} of {self.world_size} on {self.device}"
        return f"PeerMemory({self.num_bytes} bytes of each rank, {where}{state})"

    def _usable(self, call: str) -> Any:
        if os.getpid() != self._pid:
            text = "a forked child has no part of its parent's memory; make one of its own"
            raise RuntimeError(f"PeerMemory.{call}: {text}")
        if self._range is None:
            raise RuntimeError(f"PeerMemory.{call}: the memory is closed")
        return self._range

    def _tensor(
        self, name: str, rank: int, shape: Any, dtype: Any, offset_bytes: Any, limit_bytes: int
    ) -> Tensor:
        range_, call = self._usable(name), f"PeerMemory.{name}"
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{call}: dtype: {type_text(dtype)}, expected a torch.dtype")
        try:
            sizes = torch.Size([shape] if isinstance(shape, int) else shape)
        except TypeError:
            expected = "an int or a sequence of ints"
            raise TypeError(f"{call}: shape: {type_text(shape)}, expected {expected}") from None
        num_bytes = math.prod(sizes) * dtype.itemsize
        if int_arg(call, "offset_bytes", offset_bytes, 0) % dtype.itemsize:
            expected = f"a multiple of {dtype.itemsize}, the bytes of an item"
            raise ValueError(f"{call}: offset_bytes: {offset_bytes}, expected {expected}")
        if min(sizes, default=0) < 0 or offset_bytes + num_bytes > limit_bytes:
            came = f"{[*sizes]} of {dtype} from byte {offset_bytes} on"
            raise ValueError(f"{call}: shape: {came}, expected at most {limit_bytes} bytes in all")
        view = range_.view(rank * self.share_bytes + offset_bytes, num_bytes)
        return as_torch(view).view(dtype).view(sizes)

    def _position(self) -> tuple[int, str]:
        return self._num_barriers, "barrier"


class PeerMemoryOf(PeerMemory):
    """The memory of another class, which errors name, and whose settings all ranks share."""

    def __init__(self, user: str, same: Mapping[str, Any], num_bytes: int, **options: Any) -> None:
        self._user, self._same = user, same
        super().__init__(num_bytes, **options)


def as_torch(view: Any) -> Tensor:
    """Return a tensor of the view's bytes, on its device; PyTorch does not ask the driver."""
    tensor: Tensor = from_dlpack(view.__dlpack__())
    return tensor


def _host() -> str:
    """Return a text that is equal on ranks that can send each other descriptors."""
    return f"{boot_id()} {os.stat('/proc/self/ns/net').st_ino}"


def _place(info: PeerInfo) -> str:
    return f"{info.facts['_place']} of rank {info.rank}"


def _require_sharing(peers: list[PeerInfo]) -> None:
    """Raise UnsupportedError, the same on all ranks, unless all can share memory."""
    if len({peer.facts["_host"] for peer in peers}) > 1:
        hosts = " and ".join(f"rank {peer.rank} is on {peer.host}" for peer in peers)
        raise UnsupportedError(
            f"PeerMemory: {hosts}, expected all on one host and in one network namespace (in "
            "Kubernetes one pod, in Docker one --network); between hosts use init_pynccl or "
            "TorchCommunicator"
        )
    for peer in peers:
        if not peer.facts["_can_share"]:
            raise UnsupportedError(
                f"PeerMemory: {_place(peer)} has no memory that other processes can map, expected "
                "virtual memory management that exports file descriptors, which some virtual "
                f"machines do not have; {_INSTEAD}"
            )


# -- the range of addresses ------------------------------------------------------------------------


def _make_range(met: Rendezvous, share_bytes: int, ordinal: int) -> Any:
    """Return the memory of all ranks, mapped and checked. Collective: all ranks, or all raise.

    A wrong IOMMU setting gives wrong data, and correct reads do not prove correct writes. So each
    rank writes a pattern into every rank's memory. Then it reads, in its own memory and in each
    other rank's, the pattern that the other rank has written.
    """
    peers, mine = met.peers, met.peers[met.rank]
    begin = mine.rank * share_bytes

    def pattern(owner: PeerInfo, writer: PeerInfo) -> tuple[int, bytes]:
        """Return its offset, and its bytes, which rank 0's nonce makes unique to this memory."""
        at = owner.rank * share_bytes + writer.rank * _PATTERN_BYTES
        text = f"{peers[0].nonce} {at}"
        return at, hashlib.shake_128(text.encode()).digest(_PATTERN_BYTES)

    with ExitStack() as undo:
        fds = undo.enter_context(Descriptors())

        def make() -> Any:
            functions = host.module()["make_peer_range"](len(peers), share_bytes, ordinal)
            range_ = namespace(functions)  # each of them keeps the range alive, as its tensors do
            # Released explicitly: the traceback may keep a reference.
            undo.push(lambda kind, *_: range_.release() if kind is not None else None)
            if ordinal >= 0:
                fds[mine.rank] = int(range_.create(mine.rank))
                range_.clear(begin, share_bytes)  # the driver does not
            else:
                fds[mine.rank] = make_memory("PeerMemory", "jitkern-peers", share_bytes)
                range_.map(mine.rank, fds[mine.rank])
            return range_

        def write() -> None:
            for owner in peers:
                if owner is not mine:
                    _map(range_, mine, owner, fds[owner.rank])
                range_.write(*pattern(owner, mine))

        def compare() -> None:
            for other in peers:
                place, own = _place(other), _place(mine)
                there = f"{own} reads in the memory of {place} what was not written there"
                here = f"what {place} writes to the memory of {own} is not there"
                for owner, symptom in ((other, there), (mine, here)):
                    at, expected = pattern(owner, other)
                    if bytes(range_.read(at, _PATTERN_BYTES)) != expected:
                        raise UnsupportedError(
                            f"PeerMemory: peer access gives wrong data: {symptom}; {_INSTEAD}, and "
                            "see whether the IOMMU or PCIe ACS is in the way"
                        )

        def clear() -> None:
            range_.clear(begin, len(peers) * _PATTERN_BYTES)

        range_ = met.all_or_none("make", make)
        hand_over(met, fds, range(len(peers)))
        for step in (write, compare, clear):
            met.all_or_none(step.__name__, step)
    return range_


def _map(range_: Any, mine: PeerInfo, other: PeerInfo, fd: int) -> None:
    """Map another rank's memory, or raise UnsupportedError."""
    try:
        range_.map(other.rank, fd)
    except RuntimeError as error:
        raise UnsupportedError(
            f"PeerMemory: {_place(mine)} cannot address the memory of {_place(other)}: "
            f"{str(error).removeprefix('jitkern: ')}; {_INSTEAD}, or if CUDA_VISIBLE_DEVICES hides "
            "that GPU from this process, show it"
        ) from error
