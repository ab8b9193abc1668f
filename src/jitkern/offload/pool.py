"""``PinnedPool``: pinned host memory in seconds, private or shared by the ranks of a node."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from jitkern import fs
from jitkern.args import dtype_arg, int_arg, optional_arg, shape_arg, type_text
from jitkern.env import parse_bytes
from jitkern.errors import PoolShareError
from jitkern.offload import memory
from jitkern.offload.memory import PinnedMemory

if TYPE_CHECKING:
    from jitkern.comm.rendezvous import Rendezvous

_ALIGN_BYTES = 128  # a cache line, so that rows of whole lines are aligned


@dataclass(frozen=True)
class PoolShare:
    """This process's place among the processes of one node that share a pool.

    Parameters
    ----------
    name
        The pool's name, the same on all ranks: letters, digits and ``._+-``. Errors quote it.
    group
        How the ranks find each other: a gloo group of exactly these ranks, or a ``Store`` of
        torch.distributed that nothing else uses. Default: torch's default group.
    rank, world_size
        This rank and the number of ranks. Default: those of the group. Required with a store.
    timeout_s
        Seconds that a rank waits for the others in each step.
    """

    name: str
    group: Any = None
    _: KW_ONLY
    rank: int | None = None
    world_size: int | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class PoolStats:
    """Bytes and NUMA node of a pool, and the seconds that this process took to make it."""

    num_bytes: int
    touch_s: float
    register_s: float
    numa_node: int | None  # the preferred node of the memory, or of this rank's part
    is_registered: bool  # False without a GPU, and after the pool is closed


class PinnedPool(AbstractContextManager["PinnedPool"]):
    """Pinned host memory of exactly the requested bytes, split into tensors.

    The memory is mapped in huge pages on the NUMA node of the current GPU, touched by one thread
    per core, then registered with CUDA: 24 GB/s for 64 GiB, 2.8 with ``cuMemHostAlloc``
    (``bench/results/pinned_pool.json``). It starts as zeros. Without a GPU it is not registered. It
    is freed when the pool and all its tensors are gone, after waiting for the GPUs. A forked child
    must not touch the tensors of a private pool.

    Parameters
    ----------
    num_bytes : int or str
        Bytes, or a text such as ``"64G"``: 64 GiB, as the sizes of ``jitkern warm``.
    share : PoolShare, optional
        One pool for all ranks of a node; every rank makes it, with the same name and bytes.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.
    MemoryError
        There is not enough free memory; Linux would kill the process later.
    RuntimeError
        CUDA cannot register the memory.
    PoolShareError
        On every rank: a rank is missing, has ended or failed, or asked for other `num_bytes`.
    """

    _used = 0  # bytes given to tensors
    _memory: PinnedMemory | None = None

    def __init__(self, num_bytes: int | str, *, share: PoolShare | None = None) -> None:
        num_bytes = _bytes_arg(num_bytes)
        optional_arg("PinnedPool", "share", share, PoolShare)
        if share is None:
            with memory.taking(num_bytes):
                pinned = PinnedMemory(num_bytes)
            pinned.register()
        else:
            pinned = _make_shared(num_bytes, share)
        self._pid = os.getpid()
        self._memory = pinned
        self._stats = PoolStats(
            num_bytes, pinned.touch_s, pinned.register_s, pinned.numa_node, pinned.is_registered
        )

    def tensor(
        self, shape: int | Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the next tensor of the pool, at the next multiple of 128 bytes.

        ``tensor()`` is all bytes of the pool, if it is the first tensor; ``tensor(n)`` is the next
        n bytes. Both are uint8. In a shared pool, ranks that make the same calls get the same
        memory. TypeError or ValueError for a wrong argument or if less memory is left, RuntimeError
        if the pool is closed.
        """
        if os.getpid() != self._pid:
            text = "a forked child has no part of its parent's pool; make one"
            raise RuntimeError(f"PinnedPool.tensor: {text}")
        if self._memory is None:
            raise RuntimeError("PinnedPool.tensor: the pool is closed")
        bytes_ = self._memory.tensor
        if shape is None and dtype is None:
            shape = len(bytes_)
        sizes, dtype = _shape_arg(shape, dtype)
        num_bytes = math.prod(sizes) * dtype.itemsize
        begin = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        if begin + num_bytes > len(bytes_):
            left = max(0, len(bytes_) - begin)
            text = f"{num_bytes} bytes, expected at most the {left} that are left"
            raise ValueError(f"PinnedPool.tensor: shape: {text} of {len(bytes_)}")
        self._used = begin + num_bytes
        with torch.inference_mode(False):  # inference tensors cannot be written outside of it
            part = bytes_[begin : begin + num_bytes]
            return part.view(dtype).view(sizes)

    def stats(self) -> PoolStats:
        """Return the pool's bytes and NUMA node, and what it took to make it."""
        return self._stats

    def close(self) -> None:
        """Wait for the GPUs and unregister the memory; a second call does nothing.

        Tensors keep the memory and stay valid on the CPU; ops that would pass one to a GPU raise.
        RuntimeError while torch's current stream is being captured; the pool then stays open. While
        another stream is being captured, it waits only for torch's other streams.
        """
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            self._stats = replace(self._stats, is_registered=False)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self._stats
        state = "pinned" if stats.is_registered else "pageable"
        state = "closed" if self._memory is None else state
        node = "" if stats.numa_node is None else f" on node {stats.numa_node}"
        registered = f", registered in {stats.register_s:.2f} s" if stats.register_s else ""
        size = fs.size_text(stats.num_bytes)
        return f"PinnedPool({size}, {state}{node}; touched in {stats.touch_s:.2f} s{registered})"


