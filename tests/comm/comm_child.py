"""One rank of the tests of communicators: does what its standard input says, a line of JSON each.

{"do": "evaluate", "code": "comm.rank"}   ->   {"value": 1}   or   {"error": "ValueError: ..."}
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import threading  # noqa: F401
import time
import traceback
import weakref  # noqa: F401
from datetime import timedelta
from pathlib import Path
from typing import Any

import bodies
import shared_gpu
import torch
import torch.distributed as dist

from jitkern.comm import (
    Communicator,  # noqa: F401
    PeerCommunicator,
    PeerMemory,
    TorchCommunicator,
    peer_gather,
    peer_scatter,
    rendezvous,
)
from jitkern.errors import CommTimeoutError
from jitkern.offload import PinnedPool, Share

torch.set_num_threads(1)  # ranks share the cores of a small machine

comm: Any = None
device = torch.device("cpu")
group: Any = None  # what ranks meet over, where it is not the default group


class Place:
    """How far this rank is."""

    def get(self) -> tuple[int, str]:
        return 0, ""


place = Place()


def do_join(path: str, rank: int, size: int, timeout_s: float = 60.0) -> None:
    """Make the default group."""
    globals().update(path=path)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout
    )


def do_regroup(**config: Any) -> None:
    """Leave the group, some ranks of which have ended, for another one."""
    dist.destroy_process_group()
    do_join(**config)


def do_make(**config: Any) -> None:
    global comm
    comm = TorchCommunicator(**config)


def do_make_nccl(**config: Any) -> None:
    """As an engine of mini-sglang does, over the gloo group, on the GPU of its number."""
    global comm, device
    from jitkern.comm import init_pynccl

    rank = dist.get_rank()
    device = shared_gpu.take(rank)
    size = dist.get_world_size()
    comm = init_pynccl(tp_rank=rank, tp_size=size, tp_cpu_group=dist.group.WORLD, **config)


def do_make_peer(on_gpus: bool = False, **config: Any) -> None:
    global comm
    if on_gpus:
        do_make_nccl()
    inner = comm if on_gpus else TorchCommunicator(timeout_s=30)
    comm = PeerCommunicator(inner, None, device=device, timeout_s=60, **config)


def do_prefixes() -> list[str]:
    """What the first 10 of a tensor come to, alone and in larger ones."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(3 << 20, generator=generator).to(dtype)
        for count in (10, 1000, 100_000, 3 << 20):
            part = x[:count].clone().to(device)
            comm.all_reduce(part)
            found.append([dtype, part[:10].tolist()])
    halves = found[:4], found[4:]
    return [repr(half[0]) if all(one == half[0] for one in half) else "" for half in halves]


def do_sum_late() -> None:
    """Make a sum, and another that says what became of it: on GPUs the first one cannot."""
    for _ in range(2):
        comm.all_reduce(ones(5))
        do_synchronize()


def do_many_sums(count: int) -> int:
    """Sum numbers that are known, late now and then, on the host or on the GPU; return the wrong.

    Of any size, so that epochs of blocks differ, and both algorithms take turns.
    """
    common, own = random.Random(0), random.Random(comm.rank + 1)
    numbers = torch.arange(1 << 16, device=device) % 61
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(count):
        dtype = common.choice([torch.float32, torch.float16, torch.bfloat16])
        size = common.choice([1, 7, 2048, 4096, common.randrange(1, 1 << 16)])
        begin = common.randrange((1 << 16) - size + 1)
        of_rank_0 = numbers[begin : begin + size] - call % 31
        x = (of_rank_0 + comm.rank).to(dtype)
        if own.randrange(50) == 0:
            time.sleep(own.random() / 5000)
        if device.type == "cuda" and own.randrange(50) == 0:
            torch.cuda._sleep(own.randrange(400_000))
        comm.reducer.all_reduce(x, algorithm=common.choice(["one_shot", "two_shot", "auto"]))
        # Whole numbers below 256, which all three dtypes hold: of up to 4 ranks no sum is rounded.
        expected = of_rank_0 * comm.size + sum(range(comm.size))
        wrong += (x != expected.to(dtype)).sum()
    return int(wrong)


def do_rows(name: str, count: int = 500) -> bool:
    """Bring rows out of a pool that all ranks share to all of them, and write them back."""
    pool, caches, pairs = _rows(name, count)
    own = caches[comm.rank]
    peer_gather(pool, caches, pairs, comm)
    sources, rows = pairs.cpu().unbind(-1)
    do_synchronize()
    is_right = torch.equal(own.cpu()[rows], pool[sources])
    own += 1
    peer_scatter(own, pool, pairs.flip(-1).contiguous(), comm)
    do_synchronize()
    return is_right and torch.equal(own.cpu()[rows], pool[sources])


def do_rows_late(name: str) -> None:
    """Bring them when a rank does not come: on GPUs the next call says so."""
    pool, caches, pairs = _rows(name, 10)
    do_leave()
    for _ in range(2):
        peer_gather(pool, caches, pairs, comm)
        do_synchronize()


