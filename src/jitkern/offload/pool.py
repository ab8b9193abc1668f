"""``PinnedPool``: pinned host memory in seconds, private or shared by the ranks of a node."""

from __future__ import annotations

import atexit
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jitkern import fs
from jitkern.comm.args import seconds_arg
from jitkern.comm.descriptors import Descriptors, hand_over
from jitkern.comm.rendezvous import Rendezvous
from jitkern.errors import CommError, ShareError
from jitkern.host import module as host
from jitkern.offload import memory
from jitkern.offload.args import choice_arg, count_arg, dtype_arg, optional_arg, shape_arg

if TYPE_CHECKING:
    import torch

_MAX_THREADS = 32  # 8 back 38 GB/s of used memory, 16 52: what is left is the kernel's zeroing
_ALIGN_BYTES = 128  # tensors begin on a line, so that rows of whole lines lie on lines
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHARED = Path("/dev/shm")  # where ranks without a group meet

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Which of the processes that share a pool this one is.

    Parameters
    ----------
    name
        The same in all ranks, and of no other pool of this user: 1 to 64 letters, digits, ``._-``.
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

    def __post_init__(self) -> None:
        call = "PinnedPool: share"
        if not isinstance(self.name, str):
            raise TypeError(f"{call}: name: {type(self.name).__name__}, expected str")
        if not _NAME.fullmatch(self.name):
            expected = "1 to 64 letters, digits, '.', '_' and '-'"
            raise ValueError(f"{call}: name: {self.name!r}, expected {expected}")
        count_arg(call, "num_ranks", self.num_ranks)
        if count_arg(call, "rank", self.rank, least=0) >= self.num_ranks:
            text = f"rank {self.rank}, expected below num_ranks {self.num_ranks}"
            raise ValueError(f"{call}: {text}")
        seconds_arg(call, self.timeout_s)


@dataclass(frozen=True)
class PoolHandle:
    """By this a process that is none of the ranks attaches to a pool; it can be pickled.

    The pool has to be open in process `pid`, as descriptor `fd`.
    """

    name: str
    num_bytes: int
    pid: int
    fd: int

    def open(self) -> int:
        """Return a descriptor of the memory. Linux opens it for this user's processes only."""
        path = f"/proc/{self.pid}/fd/{self.fd}"
        prefix = f"PinnedPool.attach: handle: pool {self.name!r}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_memory_name(self.name)} "):
                raise FileNotFoundError
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            text = f"process {self.pid} has it no more, expected one that has the pool open"
            raise ShareError(f"{prefix}: {text}, in this PID namespace") from None
        except OSError as error:
            raise ShareError(f"{prefix}: of process {self.pid}: {error}") from error


@dataclass(frozen=True)
class PoolStats:
    """What a pool is, and what it took to make it, here and not in other ranks."""

    num_bytes: int
    num_threads: int  # that touched it first
    huge_bytes: int  # of it in huge pages; 0 if Linux does not say
    touch_s: float
    register_s: float
    numa: str  # where it lies: "node 1", "nodes 0 and 1" or "as Linux chose"
    is_registered: bool  # false without a GPU, and once the pool is closed


