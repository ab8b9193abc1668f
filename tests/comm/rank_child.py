"""Processes that are ranks of tests, forked from one that has imported all.

A rank runs the Python that comes by its standard input, a socket, a line of JSON each, and answers:

"comm.rank"   ->   {"value": 1, "seconds": 0.001}   or   {"error": "ValueError: ...", ...}

With FAKE_GPUS its GPUs are those of ../fake_vmm.c; nccl_child.py gives it those of fake_nccl.cc.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import random
import signal
import socket
import threading  # noqa: F401
import time
import traceback
import warnings
import weakref  # noqa: F401
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import bodies
import forks
import shared_gpu
import torch
import torch.distributed as dist

from jitkern.comm import (
    Communicator,  # noqa: F401
    PeerCommunicator,
    PeerMemory,
    TorchCommunicator,
    descriptors,  # noqa: F401
    nccl,
    peer_gather,
    peer_memory,
    peer_scatter,
    rendezvous,
)
from jitkern.errors import CommTimeoutError
from jitkern.host import library as host
from jitkern.offload import PinnedPool, PoolShare
from jitkern.offload.memory import PinnedMemory

torch.set_num_threads(1)  # ranks share the cores of a small machine

IS_FAKE, IS_FAKE_NCCL = "FAKE_GPUS" in os.environ, "FAKE_NCCL" in os.environ
if IS_FAKE:
    torch.cuda.device_count = lambda: int(os.environ["FAKE_GPUS"])
comm: Any = None
peers: Any = None
device = torch.device("cpu")
group: Any = None  # what ranks meet over, where it is not the default group
seen_devices: list[str] = []

# -- for any test ----------------------------------------------------------------------------------


def end(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def join(path: str, rank: int, size: int, timeout_s: float = 60.0) -> None:
    """Make the default group, in the place of one some ranks of which may have ended."""
    if dist.is_initialized():
        dist.destroy_process_group()
    globals().update(path=path)
    options: Any = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout_s)}
    dist.init_process_group("gloo", init_method=f"file://{path}", **options)


def body(name: str, repeat_s: float = 0.0) -> None:
    until = time.monotonic() + repeat_s
    bodies.BODIES[name](comm, device)
    while time.monotonic() < until:
        bodies.BODIES[name](comm, device)


def fork(code: str) -> str:
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


def leave(destroy: bool) -> None:
    if destroy:
        dist.destroy_process_group()
    raise SystemExit


# -- a rendezvous ----------------------------------------------------------------------------------


def use_store(path: str = "", port: int = 0, is_master: bool = False) -> None:
    global group
    options: Any = {"is_master": is_master, "wait_for_workers": False}
    group = dist.FileStore(path) if path else dist.TCPStore("127.0.0.1", port, **options)


def meet(rank: int, size: int, **config: Any) -> None:
    global comm
    comm = rendezvous.Rendezvous("init", group, rank, size, **{"timeout_s": 30, **config})


def diagnosed(**options: Any) -> list[Any]:
    error = comm.diagnose("all_reduce", 7, **options)
    return [str(error), error.missing]


def fail() -> None:
    raise RuntimeError("no more of this")


def at_step(step: str, then: Callable[[], object]) -> None:
    """Call `then` when this rank is about to exchange the outcome of a step."""
    real = rendezvous.Rendezvous.exchange

    def instead(self: Any, key: str, *args: Any, **options: Any) -> Any:
        if key == step:
            then()
        return real(self, key, *args, **options)

    rendezvous.Rendezvous.exchange = instead  # type: ignore[method-assign]


# -- communicators ---------------------------------------------------------------------------------


def make(**config: Any) -> None:
    global comm
    comm = TorchCommunicator(**{"timeout_s": 30, **config})


def make_nccl(**config: Any) -> None:
    """As an engine of mini-sglang does, over the gloo group, on the GPU of its number."""
    global comm, device
    rank, size = dist.get_rank(), dist.get_world_size()
    device = shared_gpu.take(rank)
    options = {"timeout_s": 60, **config}
    comm = nccl.init_pynccl(tp_rank=rank, tp_size=size, tp_cpu_group=dist.group.WORLD, **options)


def make_peer(on_gpus: bool = False, **config: Any) -> None:
    global comm
    if on_gpus:
        make_nccl()
    inner = comm if on_gpus else TorchCommunicator(timeout_s=30)
    comm = PeerCommunicator(inner, None, device=device, timeout_s=60, **config)


def set_group_timeout(timeout_s: float) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def ones(*shape: int, dtype: torch.dtype = torch.float32, on: Any = None) -> Any:
    return torch.ones(shape, dtype=dtype, device=device if on is None else on)


def wait_for_gpu() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def synchronize() -> float:
    """Wait for the GPU; return seconds."""
    start = time.monotonic()
    wait_for_gpu()
    return time.monotonic() - start


def lives() -> bool:
    """Tell whether the CUDA context is not lost."""
    return float(torch.ones(100, device=device).sum()) == 100


def calls(count: int) -> None:
    x = ones(4096)
    for _ in range(count):
        comm.all_reduce(x)


def call(code: str = "all_reduce(ones(4))") -> None:
    """Make a call, wait for the GPU, and raise its error."""
    run(f"comm.{code}")
    synchronize()
    if hasattr(comm, "check"):
        comm.check()


def taken(tensor: torch.Tensor) -> Any:
    """Return a tensor as communicators of GPUs take it; tests of fake ones have their own."""
    return tensor.to(device)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def replay(count: int) -> list[float]:
    """Capture three sums of ones; return an item after each replay."""
    x = torch.ones(1000, device=None if IS_FAKE_NCCL else device)
    on_gpu = taken(x)

    def reduce() -> None:
        for _ in range(3):
            comm.all_reduce(on_gpu)

    again, values = captured(reduce), []
    for _ in range(count):
        x.fill_(1)
        again()
        comm.watch()
        comm.barrier()
        values.append(float(x[0]))
    return values


def two_streams() -> list[float]:
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


def buffer() -> list[float]:
    """Tensors in registered memory, as many as it holds."""
    values = []
    for number in range(4):
        tensor = comm.buffer[2048 * number : 2048 * (number + 1)].view(torch.float32)
        tensor.fill_(number + 1)
        comm.all_reduce(taken(tensor))
        synchronize()
        values.append(float(tensor[-1]))
    return values


# -- sums and rows over peer memory ----------------------------------------------------------------


def sum_late() -> None:
    """Make a sum, and another one, which raises the error of the first on GPUs."""
    for _ in range(2):
        comm.all_reduce(ones(5))
        synchronize()


def many_sums(count: int) -> int:
    """Sum numbers that are known, late now and then, on the host or on the GPU; return the wrong.

    Of any size, so that epochs of blocks differ, and both algorithms take turns.
    """
    common, own = random.Random(0), random.Random(comm.rank + 1)
    numbers = torch.arange(1 << 16, device=device) % 61
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(count):
        dtype = common.choice([torch.float32, torch.float16, torch.bfloat16])
        size = common.choice([1, 7, 2048, 4096, common.randrange(1, 1 << 16)])
        begin = common.randrange((1 << 16) - size + 1)
        of_rank_0 = numbers[begin : begin + size] - number % 31
        x = (of_rank_0 + comm.rank).to(dtype)
        if own.randrange(50) == 0:
            time.sleep(own.random() / 5000)
        if device.type == "cuda" and own.randrange(50) == 0:
            torch.cuda._sleep(own.randrange(400_000))
        comm.reducer.all_reduce(x, algorithm=common.choice(["one_shot", "two_shot", "auto"]))
        # Whole numbers below 256, which all three dtypes hold: of up to 4 ranks no sum is rounded.
        expected = of_rank_0 * comm.world_size + sum(range(comm.world_size))
        wrong += (x != expected.to(dtype)).sum()
    return int(wrong)


def rows(name: str, count: int = 500) -> bool:
    """Bring rows out of a pool that all ranks share to all of them, and write them back."""
    pool, caches, pairs = _rows(name, count)
    own = caches[comm.rank]
    peer_gather(pool, caches, pairs, comm)
    sources, targets = pairs.cpu().unbind(-1)
    synchronize()
    is_right = torch.equal(own.cpu()[targets], pool[sources])
    own += 1
    peer_scatter(own, pool, pairs.flip(-1).contiguous(), comm)
    synchronize()
    return is_right and torch.equal(own.cpu()[targets], pool[sources])


def _rows(name: str, count: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    share = PoolShare(name)
    pool = PinnedPool(2 * count * 656, share=share).tensor([2 * count, 656], torch.uint8)
    memory = PeerMemory(count * 656, None, device=device)
    generator = torch.Generator().manual_seed(count)
    if comm.rank == 0:
        pool.random_(generator=torch.Generator().manual_seed(1))
    chosen = torch.randperm(2 * count, generator=generator)[:count]
    targets = torch.randperm(count, generator=generator)
    pairs = torch.stack([chosen, targets], 1).to(device)
    memory.barrier()
    caches = [memory.remote(rank, (count, 656), torch.uint8) for rank in range(comm.world_size)]
    return pool, caches, pairs


# -- peer memory -----------------------------------------------------------------------------------


def share(rank: int, size: int, path: str, num_bytes: int = 4096, **options: Any) -> None:
    global peers
    peers = None
    options.setdefault("timeout_s", 30)
    options.setdefault("device", torch.device("cuda", rank) if IS_FAKE else torch.device("cpu"))
    peers = PeerMemory(num_bytes, dist.FileStore(path, -1), rank=rank, world_size=size, **options)


def read(rank: int, at: int, count: int = 1) -> list[int]:
    return peers.remote(rank, count, torch.uint8, at).tolist()


def write(rank: int, at: int, *values: int) -> None:
    peers.remote(rank, len(values), torch.uint8, at)[:] = torch.tensor(values, dtype=torch.uint8)


def left() -> dict[str, int]:
    """Return the numbers of descriptors, mappings, and objects of the fake driver."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    counts = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": maps.count("memfd:jitkern-peers") + maps.count("memfd:fake-gpu"),
    }
    if IS_FAKE:
        fake_counts = (ctypes.c_int * 4)()
        ctypes.CDLL("libcuda.so.1").fake_vmm_counts(fake_counts)
        counts |= dict(zip(("handles", "mapped", "reserved", "mistakes"), fake_counts, strict=True))
    return counts


