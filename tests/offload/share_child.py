"""One process of test_share.py: does what its standard input says, a line of JSON each.

{"do": "open", "rank": 1, ...}   ->   {"value": null}   or   {"error": "ShareError: ..."}
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import signal
import sys
import time
from typing import Any

from jitkern.offload import share, wire
from jitkern.offload.share import Meeting, Share, attach

meeting: Meeting | None = None
memory: mmap.mmap | None = None


def do_open(num_bytes: int, **config: Any) -> None:
    global meeting, memory
    meeting = Meeting(Share(**config), num_bytes)
    memory = mmap.mmap(meeting.fd, num_bytes)


def do_step(name: str, failure: str | None = None, interrupt_s: float = 0) -> None:
    if interrupt_s:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, interrupt_s)
    meeting.step(name, failure)


def do_write(at: int, byte: int) -> None:
    memory[at] = byte


def do_read(start: int, stop: int) -> list[int]:
    return list(memory[start:stop])


def do_truncate(num_bytes: int) -> None:
    os.ftruncate(meeting.fd, num_bytes)


def do_inheritable() -> list[str]:
    """Descriptors that a program started from here would get, but for the standard ones."""
    return [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and is_inheritable(int(fd))]


def is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False  # that of the listing itself


def do_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def do_close() -> None:
    meeting.close()
    meeting.close()
    memory.close()


def do_handle() -> str:
    return pickle.dumps(meeting.handle).hex()


def do_attach(handle: str, timeout_s: float = 10.0) -> None:
    global memory
    known = pickle.loads(bytes.fromhex(handle))
    fd = attach(known, timeout_s)
    memory = mmap.mmap(fd, known.num_bytes)
    os.close(fd)


def do_fork_and_close() -> str:
    """A child that closes its copy and tries a step; what it says of both."""
    said, say = os.pipe()
    if os.fork() == 0:
        try:
            before = meeting.fd
            meeting.close()
            meeting.step("touched")
        except BaseException as error:
            os.write(say, f"{before} {type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(say)
    with open(said) as file:
        text = file.read()
    os.wait()
    return text


def do_fork() -> int:
    """A child that lives on when this process is gone."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"!")
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(30)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return pid


def do_pretend_uid(uid: int) -> None:
    wire.peer = lambda connection: (4711, uid)


def do_lose_patience() -> None:
    share._GRACE_S = 0.1


def do_forget_memfd_create() -> None:
    del os.memfd_create


def main() -> None:
    for line in sys.stdin:
        config = json.loads(line)
        start = time.monotonic()
        answer: dict[str, Any] = {}
        try:
            answer["value"] = globals()[f"do_{config.pop('do')}"](**config)
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
