"""Processes of tests that come from one which has imported torch: a fork, in the place of seconds.

A child is as a new interpreter that runs a script: its arguments, environment, directory, streams,
random numbers and exit status are its own, jitkern is not imported yet, and what is not given to it
is closed. But strings have the same hashes in all of them, what Python and PyTorch read of the
environment when they start is the first one's, and the host module never uses OpenMP's threads in a
forked process.
"""

from __future__ import annotations

import functools
import gc
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
_MOST_BYTES = 1 << 17  # of a request: an environment takes some thousand


class Child:
    """A process, with the part of subprocess.Popen that tests use."""

    def __init__(self, life: socket.socket) -> None:
        self._life = life
        self.returncode: int | None = None
        self.pid = self._said(None)

    def _said(self, timeout: float | None) -> int:
        self._life.settimeout(timeout)
        said = self._life.recv(_MOST_BYTES)
        if not said:
            raise ChildProcessError("the process that this one is forked from has ended")
        return int(said)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or minus the signal; TimeoutError if it has none in time."""
        if self.returncode is None:
            self.returncode = self._said(timeout)
            self._life.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return what `wait` does, or None if it lives."""
        with suppress(BlockingIOError):
            return self.wait(0)
        return None

    def end(self) -> int:
        """Kill it, if it lives; return its status."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return self.wait()


@functools.cache
def _parent_of(libraries: str) -> socket.socket:
    """Return where one is told to fork; its LD_LIBRARY_PATH is one that a child cannot set."""
    orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path[0] = {str(HERE)!r}; import forks; forks.serve({its.fileno()})"
    env = {**os.environ, "LD_LIBRARY_PATH": libraries}
    # It ends with the other end of its orders.
    subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=[its.fileno()])
    its.close()
    return orders


def start(
    script: Path | str,
    *args: str,
    env: Mapping[str, str] | None = None,
    streams: Sequence[IO[str] | socket.socket | int] = (0, 1, 2),
    parent: socket.socket | None = None,
) -> Child:
    """Start a script, or code, with these standard streams; it prints no warnings.

    `parent` is where a process that calls `serve` gets its orders.
    """
    given = dict(os.environ if env is None else env)
    order = {
        "script": str(script) if isinstance(script, Path) else None,
        "code": script if isinstance(script, str) else script.read_text(),
        "args": args,
        "env": given,
        "cwd": os.getcwd(),
        "keeps_files": parent is not None,  # what it has imported may have some open, as NVML has
    }
    life, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        fds = [one if isinstance(one, int) else one.fileno() for one in (its, *streams)]
        text = json.dumps(order).encode()
        assert len(text) < _MOST_BYTES, "too long an order"
        socket.send_fds(parent or _parent_of(given.get("LD_LIBRARY_PATH", "")), [text], fds)
    return Child(life)


def run(
    script: Path | str, *args: str, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Do what subprocess.run does, with nothing to read and the output captured."""
    new = tempfile.TemporaryFile
    with open(os.devnull) as nothing, new("w+") as out, new("w+") as err:
        child = start(script, *args, env=env, streams=(nothing, out, err))
        try:
            child.wait(timeout)
        finally:
            status = child.end()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess([str(script), *args], status, out.read(), err.read())


unused: list[mmap.mmap] = []
# Where a new interpreter looks that is given no PYTHONPATH.
_PATHS = [
    path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]


def serve(fd: int) -> None:
    """Fork children to order.

    An order is JSON with four descriptors: where the life of the child is told, which is its number
    and then its exit status, and its standard streams.
    """
    # Not tvm-ffi: its import asks whether there is a GPU, behind which no child could use one.
    import torch.distributed  # noqa: F401

    orders = socket.socket(fileno=fd)
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the children's, and the tests'
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch a child
    gc.collect()
    gc.freeze()  # a child that ends walks over its own objects: 0.2 s in the place of 0.5
    while True:
        text, fds, _, _ = socket.recv_fds(orders, _MOST_BYTES, 4)
        if not text:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            life = socket.socket(fileno=fds[0])
            if (pid := os.fork()) == 0:
                life.close()
                signal.signal(signal.SIGINT, on_interrupt)
                return be(json.loads(text), fds[1:])
            with suppress(OSError):  # who asked for it may be gone
                life.send(b"%d" % pid)
                life.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for one in fds:
            os.close(one)


def be(order: dict[str, Any], fds: list[int]) -> None:
    """Become the interpreter of a script."""
    for number, fd in enumerate(fds):  # which are above 2: the server has its own streams
        os.dup2(fd, number)
        os.close(fd)
    if not order["keeps_files"]:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    # Not all children alike: a rank's address is to mean nothing to another, nor its numbers.
    sys.modules["torch"].seed()
    unused.append(mmap.mmap(-1, (1 + random.randrange(1 << 14)) * mmap.PAGESIZE))
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    warnings.simplefilter("ignore")
    script = order["script"]
    sys.argv = [script or "-c", *order["args"]]
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [os.path.dirname(script) if script else "", *more, *_PATHS]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if script:
        main.__file__ = script
    exec(compile(order["code"], script or "<string>", "exec"), main.__dict__)
