"""Makes processes that are ranks of a PeerMemory: it imports all once, and forks for each of them.

Its argument is the socket at which they are asked for. A connection is a process, which runs the
Python that comes by it, a line of JSON each, and answers what it gives:

["peers.rank"]   ->   {"value": 1, "seconds": 0.001}   or   {"error": "ValueError: ..."}
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from jitkern.comm import PeerMemory, descriptors, peer_memory
from jitkern.comm.rendezvous import Rendezvous
from jitkern.host import module as host

IS_FAKE = "FAKE_GPUS" in os.environ
seen_devices: list[str] = []
kept: list[BaseException] = []
peers: PeerMemory


def make(rank: int, size: int, num_bytes: int = 4096, **how: Any) -> None:
    """Be a rank, by the store of this test."""
    global peers
    folder = Path(os.environ["TEST_FOLDER"])
    stores = sorted(folder.glob("store-*"))  # one for each time that the test has them meet
    how.setdefault("timeout_s", 30)
    how.setdefault("device", torch.device("cuda", rank) if IS_FAKE else torch.device("cpu"))
    store = FileStore(str(stores[-1]), -1)
    peers = PeerMemory(num_bytes, store, rank=rank, size=size, **how)


def read(rank: int, at: int, count: int = 1) -> list[int]:
    return peers.remote(rank, count, torch.uint8, at).tolist()


def write(rank: int, at: int, *values: int) -> None:
    peers.remote(rank, len(values), torch.uint8, at)[:] = torch.tensor(values, dtype=torch.uint8)


def left() -> dict[str, int]:
    """What this process holds: descriptors, mappings and, of the fake driver, all that it has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    found = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": maps.count("memfd:jitkern-peers") + maps.count("memfd:fake-gpu"),
    }
    if IS_FAKE:
        counts = (ctypes.c_int * 4)()
        ctypes.CDLL("libcuda.so.1").fake_vmm_counts(counts)
        found |= dict(zip(("handles", "mapped", "reserved", "mistakes"), counts, strict=True))
    return found


def at_step(step: str, then: Any) -> None:
    """Do something when this rank comes to tell the others of a step."""
    real = Rendezvous.exchange

    def instead(self: Rendezvous, key: str, *args: Any, **how: Any) -> Any:
        if key == step:
            then()
        return real(self, key, *args, **how)

    Rendezvous.exchange = instead  # type: ignore[method-assign]


def end(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def fork(code: str) -> str:
    """What a forked child says to this, or the signal that ends it."""
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(run(code))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(say, text.encode())
        os._exit(0)
    os.close(say)
    with open(said) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return signal.Signals(status).name if os.WIFSIGNALED(status) else text


def run(code: str) -> Any:
    try:
        compiled = compile(code, "test", "eval")
    except SyntaxError:
        return exec(code, globals())
    return eval(compiled, globals())


def plain(value: Any) -> Any:
    """What can be sent of a value."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def as_cpu(view: Any) -> torch.Tensor:
    """The bytes of a view on a fake GPU, which PyTorch may not touch under that name."""
    on_gpu = as_torch(view)
    seen_devices.append(str(on_gpu.device))
    if on_gpu.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_ubyte * on_gpu.numel()).from_address(on_gpu.data_ptr())
    memory.owner = on_gpu  # as long as a tensor of it lives
    return torch.frombuffer(memory, dtype=torch.uint8)


as_torch = peer_memory._as_torch


def serve(end: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with end.makefile("rw") as lines:
        for line in lines:
            started = time.monotonic()
            answer: dict[str, Any] = {}
            try:
                answer["value"] = plain(run(json.loads(line)))
            except BaseException as error:
                kept[:] = [error]  # with its frames: they are not to keep any memory
                answer["error"] = f"{type(error).__name__}: {error}"
                answer["missing"] = getattr(error, "missing", None)
            answer["seconds"] = time.monotonic() - started
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def main() -> None:
    host.module()
    if IS_FAKE:
        torch.cuda._lazy_init = lambda: None
        peer_memory._as_torch = as_cpu
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        while True:
            end, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(end)
                os._exit(0)
            end.close()


USED = (descriptors,)  # by what tests send

if __name__ == "__main__":
    main()
