"""Pairs on the CPU in calls of several threads at once, beside a fork, and in a process's first."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
import torch

Fresh = Callable[..., subprocess.CompletedProcess[str]]

# Calls of every way, each thread's on buffers and a stream of its own. A process that hangs ends by
# itself and says where.
CALLS = """
import contextlib, faulthandler, os, sys, threading, torch
from jitkern import d2h_scatter, h2d_gather
faulthandler.dump_traceback_later(240, exit=True)
device = torch.device(sys.argv[1])
on_gpu = device.type == "cuda"
NUM_ROWS = 30_000 if on_gpu else 2_000
failed = []

def calls(seed, rounds):
    generator = torch.Generator().manual_seed(seed)
    host = torch.randint(0, 256, (NUM_ROWS, 656), dtype=torch.uint8, generator=generator)
    pinned = host.pin_memory() if on_gpu else host.clone()
    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with stream:
        rows = torch.zeros(NUM_ROWS, 656, dtype=torch.uint8, device=device)
        back = torch.zeros(NUM_ROWS, 656, dtype=torch.uint8)
        back = back.pin_memory() if on_gpu else back
        for i in range(rounds):
            method = ("sm", "cpu", "both")[(i + seed) % 3]
            count = (NUM_ROWS, 1, 300, 5000)[(i + seed) % 4]
            where = torch.stack(
                [torch.randperm(NUM_ROWS, generator=generator)[:count] for _ in range(2)], dim=1
            )
            source = host if method == "cpu" else pinned
            h2d_gather(source, rows, where, method=method, num_threads=1 + i % 2)
            where_back = where.flip(1).contiguous()
            d2h_scatter(rows, back, where_back, method="cpu" if i % 2 else "sm", num_threads=2)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            if not torch.equal(back[where[:, 0]], host[where[:, 0]]):
                failed.append((seed, i))
            if not torch.equal(rows[where[:, 1].to(device)].cpu(), host[where[:, 0]]):
                failed.append((seed, i, "rows"))

def run(seed, rounds):
    try:
        calls(seed, rounds)
    except BaseException as error:
        failed.append(error)

def start(count, rounds):
    threads = [threading.Thread(target=run, args=(seed, rounds)) for seed in range(count)]
    for thread in threads:
        thread.start()
    return threads
"""

TOGETHER = """
for thread in start(4, 40):
    thread.join()
assert not failed, failed
"""


several_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two threads of the CPU in a call"
)


@several_cores
def test_threads_of_every_way(device: torch.device, fresh_python: Fresh) -> None:
    """None waits for another that waits for it, and each finds its own rows."""
    fresh_python(CALLS + TOGETHER, device.type)


FIRST_CALL = """
import torch
from jitkern import h2d_gather
src = torch.randint(0, 256, (5000, 656), dtype=torch.uint8)
dst = torch.zeros(5000, 656, dtype=torch.uint8, device="cuda")
pairs = torch.stack([torch.randperm(5000), torch.randperm(5000)], dim=1)
h2d_gather(src.pin_memory(), dst, pairs[:9], method="sm")  # the kernel that puts rows into place
wanted = torch.zeros_like(src)
wanted[pairs[:, 1]] = src[pairs[:, 0]]
torch.cuda.synchronize()
used = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
torch.cuda._sleep(2_000_000_000)
used.fill_(7)  # a second later, in memory that the allocator may hand out at once
del used
h2d_gather(src, dst, pairs, method="cpu")
assert torch.equal(dst.cpu(), wanted)
"""


@pytest.mark.cuda
def test_staging_memory_that_something_still_writes(fresh_python: Fresh) -> None:
    """The first call takes it from PyTorch, whose allocator goes by the current stream."""
    fresh_python(FIRST_CALL)
