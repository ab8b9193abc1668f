"""Large tables on the CPU: rows that are streamed past the caches, by several threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from buffers import make_buffer
from ref import ref_h2d_gather, ref_indexing, ref_store

from jitkern import h2d_gather, indexing, store_cache

# A table of this size is streamed: kStreamRandomBytes, kStreamThreadBytes of cpu_copy.h.
STREAM_BYTES = 2 << 20
STREAM_BYTES_PER_THREAD = 4 << 20

# Around one line, so that rows hold no whole line, one or several, and end anywhere in a line.
ROW_BYTES = [15, 16, 63, 64, 65, 127, 128, 129, 191, 256, 656, 4095]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("offset", [0, 1, 16, 63])
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_store_streams_every_byte_and_no_other(row_bytes: int, offset: int, threads: int) -> None:
    slots = -(-STREAM_BYTES // row_bytes)
    rows = slots * 3 // 4
    gap = offset % 5  # neighbours that share lines, and rows at every address within a line
    caches = [make_buffer((slots, row_bytes), gap=gap, offset=offset, seed=s) for s in (1, 2)]
    k, v = (make_buffer((rows, row_bytes), offset=3, seed=s).view for s in (3, 4))
    indices = torch.randperm(slots)[:rows]
    indices[::7] = -1
    twins = [cache.twin() for cache in caches]
    store_cache(caches[0].view, caches[1].view, indices, k, v)
    ref_store(twins[0].view, twins[1].view, indices, k, v)
    assert all(cache.same(twin) for cache, twin in zip(caches, twins, strict=True))


@pytest.mark.parametrize("offset", [0, 1, 48])
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_indexing_streams_every_byte_and_no_other(
    row_bytes: int, offset: int, threads: int
) -> None:
    rows = -(-threads * STREAM_BYTES_PER_THREAD // row_bytes)
    weights = make_buffer((1000, row_bytes), offset=5, seed=1).view
    generator = torch.Generator().manual_seed(row_bytes)
    indices = torch.randint(-20, 1200, (rows,), dtype=torch.int32, generator=generator)
    output = make_buffer((rows, row_bytes), gap=offset % 7, offset=offset, seed=2)
    twin = output.twin()
    indexing(weights, indices, output=output.view, vocab_range=(100, 900))
    twin.view.copy_(ref_indexing(weights, indices, (100, 900)))
    assert output.same(twin)


@pytest.mark.parametrize("row_bytes", [65, 656, 4095])
def test_h2d_gather_streams_every_byte_and_no_other(row_bytes: int, threads: int) -> None:
    slots = -(-STREAM_BYTES // row_bytes)
    src = make_buffer((500, row_bytes), offset=1, seed=1).view
    dst = make_buffer((slots, row_bytes), gap=3, offset=7, seed=2)
    rows = slots * 2 // 3
    pairs = torch.stack([torch.randint(-30, 500, (rows,)), torch.randperm(slots)[:rows]], dim=1)
    pairs[::11, 1] = -1
    pairs[::11, 0] = 2**62  # the source of a skipped pair is not looked at
    twin = dst.twin()
    h2d_gather(src, dst.view, pairs)
    pairs[::11, 0] = 0
    ref_h2d_gather(src, twin.view, pairs)
    assert dst.same(twin)


def test_nothing_is_written_where_the_last_index_is_out_of_range(threads: int) -> None:
    caches = [make_buffer((4096, 2048), seed=s) for s in (1, 2)]
    twins = [cache.twin() for cache in caches]
    k = torch.zeros(4096, 2048, dtype=torch.uint8)
    indices = torch.randperm(4096)
    indices[-1] = 4096
    with pytest.raises(IndexError, match="nothing was written"):
        store_cache(caches[0].view, caches[1].view, indices, k, k)
    assert all(cache.same(twin) for cache, twin in zip(caches, twins, strict=True))


LITTLE_ADDRESS_SPACE = """
import os, resource, torch
from jitkern import store_cache
cache, k = torch.zeros(8192, 16384, dtype=torch.uint8), torch.ones(8192, 16384, dtype=torch.uint8)
slots = torch.randperm(8192)
store_cache(cache[:1], None, slots[:1] * 0, k[:1] * 2)
child = os.fork() if FORK else 0
if child != 0:
    raise SystemExit(os.waitpid(child, 0)[1] != 0)
torch.set_num_threads(64)  # more than there are by now
with open("/proc/self/statm") as statm:
    used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM, hard))
store_cache(cache, None, slots, k)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
torch.set_num_threads(1)  # torch itself would hang in the child
os._exit(not bool((cache == 1).all()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits its own address space")
@pytest.mark.parametrize(("room_bytes", "fork"), [(1 << 20, False), (40 << 20, True)])
def test_no_more_threads_to_be_had(room_bytes: int, fork: bool) -> None:
    """GNU's runtime would end the process; a forked child does not ask it at all."""
    code = LITTLE_ADDRESS_SPACE.replace("ROOM", str(room_bytes)).replace("FORK", str(fork))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


FORKED = """
import os, torch
torch.set_num_threads(3)
rows = torch.zeros(4096, 4096, dtype=torch.uint8)
threes = rows + 3  # by a team of OpenMP, with which GNU's runtime would hang in the child
slots = torch.randperm(4096)
if LOAD_FIRST:
    from jitkern import store_cache
    store_cache(rows, None, slots, rows.clone())
child = os.fork()
if child != 0:
    raise SystemExit(os.waitpid(child, 0)[1] != 0)
from jitkern import store_cache
store_cache(rows, None, slots, threes)
torch.set_num_threads(1)  # torch itself would hang in the child
os._exit(not bool((rows == 3).all()))
"""


@pytest.mark.parametrize("load_first", [True, False])
def test_threads_after_fork(load_first: bool) -> None:
    """Also where the host module is loaded in the child and has seen no fork."""
    code = FORKED.replace("LOAD_FIRST", str(load_first))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


SHARED_THREADS = """
import os, threading, torch
from jitkern import store_cache
torch.set_num_threads(THREADS)
def count():
    return len(os.listdir("/proc/self/task"))
def run():
    rows, more = torch.empty(2, 4096, 4096, dtype=torch.uint8)
    store_cache(rows[:1], None, torch.arange(1), more[:1])
    before = count()
    store_cache(rows, None, torch.arange(4096), more)
    ours = count()
    rows.fill_(1)
    print(ours - before, count() - ours)
if IN_MAIN_THREAD:
    run()
else:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in /proc")
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_threads_are_those_of_torch(in_main_thread: bool) -> None:
    """As many as torch.get_num_threads() says at the time of the call, and torch uses the same."""
    code = SHARED_THREADS.replace("THREADS", "3")
    code = code.replace("IN_MAIN_THREAD", str(in_main_thread))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0"]
