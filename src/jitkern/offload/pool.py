"""``PinnedPool``: pinned host memory in seconds, private or shared by the ranks of a node."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from jitkern import fs
from jitkern.args import dtype_arg, int_arg, optional_arg, shape_arg
from jitkern.errors import ShareError
from jitkern.offload import memory
from jitkern.offload.memory import PinnedMemory

if TYPE_CHECKING:
    from jitkern.comm.rendezvous import Rendezvous

_ALIGN_BYTES = 128  # tensors begin on a line, so that rows of whole lines lie on lines
_SHARED = Path("/dev/shm")  # where ranks without a group meet


@dataclass(frozen=True)
class Share:
    """Which of the processes that share a pool this one is.

    Parameters
    ----------
    name
        The same in all ranks, and of no other pool of this user: letters, digits, ``._+-``.
    rank, num_ranks
        This process's number, from 0 on, and how many there are, all on this node.
    timeout_s
        How long a rank waits for the others at each step.
    group
        How the ranks meet: a group of just these ranks, or a ``Store`` of torch.distributed. By
        default over a file in ``/dev/shm``.
    """

    name: str
    rank: int
    num_ranks: int
    timeout_s: float = 300.0
    group: Any = None


@dataclass(frozen=True)
class PoolStats:
    """What a pool is, and what it took to make it, here and not in other ranks."""

    num_bytes: int
    touch_s: float
    register_s: float
    numa_node: int | None  # where it, or this rank's part, lies if there is room
    is_registered: bool  # false without a GPU, and once the pool is closed


class PinnedPool(AbstractContextManager["PinnedPool"]):
    """Pinned host memory of exactly the size that is asked for, cut into tensors.

    Mapped in huge pages on the NUMA node of the current GPU, touched by one thread per core, then
    registered with CUDA: 24 GB/s of 64 GiB, where ``cuMemHostAlloc`` makes 2.8
    (``bench/results/pinned_pool.json``). Without a GPU it is the same memory, not registered. It
    lives as long as the pool or a tensor of it; the end of the last one waits for the GPUs. A
    forked child must not touch the tensors of a private pool.

    Parameters
    ----------
    size : int or sequence of int
        Bytes, or the shape of a tensor of ``dtype``.
    dtype : torch.dtype, optional
        With a shape. ``tensor`` without arguments is then that tensor.
    share : Share, optional
        One pool for all ranks of a node; every rank makes it, with the same name and size.
    progress : bool, optional
        Whether to show progress on standard error; by default from 4 GiB on, on a terminal.

    Raises
    ------
    TypeError, ValueError
        A wrong argument.
    MemoryError
        More than is free: Linux would kill the process later.
    RuntimeError
        CUDA does not register the memory.
    ShareError
        In every rank: one did not come, went away, failed, or asked for another size.
    """

    stats: PoolStats
    _used = 0  # bytes, by tensors
    _memory: PinnedMemory | None = None

    def __init__(
        self,
        size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        share: Share | None = None,
        progress: bool | None = None,
    ) -> None:
        self._shape, num_bytes = _size_arg(size, dtype)
        self._dtype = dtype
        optional_arg("PinnedPool", "share", share, Share)
        if share is None:
            memory.require_free(num_bytes)
            self._make(num_bytes, progress)
        else:
            self._make_shared(num_bytes, share, progress)

    def tensor(
        self, shape: int | Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the next tensor of the pool, from the next multiple of 128 bytes on.

        By default the tensor that the pool was made for, or all of its bytes. In a shared pool all
        ranks that ask for the same tensors get the same memory. ValueError if not as much is left,
        RuntimeError if the pool is closed.
        """
        bytes_ = self._usable("tensor").tensor
        if shape is None:
            shape, dtype = self._shape, dtype or self._dtype
        sizes, num_bytes = _size_arg(shape, dtype or torch.uint8, "PinnedPool.tensor", "shape")
        begin = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        if begin + num_bytes > len(bytes_):
            left = max(0, len(bytes_) - begin)
            text = f"{num_bytes} bytes, expected at most the {left} that are left"
            raise ValueError(f"PinnedPool.tensor: shape: {text} of {len(bytes_)}")
        self._used = begin + num_bytes
        with torch.inference_mode(False):  # or it could not be written outside of that
            part = bytes_[begin : begin + num_bytes]
            return part.view(dtype or torch.uint8).view(sizes)

    def close(self) -> None:
        """Wait for the GPUs and unregister the memory; again: do nothing.

        Tensors stay valid on the CPU, and keep the memory; a call that takes one to a GPU raises.
        While a stream is being captured it raises RuntimeError, and the pool stays open.
        """
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            self.stats = replace(self.stats, is_registered=False)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats
        state = "pinned" if stats.is_registered else "pageable"
        state = "closed" if self._memory is None else state
        node = "" if stats.numa_node is None else f" on node {stats.numa_node}"
        registered = f", registered in {stats.register_s:.2f} s" if stats.register_s else ""
        size = memory.size_text(stats.num_bytes)
        return f"PinnedPool({size}, {state}{node}; touched in {stats.touch_s:.2f} s{registered})"

    def _usable(self, what: str) -> PinnedMemory:
        if os.getpid() != self._pid:
            text = "a forked child has no part of its parent's pool"
            raise RuntimeError(f"PinnedPool.{what}: {text}; make one")
        if self._memory is None:
            raise RuntimeError(f"PinnedPool.{what}: the pool is closed")
        return self._memory

    def _make_shared(self, num_bytes: int, share: Share, progress: bool | None) -> None:
        """Make it together with the other ranks: all of them have it, or none has."""
        # Imported here, as in _meeting: only shared pools need the ranks.
        from jitkern.comm.descriptors import Descriptors, hand_over

        def make() -> None:
            if share.rank == 0:
                memory.require_free(num_bytes)
                name = f"jitkern-pool-{share.name}"
                fds[0] = fs.make_memory("PinnedPool: share", name, num_bytes)

        with _meeting(share, num_bytes) as met, Descriptors() as fds:
            met.all_or_none("made", make)
            hand_over(met, fds, [0])
            self._make(num_bytes, progress, fds[0], met)

    def _make(
        self, num_bytes: int, progress: bool | None, fd: int = -1, met: Rendezvous | None = None
    ) -> None:
        """Touch and register it, each step with the other ranks if there are any."""
        self._pid = os.getpid()
        with memory.display(num_bytes, progress) as shown:
            if met is None:
                made = PinnedMemory(num_bytes, fd, shown=shown)
                made.register(shown)
            else:
                make = partial(PinnedMemory, num_bytes, fd, met.rank, met.size, shown)
                made = met.all_or_none("touched", make)
                met.all_or_none("registered", partial(made.register, shown))
        self.stats = PoolStats(
            num_bytes, made.touch_s, made.register_s, made.numa_node, made.is_registered
        )
        self._memory = made


