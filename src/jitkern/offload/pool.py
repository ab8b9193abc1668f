"""``PinnedPool``: pinned host memory in seconds, private or shared by the ranks of a node."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jitkern import fs
from jitkern.comm.args import seconds_arg
from jitkern.comm.descriptors import Descriptors, hand_over
from jitkern.comm.rendezvous import Rendezvous
from jitkern.errors import CommError, ShareError
from jitkern.offload import hostmem, memory

if TYPE_CHECKING:
    import torch

_MAX_THREADS = 32  # 8 back 38 GB/s of used memory, 16 52: what is left is the kernel's zeroing
_ALIGN_BYTES = 128  # tensors begin on a line, so that rows of whole lines lie on lines
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHARED = Path("/dev/shm")  # where ranks without a group meet

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Which one this process is of those that share a pool.

    Parameters
    ----------
    name
        The pool's, the same in all ranks, and at a time of no other pool of this user: 1 to 64
        letters, digits and ``. _ -``.
    rank
        From 0 to `num_ranks` - 1. Rank 0 makes the memory.
    num_ranks
        How many processes there are, all on this node.
    timeout_s
        Seconds that a rank waits for the others at each step, above 0 and at most 1e6.
    group
        How the ranks meet: a group of just these ranks, or a ``Store`` of torch.distributed. By
        default over a small file of this user's in ``/dev/shm``.

    Raises
    ------
    ValueError, TypeError
        One of them makes no sense.

    Examples
    --------
    >>> Share("kv-host-pool", rank=1, num_ranks=8).timeout_s
    300.0
    """

    name: str
    rank: int
    num_ranks: int
    timeout_s: float = 300.0
    group: Any = None

    def __post_init__(self) -> None:
        _name_arg("PinnedPool: share: name", self.name)
        _int_arg("PinnedPool: share: num_ranks", self.num_ranks, 1)
        _int_arg("PinnedPool: share: rank", self.rank, 0)
        if self.rank >= self.num_ranks:
            raise ValueError(
                f"PinnedPool: share: rank {self.rank}, expected below num_ranks {self.num_ranks}"
            )
        seconds_arg("PinnedPool: share", self.timeout_s)


@dataclass(frozen=True)
class PoolHandle:
    """What a process that is none of the ranks attaches to a pool by; it can be pickled.

    Attributes
    ----------
    name : str
        The pool's, as of :class:`Share`.
    num_bytes : int
        Bytes of the whole pool.
    pid, fd : int
        The process that gave it, whose pool has to be open, and its descriptor there.
    """

    name: str
    num_bytes: int
    pid: int
    fd: int

    def __post_init__(self) -> None:
        _name_arg("PoolHandle: name", self.name)
        _int_arg("PoolHandle: num_bytes", self.num_bytes, 1)

    def open(self) -> int:
        """Return a descriptor of the memory. Linux opens it for this user's processes only."""
        path = f"/proc/{self.pid}/fd/{self.fd}"
        prefix = f"PinnedPool.attach: handle: pool {self.name!r}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_memory_name(self.name)} "):
                raise FileNotFoundError
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            text = f"process {self.pid} has it no more, expected one that has the pool open"
            raise ShareError(f"{prefix}: {text}, in this PID namespace") from None
        except OSError as error:
            raise ShareError(f"{prefix}: of process {self.pid}: {error}") from error
        if os.fstat(fd).st_size != self.num_bytes:
            os.close(fd)
            raise ShareError(f"{prefix}: of another size, expected {self.num_bytes} bytes")
        return fd


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
        process that has it, also by ``kill -9``. Ranks meet at each step, and not afterwards.
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
    _shared: tuple[str, int] | None  # its name, and a descriptor of it
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
        if share is not None and not isinstance(share, Share):
            raise TypeError(f"PinnedPool: share: {type(share).__name__}, expected a Share")
        if share is None:
            memory.require_free(num_bytes)
            self._make(num_bytes, numa, threads, progress)
        else:
            self._make_shared(num_bytes, share, numa, threads, progress)
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
        fd = os.dup(handle) if isinstance(handle, int) else handle.open()
        try:
            found = os.fstat(fd).st_size
            wanted = found if num_bytes is None else num_bytes
            if wanted != found or found < 1:
                text = f"{wanted} bytes, expected {found}, the size of the pool"
                raise ValueError(f"PinnedPool.attach: num_bytes: {text}")
            pool = cls.__new__(cls)
            pool._make(found, None, _threads_arg(None), None, fd=fd)
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
        if self._shared is None:
            raise ValueError("PinnedPool.handle: a private pool, expected one made with share=")
        name, fd = self._shared
        return PoolHandle(name, self._stats.num_bytes, self._pid, fd)

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
        self._close_shared()
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

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._closing()
            self._shared = None

    def _usable(self, what: str) -> torch.Tensor:
        if os.getpid() != self._pid:
            text = (
                "a forked child has no part of its parent's pool; make one, or attach to its handle"
            )
            raise RuntimeError(f"PinnedPool.{what}: {text}")
        if self._bytes is None:
            raise RuntimeError(f"PinnedPool.{what}: the pool is closed")
        return self._bytes

    def _make_shared(
        self, num_bytes: int, share: Share, numa: str | int | None, threads: int, progress: Any
    ) -> None:
        """Make it together with the other ranks: all of them have it, or none has."""
        with ExitStack() as undo:
            met = undo.enter_context(_Ranks(share, num_bytes))
            fds = undo.enter_context(Descriptors())

            def make() -> None:
                if share.rank == 0:
                    memory.require_free(num_bytes)
                    fds[0] = fs.make_memory(
                        "PinnedPool: share", _memory_name(share.name), num_bytes
                    )

            met.all_do("made", make)
            met.hand_over(fds)
            self._make(num_bytes, numa, threads, progress, fd=fds[0], met=met)
            self._shared = share.name, fds.pop(0)
            self._closing = weakref.finalize(self, os.close, self._shared[1])

    def _make(
        self,
        num_bytes: int,
        numa: str | int | None,
        threads: int,
        progress: bool | None,
        *,
        fd: int = -1,
        met: _Ranks | None = None,
    ) -> None:
        import torch

        self._pid, self._used, self._bytes, self._shared = os.getpid(), 0, None, None
        rank, num_ranks = (0, 1) if met is None else (met.share.rank, met.share.num_ranks)
        all_do = _alone if met is None else met.all_do
        with memory.display(num_bytes, progress) as shown:

            def map_it() -> tuple[torch.Tensor, str]:
                bytes_ = memory.mapped(num_bytes, fd)
                return bytes_, memory.bind(bytes_, numa, rank, num_ranks)

            def register() -> bool:
                if torch.cuda.is_available():
                    memory.register(bytes_, shown)
                    memory.open_to_ops(bytes_)
                return torch.cuda.is_available()

            bytes_, where = all_do("mapped", map_it)
            started = time.perf_counter()
            # An attached pool has been touched: this maps it.
            all_do("touched", lambda: memory.touch(bytes_, rank, num_ranks, threads, shown))
            touch_s = time.perf_counter() - started
            started = time.perf_counter()
            registered = all_do("registered", register)
            register_s = time.perf_counter() - started
        huge = 0
        with suppress(OSError):  # what all have is not to fail in one rank for that
            huge = hostmem.huge_bytes(bytes_.data_ptr(), num_bytes)
        self._stats = PoolStats(
            num_bytes, threads, huge, touch_s, register_s if registered else 0.0, where, registered
        )
        self._bytes = bytes_
        self._number = next(_numbers)
        _open.add(self)


