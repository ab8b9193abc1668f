"""The process that forks.py forks children from.

An order is JSON with descriptors: where the life of the child is told, which is its number and then
its exit status, and those that it gets.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import select
import signal
import socket
import sys
import types
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.distributed

# Not tvm-ffi: its import asks whether there is a GPU, behind which no child could use one.

_MOST_BYTES, _MOST_FDS = 1 << 17, 64
unused: list[mmap.mmap] = []
# Where a new interpreter looks that is given no PYTHONPATH.
_PATHS = [
    path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
]


def main(fd: int) -> None:
    orders = socket.socket(fileno=fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the children's, and the tests'
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    gc.collect()
    gc.freeze()  # a child that ends walks over its own objects: 0.2 s in the place of 0.5
    lives: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 12)
            tell_of_ends(lives)
        if orders not in ready:
            continue
        text, fds, _, _ = socket.recv_fds(orders, _MOST_BYTES, _MOST_FDS)
        if not text:
            os._exit(0)
        life = socket.socket(fileno=fds[0])
        pid = fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, on_interrupt)
            for other in (orders, life, *lives.values()):
                other.detach()  # closed below: their numbers become those of others
            be(json.loads(text), fds[1:])
            return
        for one in fds[1:]:
            os.close(one)
        with suppress(OSError):  # who asked for it may be gone
            life.send(b"%d" % pid)
        if pid > 0:
            lives[pid] = life
        else:
            life.close()


def fork() -> int:
    """Return what os.fork does, or -1 where there is no process to be had."""
    try:
        return os.fork()
    except OSError:
        return -1


def tell_of_ends(lives: dict[int, socket.socket]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        life = lives.pop(pid)
        with suppress(OSError):  # nobody may wait for it any more
            life.send(b"%d" % os.waitstatus_to_exitcode(status))
        life.close()


def be(order: dict[str, Any], fds: list[int]) -> None:
    """Become the interpreter of a script."""
    numbers = order["numbers"]
    high = 1 + max(numbers)
    fds = [os.dup2(fd, high + 100 + at, inheritable=False) for at, fd in enumerate(fds)]
    for fd, number in zip(fds, numbers, strict=True):
        os.dup2(fd, number)
    begin = 3
    for number in sorted({*numbers} - {0, 1, 2}):
        os.closerange(begin, number)
        begin = number + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    # Not all children alike: a rank's address is to mean nothing to another, nor its numbers.
    torch.seed()
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
