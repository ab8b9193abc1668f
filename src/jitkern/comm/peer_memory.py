"""``PeerMemory``: memory on each rank of a host that all of its ranks address."""

from __future__ import annotations

import hashlib
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern import fs
from jitkern.comm.args import device_arg, seconds_arg
from jitkern.comm.descriptors import Descriptors, hand_over
from jitkern.comm.rendezvous import PeerInfo, Rendezvous
from jitkern.errors import UnsupportedError
from jitkern.host import module as host
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch

HOST_PIECE_BYTES = 2 << 20  # on the CPU, as on the GPUs that there are
_MAX_BYTES = 1 << 46  # of a rank: less than the addresses of a process
_OWN_PART = 0.8  # of a deadline, that a rank waits for its GPU: so the others hear of it in time
_PROOF_BYTES = 512
_INSTEAD = "use init_pynccl's all_reduce between them"


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
        self.num_bytes = _bytes_arg(num_bytes)
        self.device = device_arg("PeerMemory", "device", device)
        self._num_barriers, self._pid = 0, os.getpid()
        ordinal = _ordinal(self.device)
        facts = {
            "num_bytes": num_bytes,
            "device": self.device.type,
            "_piece_bytes": _piece_bytes(ordinal),
            "_ordinal": ordinal,
            "_gpu": _gpu_id(ordinal),
            "_machine": _machine(),
            "_network": os.stat("/proc/self/ns/net").st_ino,
        }
        self._met = Rendezvous(
            *(self._maker, group, rank, size),
            timeout_s=timeout_s, position=self._position, facts={**facts, **self._settings},
        )  # fmt: skip
        self.rank, self.size = self._met.rank, self._met.size
        try:
            self.share_bytes = _share_bytes(num_bytes, self._met.peers)
            self._range: Range | None = _make_range(self._met, self.share_bytes)
        except BaseException as error:
            self._met.fail(error)
            raise

    @staticmethod
    def page_bytes(device: torch.device | None = None) -> int:
        """Return what ``num_bytes`` is to be a multiple of for :meth:`whole`: no collective call.

        Parameters
        ----------
        device : torch.device, optional
            As for the memory. A GPU that cannot share any has pages, too.
        """
        # Where one rank's GPU has no such memory, all are to ask for the same, and all hear of it.
        return _piece_bytes(
            _ordinal(device_arg("PeerMemory.page_bytes", "device", device))
        ) or _piece_bytes(-1)

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
        self._met.check("barrier")
        self._num_barriers += 1
        self._met.exchange("barrier", op="barrier", number=self._num_barriers, timeout_s=timeout_s)

    def close(self) -> None:
        """Let go of the memory: this rank's when its last tensor is gone, too. Once is enough.

        The other ranks keep what they have mapped; their next barrier says who has closed it.
        """
        if self._range is None or os.getpid() != self._pid:
            return
        self._range = None
        self._met.close()

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
        sizes, begin, count = _extent(f"PeerMemory.{call}", shape, dtype, offset, limit_bytes)
        begin += rank * self.share_bytes
        found = _as_torch(made.view(begin, count, _ordinal(self.device)))
        return found.view(dtype).view(sizes)

    def _position(self) -> tuple[int, str]:
        return self._num_barriers, "barrier"


def _as_torch(view: Any) -> torch.Tensor:
    """Return the bytes of a view, on the device that it says: PyTorch does not ask the driver."""
    from torch.utils.dlpack import from_dlpack

    found: torch.Tensor = from_dlpack(view.__dlpack__())
    return found


# -- arguments -------------------------------------------------------------------------------------


def _bytes_arg(num_bytes: Any) -> int:
    """Return bytes of each rank."""
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int):
        raise TypeError(f"PeerMemory: num_bytes: {type_text(num_bytes)}, expected an int")
    if not 1 <= num_bytes <= _MAX_BYTES:
        raise ValueError(f"PeerMemory: num_bytes: {num_bytes}, expected 1 to {_MAX_BYTES}")
    return num_bytes


def _extent(
    call: str, shape: Any, dtype: Any, offset: Any, limit_bytes: int
) -> tuple[list[int], int, int]:
    """Return the sizes of a tensor, where it begins and its bytes."""
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: {type_text(dtype)}, expected a torch.dtype")
    try:
        if isinstance(shape, bool | str | bytes):
            raise TypeError
        sizes = [index(one) for one in (shape if isinstance(shape, Sequence) else [shape])]
    except TypeError:
        expected = "an int or a sequence of ints"
        raise TypeError(f"{call}: shape: {type_text(shape)}, expected {expected}") from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"{call}: shape: {sizes}, expected no negative size")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"{call}: offset: {type_text(offset)}, expected an int")
    if offset < 0 or offset % dtype.itemsize:
        expected = f"a multiple of {dtype.itemsize} bytes, which an item takes"
        raise ValueError(f"{call}: offset: {offset}, expected {expected}")
    num_bytes = math.prod(sizes) * dtype.itemsize
    if offset + num_bytes > limit_bytes:
        came = f"{num_bytes} bytes from {offset} on"
        raise ValueError(f"{call}: shape: {came}, expected at most {limit_bytes} in all")
    return sizes, offset, num_bytes


