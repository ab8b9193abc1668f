"""h2d_gather of pairs on the CPU, whose destination is on a GPU: every way that rows can take.

On CPU tensors a way is checked and changes nothing. When rows are read and written on a GPU, and
what is refused there, is in test_pairs_on_host_cuda.py.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from buffers import INT_DTYPES, make_buffer
from ref import ref_h2d_gather
from torch import Tensor

from jitkern import d2h_scatter, h2d_gather

NUM_CORES = len(os.sched_getaffinity(0))
GATHERS = ["auto", "sm", "cpu", "both"]


def pairs_of(
    count: int, sources: int, targets: int, dtype: torch.dtype = torch.int64, *, seed: int = 0
) -> Tensor:
    """Random pairs of distinct destinations, some sources repeated, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.empty(count, 2, dtype=dtype)
    pairs[:, 0] = torch.randint(0, sources, (count,), generator=generator)
    pairs[:, 1] = torch.randperm(targets, generator=generator)[:count]
    pairs[3::7, 0] = -1
    pairs[5::11, 1] = -(2**31)
    pairs[9::13] = torch.tensor([sources + 5, -1])  # padding counts before the bound
    return pairs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- several chunks of rows, several blocks of pairs -----------------------------------------------


CHUNK_BYTES = 4 << 20  # of which six are on their way
BLOCK_PAIRS = 512 << 10  # that are copied at a time


def test_many_chunks(device: torch.device) -> None:
    """60 MB through six chunks of 4, whatever the way and the number of threads."""
    count = 92_000
    src = make_buffer((count + 11, 656), gap=16, pinned=device.type == "cuda")
    dst = make_buffer((count + 11, 656), device=device, seed=1, gap=16)
    assert count * 656 > 2 * 6 * CHUNK_BYTES
    pairs = pairs_of(count, count + 11, count + 11)
    expected, old = dst.twin(), dst.whole.clone()
    ref_h2d_gather(src.view, expected.view, pairs)
    for method in GATHERS:
        for num_threads in (None, 1, min(2, NUM_CORES), NUM_CORES):
            dst.whole.copy_(old)
            h2d_gather(src.view, dst.view, pairs, method=method, num_threads=num_threads)
            synchronize(device)
            assert dst.same(expected), (method, num_threads)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_many_blocks_of_pairs(device: torch.device, op: Any, index_dtype: torch.dtype) -> None:
    """Three blocks of short rows, the last one small; a fault in it is found in front of them."""
    count = 2 * BLOCK_PAIRS + 5000
    host = make_buffer((count, 8), pinned=device.type == "cuda")
    gpu = make_buffer((count, 8), device=device, seed=1)
    pairs = pairs_of(count, count, count, index_dtype)
    src, dst = (host, gpu) if op is h2d_gather else (gpu, host)
    expected, old = dst.twin(), dst.twin()
    ref_h2d_gather(src.view, expected.view, pairs)
    bad = pairs.clone()
    bad[count - 2] = torch.tensor([0, count])
    text = f"{op.__name__}: pairs[..., 1]: index {count} at position {count - 2}, expected below "
    for method in GATHERS if op is h2d_gather else ["auto"]:
        dst.whole.copy_(old.whole)
        with pytest.raises(IndexError, match=re.escape(text)):
            op(src.view, dst.view, bad, method=method)
        synchronize(device)
        assert dst.same(old), method
        op(src.view, dst.view, pairs, method=method)
        synchronize(device)
        assert dst.same(expected), method


@pytest.mark.parametrize("method", ["auto", "cpu"])
def test_more_rows_than_int32_can_count(device: torch.device, method: str) -> None:
    """Their numbers travel as int64."""
    num_rows = 2**31 + 9
    host = torch.empty(num_rows, 1, dtype=torch.uint8)  # touched at both ends, of 2 GiB
    for row in (0, 1, 2, 9, 2**31 - 1, 2**31, num_rows - 1):
        host[row] = row % 97 + 1
    gpu = make_buffer((50, 1), device=device)
    twin = gpu.twin()
    pairs = torch.tensor([[2**31, 3], [9, 7], [num_rows - 1, 49], [-1, 5], [2**31 - 1, 0]])
    h2d_gather(host, gpu.view, pairs, method=method)
    for row, slot in ((2**31, 3), (9, 7), (num_rows - 1, 49), (2**31 - 1, 0)):
        twin.view[slot] = row % 97 + 1
    assert gpu.same(twin)


# -- several threads -------------------------------------------------------------------------------


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
            d2h_scatter(rows, back, where_back, method="auto" if i % 2 else "sm")
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


several_cores = pytest.mark.skipif(NUM_CORES < 2, reason="two threads of the CPU in a call")


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
