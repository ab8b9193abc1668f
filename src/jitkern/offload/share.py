"""One memory for all processes of a node, and steps that they take together or not at all.

Rank 0 makes the memory, a memfd, and gives it to the others over a Unix socket of the abstract
namespace. There is no file, so nothing is left behind by a process that is killed. The processes
are one user's and share a network namespace (in Kubernetes one pod, in Docker one ``--network``);
their PID namespaces do not matter.
"""

from __future__ import annotations

import os
import re
import weakref
from dataclasses import dataclass

from jitkern.errors import ShareError
from jitkern.offload import wire
from jitkern.offload.rank0 import Host

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_BYTES = 2**63 - 1  # of a file
_MAX_TIMEOUT_S = 1e6  # twelve days; poll() takes no more than 24
_STEP_CHARS = 64
_REASON_CHARS = 4000  # 48 KB in JSON if all of them are rare; a message has up to 64 KB

# Rank 0 tells who is missing when the time is over: it is waited for that much longer.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Share:
    """Which one this process is of those that share a pool.

    Parameters
    ----------
    name
        The pool's, the same in all ranks, and at a time of no other pool of this user: 1 to 64
        letters, digits and ``. _ -``.
    rank
        From 0 to `num_ranks` - 1. Rank 0 owns the memory.
    num_ranks
        How many processes there are, all on this node.
    timeout_s
        Seconds that a rank waits for the others at each step, above 0 and at most 1e6.

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

    def __post_init__(self) -> None:
        _check_name("PinnedPool: share: name", self.name)
        _check_int("PinnedPool: share: num_ranks", self.num_ranks, 1)
        _check_int("PinnedPool: share: rank", self.rank, 0)
        if self.rank >= self.num_ranks:
            raise ValueError(
                f"PinnedPool: share: rank {self.rank}, expected below num_ranks {self.num_ranks}"
            )
        _check_seconds("PinnedPool: share: timeout_s", self.timeout_s)


@dataclass(frozen=True)
class PoolHandle:
    """What a process that is none of the ranks attaches to a pool by; it can be pickled.

    Parameters
    ----------
    name
        The pool's, as of :class:`Share`.
    num_bytes
        Bytes of the whole pool.

    Raises
    ------
    ValueError, TypeError
        One of them makes no sense.
    """

    name: str
    num_bytes: int

    def __post_init__(self) -> None:
        _check_name("PoolHandle: name", self.name)
        _check_int("PoolHandle: num_bytes", self.num_bytes, 1)


class Meeting:
    """The ranks of one shared pool, while it is made and as long as it is open.

    It is there when this rank holds the memory; that all others do as well says the first step. It
    is used by one thread at a time. In a forked child it is closed.

    Parameters
    ----------
    share
        Which of the ranks this process is.
    num_bytes
        Bytes of the whole pool, the same in all ranks.

    Attributes
    ----------
    fd : int
        Descriptor of the memory: `num_bytes` of zeros that no process can truncate; -1 once closed.
    num_bytes : int
        As given.
    handle : PoolHandle
        What :func:`attach` takes.

    Raises
    ------
    ShareError
        Rank 0 did not come in time; the name is another pool's; the ranks do not agree on
        `num_bytes` or `num_ranks`; two processes are one rank; a process of another user, or none
        of jitkern's, is at the other end; another rank has failed before.
    UnsupportedError
        There is no ``memfd_create``.
    ValueError, TypeError
        An argument makes no sense.

    Examples
    --------
    >>> meeting = Meeting(Share("pool-of-one", rank=0, num_ranks=1), 4096)
    >>> meeting.step("touched")
    >>> meeting.close()
    """

    def __init__(self, share: Share, num_bytes: int) -> None:
        _check_type("PinnedPool: share", share, Share)
        _check_int("PinnedPool: num_bytes", num_bytes, 1)
        self.fd: int = -1
        self.num_bytes = num_bytes
        self.handle: PoolHandle = PoolHandle(share.name, num_bytes)
        self._prefix = f"PinnedPool: share {share.name!r}: "
        self._failure: str | None = None
        self._pid = os.getpid()
        self._end: Host | _Guest
        if share.rank == 0:
            args = (share.name, share.num_ranks, num_bytes, share.timeout_s)
            self._end = Host(self._prefix, *args)
        else:
            self._end = _Guest(self._prefix, share, num_bytes)
        self.fd = self._end.fd
        _open.add(self)

    def step(self, name: str, failure: str | None = None) -> None:
        """Return when all ranks have come to this step, or raise in every one of them.

        Parameters
        ----------
        name
            1 to 64 characters, the same in all ranks.
        failure
            Why this rank cannot go on. It is to come all the same, or the others wait in vain.

        Raises
        ------
        ShareError
            A rank failed, went away, came to another step, or did not come within `timeout_s` of
            the first that did. Every later step raises the same.
        ValueError, TypeError
            An argument makes no sense.
        """
        _check_type("step: name", name, str)
        if not 1 <= len(name) <= _STEP_CHARS:
            raise ValueError(f"step: name: {name!r}, expected 1 to {_STEP_CHARS} characters")
        if failure is not None:
            _check_type("step: failure", failure, str)
            failure = failure[:_REASON_CHARS]
        if self.fd < 0 and self._failure is None:
            self._failure = "closed by this process, or this is a fork of it"
        if self._failure is None:
            try:
                self._end.arrive(name, failure)
                self._failure = self._end.outcome(name)
            except BaseException as error:  # KeyboardInterrupt, which the others are to hear of
                self._failure = f"interrupted by {type(error).__name__}"
                self._end.arrive(name, self._failure)
                raise
        if self._failure is not None:
            raise ShareError(f"{self._prefix}step {name!r}: {self._failure}")

    def close(self) -> None:
        """Leave: close sockets and descriptor; rank 0 answers nobody any more. Once is enough.

        The memory stays for as long as some process has it mapped.
        """
        if self.fd >= 0:
            if os.getpid() == self._pid:
                self._end.close()
            else:
                self._end.abandon()
            self.fd = -1


class _Guest:
    """Any rank but 0: says where it is, and hears from rank 0 what becomes of it."""

    def __init__(self, prefix: str, share: Share, num_bytes: int) -> None:
        self._timeout_s = share.timeout_s
        mine = {"rank": share.rank, "num_ranks": share.num_ranks}
        found = wire.fetch(prefix, share.name, num_bytes, share.timeout_s, "join", **mine)
        self._connection, self.fd = found
        self._connection.settimeout(share.timeout_s + _GRACE_S)

    def arrive(self, step: str, failure: str | None) -> None:
        limit_s = self._timeout_s
        wire.send(self._connection, "step", step=step, failure=failure, timeout_s=limit_s)

    def outcome(self, step: str) -> str | None:
        try:
            message = wire.receive(self._connection)
        except TimeoutError:
            return f"rank 0 does not answer within {self._timeout_s:g} s: its process hangs"
        except ValueError as error:
            return f"rank 0: {error}"
        if message is None:
            return "rank 0 went away: its process has ended; see its log"
        if message["kind"] == "go" and message["step"] == step:
            return None
        return str(message.get("text", f"rank 0 said {message}, expected its word on this step"))

    def close(self) -> None:
        self._connection.setblocking(False)  # not even rank 0 that hangs keeps it
        wire.send(self._connection, "close")
        self.abandon()

    def abandon(self) -> None:
        self._connection.close()
        os.close(self.fd)


def attach(handle: PoolHandle, timeout_s: float = 10.0) -> int:
    """Return a descriptor of a pool's memory, in a process that is none of its ranks.

    Parameters
    ----------
    handle
        ``Meeting.handle`` of any rank.
    timeout_s
        Seconds to wait for the pool, above 0 and at most 1e6.

    Returns
    -------
    int
        The caller closes it. It is good for reading, writing and mapping.

    Raises
    ------
    ShareError
        There is no such pool, it is of another size or user, or something else has its place.
    ValueError, TypeError
        An argument makes no sense.

    Examples
    --------
    >>> fd = attach(handle)  # doctest: +SKIP
    >>> memory = mmap.mmap(fd, handle.num_bytes)  # doctest: +SKIP
    """
    _check_type("attach: handle", handle, PoolHandle)
    _check_seconds("attach: timeout_s", timeout_s)
    prefix = f"attach: pool {handle.name!r}: "
    connection, fd = wire.fetch(prefix, handle.name, handle.num_bytes, timeout_s, "attach")
    connection.close()
    return fd


# -- forks -----------------------------------------------------------------------------------------

_open: weakref.WeakSet[Meeting] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child's copies would keep the name taken, and a rank that has ended alive for the others.
    for meeting in list(_open):
        meeting.close()


os.register_at_fork(after_in_child=_close_in_child)


# -- arguments -------------------------------------------------------------------------------------


def _check_type(argument: str, value: object, *expected: type) -> None:
    # Not isinstance: True is no rank.
    if type(value) not in expected:
        came = "None" if value is None else type(value).__name__
        raise TypeError(f"{argument}: {came}, expected {expected[0].__name__}")


def _check_name(argument: str, value: str) -> None:
    _check_type(argument, value, str)
    if not _NAME.fullmatch(value):
        expected = "1 to 64 letters, digits, '.', '_' and '-'"
        raise ValueError(f"{argument}: {value!r}, expected {expected}")


def _check_int(argument: str, value: int, least: int) -> None:
    _check_type(argument, value, int)
    if not least <= value <= _MAX_BYTES:
        bound = f"at least {least}" if value < least else f"at most {_MAX_BYTES}"
        raise ValueError(f"{argument}: {value}, expected {bound}")


def _check_seconds(argument: str, value: float) -> None:
    _check_type(argument, value, float, int)
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise ValueError(f"{argument}: {value}, expected above 0 and at most {_MAX_TIMEOUT_S:g} s")