def do_leave() -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _rows(name: str, count: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    share = Share(name, comm.rank, comm.size)
    pool = PinnedPool([2 * count, 656], torch.uint8, share=share).tensor()
    peers = PeerMemory(count * 656, None, device=device)
    generator = torch.Generator().manual_seed(count)
    if comm.rank == 0:
        pool.random_(generator=torch.Generator().manual_seed(1))
    chosen = torch.randperm(2 * count, generator=generator)[:count]
    rows = torch.randperm(count, generator=generator)
    pairs = torch.stack([chosen, rows], 1).to(device)
    peers.barrier()
    caches = [peers.remote(rank, (count, 656), torch.uint8) for rank in range(comm.size)]
    return pool, caches, pairs


def ones(
    *shape: int, dtype: torch.dtype = torch.float32, on: Any = None, turned: bool = False
) -> Any:
    """Return what a communicator of GPUs takes; tests of fake ones have their own."""
    made = torch.ones(shape, dtype=dtype, device=device if on is None else on)
    return made.t()[1:] if turned else made


def do_synchronize() -> float:
    """Wait for the GPU; return seconds."""
    start = time.monotonic()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - start


def do_live() -> bool:
    """Tell whether the CUDA context is not lost."""
    return float(torch.ones(100, device=device).sum()) == 100


def do_calls(count: int) -> None:
    """Reduce ones in place, without a look at the result."""
    x = ones(4096)
    for _ in range(count):
        comm.all_reduce(x)


def do_replay(count: int) -> list[float]:
    """Capture three reductions of ones, replay them; return what a value is each time."""
    x = torch.ones(1000, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            comm.all_reduce(x)
    values = []
    for _ in range(count):
        x.fill_(1)
        graph.replay()
        comm.watch()
        comm.barrier()
        values.append(float(x[0]))
    return values


def do_two_streams() -> list[float]:
    """The second call comes behind the first, whose stream is slow in one rank."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.ones(1 << 20, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(100_000_000 if comm.rank else 1000)
        comm.all_reduce(x)
    with torch.cuda.stream(streams[1]):
        comm.all_reduce(x)
    torch.cuda.synchronize()
    return x.unique().tolist()


def do_buffer() -> list[float]:
    """Tensors in registered memory, as many as it holds, twice."""
    values = []
    for _ in range(2):
        tensors = [comm.empty((1024,), torch.bfloat16) for _ in range(4)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + 1)
            comm.all_reduce(tensor)
            values.append(float(tensor[-1]))
        del tensor, tensors
    return values


def do_use_store(path: str = "", port: int = 0, is_master: bool = False) -> None:
    global group
    group = (
        dist.FileStore(path)
        if path
        else dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)
    )


def do_meet(rank: int, size: int, **config: Any) -> None:
    """A rendezvous by itself, over the store."""
    global comm
    comm = rendezvous.Rendezvous(
        "init", group, rank, size, **{"timeout_s": 2.0, "position": place.get, **config}
    )


def do_fail_and_end() -> None:
    """Fail in a step, tell so as users of a rendezvous do, and end."""

    def step() -> None:
        raise MemoryError("no more of this")

    try:
        comm.all_or_none("step", step)
    except MemoryError as error:
        comm.fail(error)
    os._exit(1)


def do_listening() -> list[str]:
    """Sockets of this process that others can connect to."""
    inodes = set()
    for table, state, at in (("tcp", "0A", 9), ("tcp6", "0A", 9), ("unix", "00010000", 6)):
        words = [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()]
        inodes |= {f"socket:[{line[at]}]" for line in words if state in line}
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(inodes & {os.readlink(path) for path in paths if os.path.lexists(path)})


def do_evaluate(code: str) -> Any:
    value = eval(code, globals())
    return value if isinstance(value, int | float | str | list | dict | None) else repr(value)


def do_body(name: str, repeat_s: float = 0.0) -> None:
    until = time.monotonic() + repeat_s
    bodies.BODIES[name](comm, device)
    while time.monotonic() < until:
        bodies.BODIES[name](comm, device)


def do_reset() -> None:
    """As after the imports, for the next test."""
    global comm, device, group
    comm = group = None
    device = torch.device("cpu")
    if dist.is_initialized():
        dist.destroy_process_group()


def do_fork() -> str:
    """What a forked child hears of the communicator."""
    said, say = os.pipe()
    if os.fork() == 0:
        try:
            comm.barrier()
        except BaseException as error:
            os.write(say, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(say)
    os.wait()
    with open(said) as file:
        return file.read()


def do_exit(destroy: bool) -> None:
    if destroy:
        dist.destroy_process_group()
    raise SystemExit


def main() -> None:
    for line in sys.stdin:
        config = json.loads(line)
        start = time.monotonic()
        answer: dict[str, Any] = {}
        try:
            answer["value"] = globals()[f"do_{config.pop('do')}"](**config)
        except SystemExit:
            return
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            if isinstance(error, CommTimeoutError):
                assert str(pickle.loads(pickle.dumps(error))) == str(error)
                answer.update(missing=error.missing, op=error.op, number=error.number)
            if isinstance(error, AssertionError):
                traceback.print_exc()
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer, default=repr), flush=True)


if __name__ == "__main__":
    main()