# -- where a rank's memory lies --------------------------------------------------------------------


def _ordinal(device: torch.device) -> int:
    return -1 if device.type == "cpu" else int(device.index)


def _piece_bytes(ordinal: int) -> int:
    """Return what memory comes in pieces of; 0: this GPU has none that others can map."""
    return int(host.module()["gpu_granularity"](ordinal)) if ordinal >= 0 else HOST_PIECE_BYTES


def _gpu_id(ordinal: int) -> str:
    """Return what nvidia-smi calls a GPU, ``""`` for the CPU."""
    return f"GPU-{uuid.UUID(str(host.module()['gpu_uuid'](ordinal)))}" if ordinal >= 0 else ""


def _machine() -> str:
    """Return what the containers of a machine have in common, though not their names."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _place(info: PeerInfo) -> str:
    if info.facts["_ordinal"] < 0:
        return f"the CPU of rank {info.rank}"
    return f"cuda:{info.facts['_ordinal']} of rank {info.rank} ({info.facts['_gpu']})"


def _share_bytes(num_bytes: int, peers: list[PeerInfo]) -> int:
    """Return how much each rank takes; UnsupportedError, the same in all ranks, if they cannot."""
    for fact in ("_machine", "_network"):
        there: dict[Any, list[PeerInfo]] = {}
        for one in peers:
            there.setdefault(one.facts[fact], []).append(one)
        if len(there) == 1:
            continue
        if fact == "_machine":
            came = " and ".join(f"{_ranks(here)} on {here[0].host}" for here in there.values())
            raise UnsupportedError(
                f"PeerMemory: {came}, expected all on one host; between hosts use init_pynccl or "
                "TorchCommunicator"
            )
        came = " and ".join(f"{_ranks(here)} in one" for here in there.values())
        raise UnsupportedError(
            f"PeerMemory: {len(there)} network namespaces, expected one: {came} (in Kubernetes "
            "all of one pod, in Docker of one --network)"
        )
    for one in peers:
        if one.facts["_piece_bytes"] == 0:
            raise UnsupportedError(
                f"PeerMemory: {_place(one)} has no memory that other processes can map, expected "
                "virtual memory management that exports file descriptors, which some virtual "
                f"machines do not have; {_INSTEAD}"
            )
    piece = max(int(one.facts["_piece_bytes"]) for one in peers)
    return -(-num_bytes // piece) * piece


def _ranks(peers: list[PeerInfo]) -> str:
    numbers = ", ".join(str(one.rank) for one in peers)
    return f"rank {numbers} is" if len(peers) == 1 else f"ranks {numbers} are"


# -- a range of addresses --------------------------------------------------------------------------


class Range(NamedTuple):
    """The functions of one range in C++, in the order of csrc/comm/peer_memory.cc.

    The range lives as long as one of them, or a view.
    """

    base: Callable[[], int]
    create: Callable[[int, int, bool], int]
    map: Callable[[int, int], None]
    write: Callable[[int, bytes, int, float], None]
    read: Callable[[int, int, int, float], bytes]
    clear: Callable[[int, int, int, float], None]
    view: Callable[[int, int, int], Any]
    release: Callable[[], None]


def _make_range(met: Rendezvous, share_bytes: int) -> Range:
    """Return the mapped and proven memory of all ranks: collective.

    Raises
    ------
    UnsupportedError, MemoryError, CommError, RuntimeError
        Why not, in all ranks; nothing is left in any.
    """
    mine = met.peers[met.rank]
    ordinal = mine.facts["_ordinal"]
    with ExitStack() as undo:
        fds = undo.enter_context(Descriptors())

        def make() -> Range:
            _check_reach(mine, met.peers)
            gpus = [ordinal] if ordinal >= 0 else []
            made = Range(*host.module()["make_peer_range"](met.size, share_bytes, gpus))
            # Not by the last reference to it: who keeps the error would keep that as well.
            undo.push(lambda kind, *_: made.release() if kind is not None else None)
            if ordinal >= 0:
                fds[met.rank] = int(made.create(met.rank, ordinal, True))
            else:
                fds[met.rank] = fs.make_memory("PeerMemory", "jitkern-peers", share_bytes)
                made.map(met.rank, fds[met.rank])
            return made

        made = met.all_or_none("make", make)
        hand_over(met, fds, range(met.size))

        def map_others() -> None:
            for other, fd in fds.items():
                if other != met.rank:
                    _map(made, mine, met.peers[other], fd)

        met.all_or_none("map", map_others)
        nonce = met.exchange("nonce", uuid.uuid4().hex)[0]
        proof = Proof(made, met.size, share_bytes, nonce, met.timeout_s * _OWN_PART)
        met.all_or_none("write", lambda: proof.write(mine))
        met.all_or_none("compare", lambda: proof.compare(mine, met.peers))
        met.all_or_none("receive", lambda: proof.receive(mine, met.peers))
        met.all_or_none("clear", lambda: proof.clear(mine))
    return made


def _check_reach(mine: PeerInfo, peers: list[PeerInfo]) -> None:
    """Raise UnsupportedError where the driver says that a GPU cannot reach another's memory.

    It is asked of those that this process sees; for the others the mapping is the answer.
    """
    own = mine.facts["_ordinal"]
    if own < 0:
        return
    module = host.module()
    here = {_gpu_id(ordinal): ordinal for ordinal in range(module["device_count"]())}
    for one in peers:
        other = here.get(one.facts["_gpu"])
        if other not in (None, own) and not module["gpu_reaches"](own, other):
            raise _unreachable(mine, one, "the driver has no peer access between them")


def _map(made: Range, mine: PeerInfo, other: PeerInfo, fd: int) -> None:
    try:
        made.map(other.rank, fd)
    except RuntimeError as error:
        why = str(error).removeprefix("jitkern: ")
        if mine.facts["_ordinal"] >= 0:
            why += " (where CUDA_VISIBLE_DEVICES hides that GPU from this process, show it)"
        raise _unreachable(mine, other, why) from error


def _unreachable(mine: PeerInfo, other: PeerInfo, why: str) -> UnsupportedError:
    text = f"{_place(mine)} cannot address the memory of {_place(other)}: {why}"
    return UnsupportedError(f"PeerMemory: {text}; {_INSTEAD}")


class Proof(NamedTuple):
    """What lies at both ends of each share while it is being proven that all see the same.

    Behind the first end there is what each rank has written into the share: that reads are right
    does not say that writes are.
    """

    made: Range
    num_ranks: int
    share_bytes: int
    nonce: str  # the same in all ranks, of this range alone
    timeout_s: float

    def write(self, mine: PeerInfo) -> None:
        """Zero a rank's memory, of which the driver says nothing, and write this there."""
        if mine.facts["_ordinal"] >= 0:
            self._clear(mine.rank * self.share_bytes, self.share_bytes, mine)
        for at in self._ends(mine):
            self._write(at, mine)

    def compare(self, mine: PeerInfo, peers: list[PeerInfo]) -> None:
        """Raise UnsupportedError where one does not find what another has written; write there."""
        for other in peers:
            if not all(self._is_right(at, mine) for at in self._ends(other)):
                what = f"{_place(mine)} reads in the memory of {_place(other)} what was not written"
                raise self._wrong(f"{what} there")
            self._write(self._sent_at(mine, other), mine)

    def receive(self, mine: PeerInfo, peers: list[PeerInfo]) -> None:
        """Raise UnsupportedError where one's own memory has not what another has sent."""
        for other in peers:
            if not self._is_right(self._sent_at(other, mine), mine):
                what = f"what {_place(other)} writes to the memory of {_place(mine)} is not there"
                raise self._wrong(what)

    def clear(self, mine: PeerInfo) -> None:
        """Leave zeros."""
        first, last = self._ends(mine)
        self._clear(first, (1 + self.num_ranks) * _PROOF_BYTES, mine)
        self._clear(last, _PROOF_BYTES, mine)

    def _write(self, at: int, mine: PeerInfo) -> None:
        self.made.write(at, self._text(at), mine.facts["_ordinal"], self.timeout_s)

    def _clear(self, at: int, count: int, mine: PeerInfo) -> None:
        self.made.clear(at, count, mine.facts["_ordinal"], self.timeout_s)

    def _is_right(self, at: int, mine: PeerInfo) -> bool:
        found = self.made.read(at, _PROOF_BYTES, mine.facts["_ordinal"], self.timeout_s)
        return bytes(found) == self._text(at)

    def _wrong(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"PeerMemory: peer access gives wrong data: {what}; {_INSTEAD}, and see whether the "
            "IOMMU or PCIe ACS is in the way"
        )

    def _sent_at(self, writer: PeerInfo, owner: PeerInfo) -> int:
        return owner.rank * self.share_bytes + (1 + writer.rank) * _PROOF_BYTES

    def _ends(self, place: PeerInfo) -> tuple[int, int]:
        first = place.rank * self.share_bytes
        return first, first + self.share_bytes - _PROOF_BYTES

    def _text(self, at: int) -> bytes:
        return hashlib.shake_128(f"{self.nonce} {at}".encode()).digest(_PROOF_BYTES)
