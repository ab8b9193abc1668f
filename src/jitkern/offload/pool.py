"""``PinnedPool``: pinned host memory in seconds, private or shared by the ranks of a node."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from jitkern.errors import ShareError
from jitkern.offload import hostmem, memory
from jitkern.offload.share import Meeting, PoolHandle, Share, attach

if TYPE_CHECKING:
    import torch

_MAX_THREADS = 32  # 8 back 38 GB/s of used memory, 16 52: what is left is the kernel's zeroing
_ALIGN_BYTES = 128  # tensors begin on a line, so that rows of whole lines lie on lines


@dataclass(frozen=True)
class PoolStats:
    """What a pool is, and what it took to make it.

    Attributes
    ----------
    num_bytes : int
    num_threads : int
        That touched the memory first.
    huge_bytes : int
        Of it in huge pages, as Linux says; 0 where it does not.
    touch_s, register_s : float
        Seconds that each took, here and not in other ranks.
    numa : str
        Where the memory lies: ``"node 1"``, ``"nodes 0 and 1"`` or ``"as Linux chose"``; of a
        shared pool the part that this rank has touched.
    is_registered : bool
        Whether CUDA knows the memory as pinned; false without a GPU, and once it is closed.
    """

    num_bytes: int
    num_threads: int
    huge_bytes: int
    touch_s: float
    register_s: float
    numa: str
    is_registered: bool


class PinnedPool:
    """Pinned host memory of exactly the size that is asked for, cut into tensors.

    Mapped in huge pages, touched by a thread a core, then registered with CUDA where it lies: 24
    GB/s of 64 GiB, where ``cuMemHostAlloc`` makes 2.8 (``bench/results/pinned_pool.json``), and
    PyTorch's pinned tensors as much, rounded up to a power of two. All or nothing: where a part
    cannot be registered, what was is unregistered, and the call raises. Without a GPU it is the
    same memory, not registered.

    The memory lives as long as the pool or a tensor of it. It is given back when the last one goes:
    then, as in :meth:`close`, the call waits for the GPUs first. At exit, pools are closed in the
    reverse order of their making. A forked child has no part of a private pool: it must not touch
    its tensors (the parent's pages would be copied away from under the GPU; it gets SIGSEGV).

    Parameters
    ----------
    size : int or sequence of int
        Bytes, or the shape of a tensor of ``dtype``.
    dtype : torch.dtype, optional
        With a shape. :meth:`tensor` without arguments is then that tensor.
    numa : "local", "interleave", int or None
        Where the memory lies: on the node of the current GPU as far as it has room, on all nodes in
        turn, on this node and no other, or where Linux puts it; of a shared pool this rank's part.
    share : Share, optional
        One pool for all ranks of a node. Every rank makes it, with the same name and size; each
        touches its part, all register it. The memory belongs to no file: it goes with the last
        process that has it, also by ``kill -9``.
    num_threads : int, optional
        For the first touch; by default one for each core the process may use, at most 32.
    progress : bool, optional
        Whether to show on standard error how far it is; by default from 4 GiB on, on a terminal.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; a NUMA node that the machine does not have.
    MemoryError
        More than is free: asked for before, because Linux would kill the process later.
    RuntimeError
        CUDA does not register the memory, or Linux does not bind it; nothing is left.
    ShareError
        A rank did not come, went away, failed, or asked for something else; in every rank.

    Examples
    --------
    >>> import torch
    >>> from jitkern.offload import PinnedPool
    >>> pool = PinnedPool([1000, 328], torch.bfloat16)
    >>> cache = pool.tensor()
    >>> cache.shape, cache.dtype
    (torch.Size([1000, 328]), torch.bfloat16)
    >>> pool.close()
    """

    _pid: int
    _number: int
    _used: int
    _shape: list[int]
    _dtype: torch.dtype | None
    _bytes: torch.Tensor | None
    _meeting: Meeting | None
    _stats: PoolStats

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
        meeting = None
        if share is not None and not isinstance(share, Share):
            raise TypeError(f"PinnedPool: share: {type(share).__name__}, expected a Share")
        if share is None or share.rank == 0:
            memory.require_free(num_bytes)
        if share is not None:
            meeting = Meeting(share, num_bytes)
        self._make(num_bytes, meeting, share, numa, threads, progress)
        self._shape, self._dtype = shape, dtype

    @classmethod
    def attach(cls, handle: PoolHandle | int, num_bytes: int | None = None) -> PinnedPool:
        """Return the pool of other processes, registered here too.

        Parameters
        ----------
        handle : PoolHandle or int
            Of an open shared pool of this user on this node: its :attr:`handle`, which pickles, or
            a descriptor of its memory that this process has inherited.
        num_bytes : int, optional
            Raises ValueError unless the pool has this size.
        """
        if isinstance(handle, bool) or not isinstance(handle, PoolHandle | int):
            what = type(handle).__name__
            raise TypeError(f"PinnedPool.attach: handle: {what}, expected a PoolHandle or an int")
        fd = os.dup(handle) if isinstance(handle, int) else attach(handle)
        try:
            found = os.fstat(fd).st_size
            wanted = found if num_bytes is None else num_bytes
            if wanted != found or found < 1:
                text = f"{wanted} bytes, expected {found}, the size of the pool"
                raise ValueError(f"PinnedPool.attach: num_bytes: {text}")
            pool = cls.__new__(cls)
            pool._make(found, None, None, None, _threads_arg(None), None, fd)
        finally:
            os.close(fd)
        pool._shape, pool._dtype = [found], None
        return pool

    def tensor(
        self, shape: int | Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the next tensor of the pool, from the next multiple of 128 bytes on.

        Its content is zero, but in a shared pool, where all ranks that ask for the same tensors get
        the same memory. Without arguments it is the tensor that the pool was made for, or all of
        its bytes.

        Raises
        ------
        ValueError
            Not as much is left.
        RuntimeError
            The pool is closed, or the process is a forked child.
        """
        import torch

        bytes_ = self._usable("tensor")
        if shape is None:
            shape, dtype = self._shape, dtype or self._dtype
        sizes, num_bytes = _size_arg(shape, dtype or torch.uint8, "PinnedPool.tensor", "shape")
        begin = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        if begin + num_bytes > self._stats.num_bytes:
            left = max(0, self._stats.num_bytes - begin)
            text = f"{num_bytes} bytes, expected at most the {left} that are left"
            raise ValueError(f"PinnedPool.tensor: shape: {text} of {self._stats.num_bytes}")
        self._used = begin + num_bytes
        with torch.inference_mode(False):  # or it could not be written outside of that
            part = bytes_[begin : begin + num_bytes]
            return part.view(dtype or torch.uint8).view(sizes)

    @property
    def stats(self) -> PoolStats:
        """What the pool is, and what it took to make it."""
        return self._stats

    @property
    def handle(self) -> PoolHandle:
        """What :meth:`attach` takes in a process that is none of the ranks; picklable."""
        self._usable("handle")
        if self._meeting is None:
            raise ValueError("PinnedPool.handle: a private pool, expected one made with share=")
        return self._meeting.handle

    def close(self) -> None:
        """Wait for the GPUs and unregister the memory; again: do nothing.

        Tensors stay valid on the CPU, and keep the memory; a call that takes one to a GPU raises.

        Raises
        ------
        RuntimeError
            A stream is being captured: the pool stays open.
        """
        if self._bytes is None or os.getpid() != self._pid:
            return
        memory.close(self._bytes)
        self._bytes = None
        self._stats = replace(self._stats, is_registered=False)
        if self._meeting is not None:
            self._meeting.close()
        _open.discard(self)

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self._stats
        state = "closed" if self._bytes is None else "pinned" if stats.is_registered else "pageable"
        registered = f", registered in {stats.register_s:.2f} s" if stats.register_s else ""
        return (
            f"PinnedPool({memory.size_text(stats.num_bytes)}, {state}, "
            f"{stats.huge_bytes / stats.num_bytes:.0%} in huge pages, {stats.numa}; touched by "
            f"{stats.num_threads} threads in {stats.touch_s:.2f} s{registered})"
        )

    def _usable(self, what: str) -> torch.Tensor:
        if os.getpid() != self._pid:
            text = (
                "a forked child has no part of its parent's pool; make one, or attach to its handle"
            )
            raise RuntimeError(f"PinnedPool.{what}: {text}")
        if self._bytes is None:
            raise RuntimeError(f"PinnedPool.{what}: the pool is closed")
        return self._bytes

    def _make(
        self,
        num_bytes: int,
        meeting: Meeting | None,
        share: Share | None,
        numa: str | int | None,
        threads: int,
        progress: bool | None,
        fd: int = -1,
    ) -> None:
        import torch

        self._pid, self._used, self._meeting, self._bytes = os.getpid(), 0, meeting, None
        rank, num_ranks = (0, 1) if share is None else (share.rank, share.num_ranks)
        try:
            with memory.display(num_bytes, progress) as shown:
                fd = meeting.fd if meeting is not None else fd
                if meeting is not None:
                    meeting.step("here")  # so that all hear of a rank that fails later
                with _met(meeting, "mapped"):
                    bytes_ = memory.mapped(num_bytes, fd)
                    where = memory.bind(bytes_, numa, rank, num_ranks)
                started = time.perf_counter()
                with _met(meeting, "touched"):
                    # An attached pool has been touched: this maps it.
                    memory.touch(bytes_, rank, num_ranks, threads, shown)
                touch_s = time.perf_counter() - started
                started = time.perf_counter()
                with _met(meeting, "registered"):
                    registered = torch.cuda.is_available()
                    if registered:
                        memory.register(bytes_, shown)
                        memory.open_to_ops(bytes_)
                register_s = time.perf_counter() - started
            huge = 0
            with suppress(OSError):  # what all have is not to fail in one rank for that
                huge = hostmem.huge_bytes(bytes_.data_ptr(), num_bytes)
        except BaseException:
            if meeting is not None:
                meeting.close()
            raise
        self._stats = PoolStats(
            num_bytes, threads, huge, touch_s, register_s if registered else 0.0, where, registered
        )
        self._bytes = bytes_
        self._number = next(_numbers)
        if meeting is not None:
            weakref.finalize(self, meeting.close)  # its thread would keep the memory and the name
        _open.add(self)


_open: weakref.WeakSet[PinnedPool] = weakref.WeakSet()
_numbers = itertools.count()


@atexit.register
def _close_all() -> None:
    """Unregister before CUDA goes; a set has no order, the time of making has."""
    for pool in sorted(_open, key=lambda pool: pool._number, reverse=True):
        pool.close()


@contextmanager
def _met(meeting: Meeting | None, step: str) -> Iterator[None]:
    """All ranks do the body, or all raise."""
    try:
        yield
    except BaseException as error:
        if meeting is not None:
            with suppress(ShareError):  # in the others; here it is the error itself
                meeting.step(step, failure=f"{type(error).__name__}: {error}")
        raise
    if meeting is not None:
        meeting.step(step)


def _size_arg(
    size: Any, dtype: torch.dtype | None, call: str = "PinnedPool", arg: str = "size"
) -> tuple[list[int], int]:
    """Return the shape, and its bytes."""
    import torch

    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: {type(dtype).__name__}, expected a torch.dtype")
    expected = "an int or a sequence of ints"
    if isinstance(size, bool | str | bytes):
        raise TypeError(f"{call}: {arg}: {type(size).__name__}, expected {expected}")
    try:
        shape = [index(size)] if not isinstance(size, Sequence) else [index(one) for one in size]
    except TypeError:
        raise TypeError(f"{call}: {arg}: {type(size).__name__}, expected {expected}") from None
    if isinstance(size, Sequence) and dtype is None:
        raise TypeError(f"{call}: dtype: None, expected a torch.dtype for a shape")
    num_bytes = math.prod(shape) * (1 if dtype is None else dtype.itemsize)
    if not shape or min(shape) < 1:
        came = shape[0] if len(shape) == 1 else shape
        raise ValueError(f"{call}: {arg}: {came}, expected at least 1 byte")
    return shape, num_bytes


def _numa_arg(numa: Any) -> None:
    if numa is None or (isinstance(numa, str) and numa in ("local", "interleave")):
        return
    expected = '"local", "interleave", a node or None'
    if isinstance(numa, bool) or not isinstance(numa, int):
        came = repr(numa) if isinstance(numa, str) else type(numa).__name__
        kind = ValueError if isinstance(numa, str) else TypeError
        raise kind(f"PinnedPool: numa: {came}, expected {expected}")
    nodes = hostmem.numa_nodes()
    if numa not in nodes:
        there = ", ".join(map(str, nodes)) or "none that Linux tells of"
        raise ValueError(f"PinnedPool: numa: {numa}, expected a node with memory: {there}")


def _threads_arg(num_threads: Any) -> int:
    cores = len(os.sched_getaffinity(0))
    if num_threads is None:
        return min(cores, _MAX_THREADS)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int):
        came = type(num_threads).__name__
        raise TypeError(f"PinnedPool: num_threads: {came}, expected an int")
    if not 1 <= num_threads <= cores:
        raise ValueError(f"PinnedPool: num_threads: {num_threads}, expected 1 to {cores} cores")
    return num_threads