class PinnedPool:
    """Pinned host memory of exactly the size that is asked for, cut into tensors.

    Mapped in huge pages, touched by one thread per core, then registered with CUDA: 24 GB/s of 64
    GiB, where ``cuMemHostAlloc`` makes 2.8 (``bench/results/pinned_pool.json``). Without a GPU it
    is the same memory, not registered. It lives as long as the pool or a tensor of it; the end of
    the last one waits for the GPUs. A forked child must not touch the tensors of a private pool.

    Parameters
    ----------
    size : int or sequence of int
        Bytes, or the shape of a tensor of ``dtype``.
    dtype : torch.dtype, optional
        With a shape. :meth:`tensor` without arguments is then that tensor.
    numa : "local", "interleave", int or None
        Where the memory, or this rank's part, lies: on the node of the current GPU as far as it has
        room, on all nodes in turn, on this node and no other, or where Linux puts it.
    share : Share, optional
        One pool for all ranks of a node; every rank makes it, with the same name and size.
    num_threads : int, optional
        For the first touch; by default one for each core, at most 32.
    progress : bool, optional
        Whether to show progress on standard error; by default from 4 GiB on, on a terminal.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; a NUMA node that the machine does not have.
    MemoryError
        More than is free: Linux would kill the process later.
    RuntimeError
        CUDA does not register the memory, or Linux does not bind it.
    ShareError
        In every rank: one did not come, went away, failed, or asked for another size.

    Examples
    --------
    >>> import torch
    >>> from jitkern.offload import PinnedPool
    >>> pool = PinnedPool([1000, 328], torch.bfloat16)
    >>> pool.tensor().shape
    torch.Size([1000, 328])
    >>> pool.close()
    """

    stats: PoolStats
    _pid: int
    _used: int
    _bytes: torch.Tensor | None
    _shared: tuple[str, int] | None  # its name, and a descriptor of it
    _close_fd: Callable[[], object]

    def __init__(
        self,
        size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        numa: Literal["local", "interleave"] | int | None = "local",
        share: Share | None = None,
        num_threads: int | None = None,
        progress: bool | None = None,
    ) -> None:
        shape, num_bytes = _size_arg(size, dtype)
        _numa_arg(numa)
        threads = _threads_arg(num_threads)
        optional_arg("PinnedPool", "share", share, Share)
        self._shape, self._dtype = shape, dtype
        if share is None:
            memory.require_free(num_bytes)
            self._make(num_bytes, numa, threads, progress)
        else:
            self._make_shared(num_bytes, share, numa, threads, progress)

    @classmethod
    def attach(cls, handle: PoolHandle | int, num_bytes: int | None = None) -> PinnedPool:
        """Return the pool of other processes, registered here too.

        `handle` is the :attr:`handle` of an open shared pool of this user on this node, or an
        inherited descriptor of its memory. ValueError unless it has `num_bytes`.
        """
        if isinstance(handle, bool) or not isinstance(handle, PoolHandle | int):
            what = type(handle).__name__
            raise TypeError(f"PinnedPool.attach: handle: {what}, expected a PoolHandle or an int")
        if isinstance(handle, PoolHandle):
            fd, num_bytes = handle.open(), num_bytes or handle.num_bytes
        else:
            fd = os.dup(handle)
        try:
            found = os.fstat(fd).st_size
            if found < 1 or num_bytes not in (None, found):
                text = f"{num_bytes} bytes, expected {found}, the size of the pool"
                raise ValueError(f"PinnedPool.attach: num_bytes: {text}")
            pool = cls.__new__(cls)
            pool._shape, pool._dtype = [found], None
            pool._make(found, None, _threads_arg(None), None, fd=fd)
            return pool
        finally:
            os.close(fd)

    def tensor(
        self, shape: int | Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the next tensor of the pool, from the next multiple of 128 bytes on.

        By default the tensor that the pool was made for, or all of its bytes. In a shared pool all
        ranks that ask for the same tensors get the same memory. ValueError if not as much is left,
        RuntimeError if the pool is closed.
        """
        import torch

        bytes_ = self._usable("tensor")
        if shape is None:
            shape, dtype = self._shape, dtype or self._dtype
        sizes, num_bytes = _size_arg(shape, dtype or torch.uint8, "PinnedPool.tensor", "shape")
        begin = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        if begin + num_bytes > self.stats.num_bytes:
            left = max(0, self.stats.num_bytes - begin)
            text = f"{num_bytes} bytes, expected at most the {left} that are left"
            raise ValueError(f"PinnedPool.tensor: shape: {text} of {self.stats.num_bytes}")
        self._used = begin + num_bytes
        with torch.inference_mode(False):  # or it could not be written outside of that
            part = bytes_[begin : begin + num_bytes]
            return part.view(dtype or torch.uint8).view(sizes)

    @property
    def handle(self) -> PoolHandle:
        """What :meth:`attach` takes in a process that is none of the ranks; picklable."""
        self._usable("handle")
        if self._shared is None:
            raise ValueError("PinnedPool.handle: a private pool, expected one made with share=")
        name, fd = self._shared
        return PoolHandle(name, self.stats.num_bytes, self._pid, fd)

    def close(self) -> None:
        """Wait for the GPUs and unregister the memory; again: do nothing.

        Tensors stay valid on the CPU, and keep the memory; a call that takes one to a GPU raises.
        While a stream is being captured it raises RuntimeError, and the pool stays open.
        """
        if self._bytes is None or os.getpid() != self._pid:
            return
        host.module()["pool_close"](self._bytes.data_ptr())
        self._bytes = None
        self.stats = replace(self.stats, is_registered=False)
        self._close_fd()
        _open.discard(self)

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats
        state = "closed" if self._bytes is None else "pinned" if stats.is_registered else "pageable"
        registered = f", registered in {stats.register_s:.2f} s" if stats.register_s else ""
        return (
            f"PinnedPool({memory.size_text(stats.num_bytes)}, {state}, "
            f"{stats.huge_bytes / stats.num_bytes:.0%} in huge pages, {stats.numa}; touched by "
            f"{stats.num_threads} threads in {stats.touch_s:.2f} s{registered})"
        )

    def _usable(self, what: str) -> torch.Tensor:
        if os.getpid() != self._pid:
            text = "a forked child has no part of its parent's pool"
            raise RuntimeError(f"PinnedPool.{what}: {text}; make one, or attach to its handle")
        if self._bytes is None:
            raise RuntimeError(f"PinnedPool.{what}: the pool is closed")
        return self._bytes

    def _make_shared(
        self, num_bytes: int, share: Share, numa: str | int | None, threads: int, progress: Any
    ) -> None:
        """Make it together with the other ranks: all of them have it, or none has."""

        def make() -> None:
            if share.rank == 0:
                memory.require_free(num_bytes)
                name = _memory_name(share.name)
                fds[0] = fs.make_memory("PinnedPool: share", name, num_bytes)

        with _meeting(share, num_bytes) as met, Descriptors() as fds:
            _all_or_none(met, "made", make)
            hand_over(met, fds, [0])
            self._make(num_bytes, numa, threads, progress, fds[0], met)
            self._shared = share.name, fds.pop(0)
            self._close_fd = weakref.finalize(self, os.close, self._shared[1])

    def _make(
        self,
        num_bytes: int,
        numa: str | int | None,
        threads: int,
        progress: bool | None,
        fd: int = -1,
        met: Rendezvous | None = None,
    ) -> None:
        """Touch and register it, each step with the other ranks if there are any."""
        self._pid, self._used = os.getpid(), 0
        self._bytes = self._shared = None
        self._close_fd = lambda: None
        rank, num_ranks = (0, 1) if met is None else (met.rank, met.size)

        def touch(shown: memory.Shown) -> tuple[torch.Tensor, str, float]:
            bytes_ = memory.mapped(num_bytes, fd)
            where = memory.bind(bytes_, numa, rank, num_ranks)
            started = time.perf_counter()
            memory.touch(bytes_, rank, num_ranks, threads, shown)
            return bytes_, where, time.perf_counter() - started

        with memory.display(num_bytes, progress) as shown:
            bytes_, where, touch_s = _all_or_none(met, "touched", partial(touch, shown))
            # After all ranks have touched their parts: CUDA would touch the rest by one thread.
            started = time.perf_counter()
            register = partial(memory.register, bytes_, shown)
            is_registered = _all_or_none(met, "registered", register)
            register_s = time.perf_counter() - started if is_registered else 0.0
        huge = 0
        with suppress(OSError):  # what all have must not fail in one rank for that
            huge = memory.huge_bytes(bytes_.data_ptr(), num_bytes)
        self.stats = PoolStats(num_bytes, threads, huge, touch_s, register_s, where, is_registered)
        self._bytes = bytes_
        _open.add(self)


_open: weakref.WeakSet[PinnedPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Unregister before CUDA goes."""
    for pool in list(_open):
        pool.close()


def _memory_name(name: str) -> str:
    return f"jitkern-pool-{name}"


@contextmanager
def _meeting(share: Share, num_bytes: int) -> Iterator[Rendezvous]:
    """The ranks of a shared pool while they make it; ShareError for what others have done."""
    group = _file_store(share.name) if share.group is None else share.group
    name, facts = f"PinnedPool: share {share.name!r}", {"num_bytes": num_bytes}
    try:
        met = Rendezvous(
            name, group, share.rank, share.num_ranks, timeout_s=share.timeout_s, facts=facts
        )
        try:
            yield met
            met.close()
        except BaseException as error:
            met.fail(error)
            raise
    except CommError as error:
        raise ShareError(str(error)) from error


def _all_or_none(met: Rendezvous | None, name: str, step: Callable[[], T]) -> T:
    """Do a step, as all ranks do, or raise: its error, or a ShareError for that of another."""
    if met is None:
        return step()
    try:
        return met.all_or_none(name, step)
    except Exception as error:
        if str(error).startswith(f"{met.name}: on rank "):
            raise ShareError(str(error)) from None
        raise


def _file_store(name: str) -> Any:
    """Return a store in a file of this user's, which nobody else can read."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    folder = _SHARED / f"jitkern-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o177077 != 0o040000:
        text = f"uid {found.st_uid}, mode {found.st_mode & 0o7777:o}"
        expected = f"a folder of uid {os.geteuid()} alone, mode 700"
        raise ShareError(f"PinnedPool: share {name!r}: {folder}: {text}, expected {expected}")
    return FileStore(str(folder / f"pool-{name}"), -1)


def _size_arg(
    size: Any, dtype: torch.dtype | None, call: str = "PinnedPool", name: str = "size"
) -> tuple[list[int], int]:
    """Return the shape, and its bytes."""
    if dtype is not None:
        dtype_arg(call, dtype)
    if not isinstance(size, Sequence):
        shape = [count_arg(call, name, size)]
    elif dtype is None:
        raise TypeError(f"{call}: dtype: None, expected a torch.dtype for a shape")
    else:
        shape = list(shape_arg(call, name, size))
    return shape, math.prod(shape) * (1 if dtype is None else dtype.itemsize)


def _numa_arg(numa: Any) -> None:
    if isinstance(numa, str):
        choice_arg("PinnedPool", "numa", numa, ("local", "interleave"))
    elif numa is not None:
        nodes = memory.numa_nodes()
        if count_arg("PinnedPool", "numa", numa, least=0) not in nodes:
            there = ", ".join(map(str, nodes)) or "none that Linux tells of"
            raise ValueError(f"PinnedPool: numa: {numa}, expected a node with memory: {there}")


def _threads_arg(num_threads: Any) -> int:
    cores = len(os.sched_getaffinity(0))
    if num_threads is None:
        return min(cores, _MAX_THREADS)
    return count_arg("PinnedPool", "num_threads", num_threads, cores)