@contextmanager
def _meeting(share: Share, num_bytes: int) -> Iterator[Rendezvous]:
    """Meet the ranks of a shared pool while they make it; an error of any is a ShareError."""
    from jitkern.comm.rendezvous import Rendezvous

    if not isinstance(share.name, str) or not fs.is_safe_name(share.name):
        expected = "1 to 200 letters, digits, '.', '_', '+' and '-'"
        raise ValueError(f"PinnedPool: share: name: {share.name!r}, expected {expected}")
    name, facts = f"PinnedPool: share {share.name!r}", {"num_bytes": num_bytes}
    try:
        group = _file_store(share.name) if share.group is None else share.group
        met = Rendezvous(
            name, group, share.rank, share.num_ranks, timeout_s=share.timeout_s, facts=facts
        )
        try:
            yield met
            met.close()
        except BaseException as error:
            met.fail(error)
            raise
    except (TypeError, ValueError):
        raise  # an argument of this rank's
    except Exception as error:
        raise ShareError(f"{name}: {str(error).removeprefix(name + ': ')}") from error


def _file_store(name: str) -> Any:
    """Return a store in a file that only this user can read."""
    folder = _SHARED / f"jitkern-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o177077 != 0o040000:
        text = f"uid {found.st_uid}, mode {found.st_mode & 0o7777:o}"
        expected = f"a folder of uid {os.geteuid()} alone, mode 700"
        raise ShareError(f"{folder}: {text}, expected {expected}")
    path = str(folder / f"pool-{name}")
    return dist.FileStore(path, -1)  # type: ignore[attr-defined]


def _size_arg(
    size: Any, dtype: torch.dtype | None, call: str = "PinnedPool", name: str = "size"
) -> tuple[list[int], int]:
    """Return the shape, and its bytes."""
    if dtype is not None:
        dtype_arg(call, dtype)
    if not isinstance(size, Sequence):
        shape = [int_arg(call, name, size, 1)]
    elif dtype is None:
        raise TypeError(f"{call}: dtype: None, expected a torch.dtype for a shape")
    else:
        shape = list(shape_arg(call, name, size))
    return shape, math.prod(shape) * (1 if dtype is None else dtype.itemsize)