def as_cpu(view: Any, real: Any = peer_memory.as_torch) -> torch.Tensor:
    """Return the bytes of a view on a fake GPU as a CPU tensor."""
    on_gpu = real(view)
    seen_devices.append(str(on_gpu.device))
    if on_gpu.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_ubyte * on_gpu.numel()).from_address(on_gpu.data_ptr())
    memory.owner = on_gpu  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)


# -- pools that ranks share ------------------------------------------------------------------------


def words(pool: PinnedPool) -> torch.Tensor:
    return pool.tensor([pool.stats().num_bytes // 8], torch.int64)


def instead_of(step: str, then: Callable[[], object]) -> None:
    setattr(PinnedMemory, step, lambda *_, **__: then())


# -- one line after the other ----------------------------------------------------------------------


def run(code: str) -> Any:
    with suppress(SyntaxError):
        return eval(compile(code, "test", "eval"), globals())
    return exec(compile(code, "test", "exec"), globals())


def answer(line: str) -> str:
    start = time.monotonic()
    told: dict[str, Any] = {}
    try:
        told["value"] = run(json.loads(line))
    except Exception as error:
        told.update(error=f"{type(error).__name__}: {error}", missing=[])
        if isinstance(error, CommTimeoutError):
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
            told.update(missing=error.missing, op=error.op, number=error.number)
        if isinstance(error, AssertionError):
            traceback.print_exc()
    except KeyboardInterrupt as error:
        told["error"] = type(error).__name__
    told["seconds"] = time.monotonic() - start
    return json.dumps(told, default=repr)


def be_a_rank() -> None:
    warnings.simplefilter("error", FutureWarning)  # functions that torch will remove
    with socket.socket(fileno=0).makefile("rw") as lines:
        for line in lines:
            print(answer(line), file=lines, flush=True)


def main() -> None:
    """Fork ranks as they are ordered."""
    if IS_FAKE:
        torch.cuda._lazy_init = lambda: None
        peer_memory.as_torch = as_cpu
    host.module()
    forks.serve(0)