def _alone(_: str, step: Callable[[], T]) -> T:
    return step()


def _memory_name(name: str) -> str:
    return f"jitkern-pool-{name}"


class _Ranks:
    """The ranks of a shared pool while they make it."""

    def __init__(self, share: Share, num_bytes: int) -> None:
        self.share = share
        group = _file_store(share.name) if share.group is None else share.group
        try:
            self._met = Rendezvous(
                *(f"PinnedPool: share {share.name!r}", group, share.rank, share.num_ranks),
                timeout_s=share.timeout_s,
                facts={"num_bytes": num_bytes},
            )
        except CommError as error:
            raise ShareError(str(error)) from error

    def all_do(self, name: str, step: Callable[[], T]) -> T:
        """Do a step, as all ranks do, or raise: its error, or a ShareError for that of another."""
        own: list[Exception] = []

        def do() -> T:
            try:
                return step()
            except Exception as error:
                own.append(error)
                raise

        try:
            return self._met.all_or_none(name, do)
        except Exception as error:
            if own:
                raise
            raise ShareError(str(error)) from error

    def hand_over(self, fds: Descriptors) -> None:
        """Give the memory of rank 0 to all."""
        try:
            hand_over(self._met, fds, [0])
        except CommError as error:
            raise ShareError(str(error)) from error

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self._met.close()
        else:
            self._met.fail(error)


def _file_store(name: str) -> Any:
    """Return a store in a file of this user's, which nobody else can read."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    folder = _SHARED / f"jitkern-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o177077 != 0o040000:
        raise ShareError(
            f"PinnedPool: share {name!r}: {folder}: of uid {found.st_uid}, mode "
            f"{found.st_mode & 0o7777:o}, expected a folder of uid {os.geteuid()} alone, mode 700"
        )
    return FileStore(str(folder / f"pool-{name}"), -1)


_open: weakref.WeakSet[PinnedPool] = weakref.WeakSet()
_numbers = itertools.count()


@atexit.register
def _close_all() -> None:
    """Unregister before CUDA goes; a set has no order, the time of making has."""
    for pool in sorted(_open, key=lambda pool: pool._number, reverse=True):
        pool.close()


def _forget_in_child() -> None:
    """Have a forked child not keep the memory of ranks that have ended."""
    for pool in list(_open):
        pool._close_shared()


os.register_at_fork(after_in_child=_forget_in_child)


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


def _name_arg(argument: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{argument}: {type(value).__name__}, expected str")
    if not _NAME.fullmatch(value):
        expected = "1 to 64 letters, digits, '.', '_' and '-'"
        raise ValueError(f"{argument}: {value!r}, expected {expected}")


def _int_arg(argument: str, value: Any, least: int) -> None:
    if type(value) is not int:  # True is no rank
        came = "None" if value is None else type(value).__name__
        raise TypeError(f"{argument}: {came}, expected int")
    if value < least:
        raise ValueError(f"{argument}: {value}, expected at least {least}")