def _make_shared(num_bytes: int, share: PoolShare) -> PinnedMemory:
    """Make the memory in all ranks, or in none: collective."""
    # Imported here, as in _meeting: only shared pools need the ranks.
    from jitkern.comm.descriptors import Descriptors, hand_over

    with _meeting(share, num_bytes) as met, Descriptors() as fds, ExitStack() as lock:

        def make() -> None:
            if met.rank == 0:
                lock.enter_context(memory.taking(num_bytes))
                name = f"jitkern-pool-{share.name}"
                fds[0] = fs.make_memory("PinnedPool: share", name, num_bytes)

        met.all_or_none("made", make)
        hand_over(met, fds, [0])
        part = partial(PinnedMemory, num_bytes, fds[0], met.rank, met.world_size)
        pinned = met.all_or_none("touched", part)
        lock.close()
        met.all_or_none("registered", pinned.register)
    return pinned


@contextmanager
def _meeting(share: PoolShare, num_bytes: int) -> Iterator[Rendezvous]:
    """Connect the ranks of a shared pool while they make it; turn errors into PoolShareError."""
    from jitkern.comm.rendezvous import Rendezvous

    if not isinstance(share.name, str) or not fs.is_safe_name(share.name):
        expected = "1 to 200 letters, digits, '.', '_', '+' and '-'"
        raise ValueError(f"PinnedPool: share: name: {share.name!r}, expected {expected}")
    name, facts = f"PinnedPool: share {share.name!r}", {"num_bytes": num_bytes}
    try:
        ranks = share.group, share.rank, share.world_size
        met = Rendezvous(name, *ranks, timeout_s=share.timeout_s, facts=facts)
        try:
            yield met
            met.close()
        except BaseException as error:
            met.fail(error)
            raise
    except (TypeError, ValueError):
        raise  # a wrong argument of this rank
    except Exception as error:
        raise PoolShareError(f"{name}: {str(error).removeprefix(name + ': ')}") from error


def _bytes_arg(num_bytes: Any) -> int:
    """Return a number of bytes, which may be a text."""
    if isinstance(num_bytes, str):
        parsed = parse_bytes(num_bytes)
        if parsed is None:
            expected = "bytes such as 1048576, '512M' or '64G'"
            raise ValueError(f"PinnedPool: num_bytes: {num_bytes!r}, expected {expected}")
        num_bytes = parsed
    try:
        return int_arg("PinnedPool", "num_bytes", num_bytes, 1)
    except TypeError:
        text = f"{type_text(num_bytes)}, expected an int, or a text such as '64G'"
        raise TypeError(f"PinnedPool: num_bytes: {text}") from None


def _shape_arg(shape: Any, dtype: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a tensor; an int without a dtype counts bytes."""
    call = "PinnedPool.tensor"
    sizes = shape_arg(call, "shape", shape) if isinstance(shape, Sequence) else None
    if sizes is None:
        sizes = (int_arg(call, "shape", shape, 1),)
        dtype = torch.uint8 if dtype is None else dtype
    if dtype is None:
        raise TypeError(f"{call}: dtype: None, expected a torch.dtype along with a shape")
    return sizes, dtype_arg(call, dtype)
