"""Large tables on the CPU: rows that are streamed past the caches, by several threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from buffers import make_buffer
from contract import Case
from test_h2d_gather import Gather
from test_index import Index
from test_store import Store

from jitkern import store_cache

# From this size on it is streamed: kStreamThreadBytes of cpu_copy.h.
STREAM_BYTES_PER_THREAD = 4 << 20

# Around one line, so that rows hold no whole line, one or several, and end anywhere in a line.
ROW_BYTES = [63, 64, 65, 128, 129, 656, 4095]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("case", [Store(), Index(), Gather()], ids=lambda case: case.argument)
def test_every_byte_is_streamed_and_no_other(case: Case, row_bytes: int, threads: int) -> None:
    """Neighbours share lines, and rows begin at every address within one."""
    count = -(-threads * STREAM_BYTES_PER_THREAD // row_bytes)
    sizes = [count + 11 for _ in case.rows]
    cpu, offsets = torch.device("cpu"), [3 * i + row_bytes % 64 for i in range(len(case.tables))]
    indices = case.indices(cpu, rows=sizes, count=count)
    how = {"rows": sizes, "count": count, "gaps": (row_bytes % 5, row_bytes % 3)}
    case.run_and_compare(case.buffers(cpu, (row_bytes,), offsets=offsets, **how), indices)


def test_nothing_is_written_where_the_last_index_is_out_of_range(threads: int) -> None:
    caches = [make_buffer((4096, 2048), seed=s) for s in (1, 2)]
    twins = [cache.twin() for cache in caches]
    k = torch.zeros(4096, 2048, dtype=torch.uint8)
    indices = torch.randperm(4096)
    indices[-1] = 4096
    with pytest.raises(IndexError, match="nothing was written"):
        store_cache(caches[0].view, caches[1].view, indices, k, k)
    assert all(cache.same(twin) for cache, twin in zip(caches, twins, strict=True))


FORKED = """
import os, sys, torch
torch.set_num_threads(3)
rows = torch.zeros(4096, 4096, dtype=torch.uint8)
threes = rows + 3  # starts a team of OpenMP, with which GNU's runtime would hang in the child
slots = torch.randperm(4096)
if sys.argv[1] == "True":  # loads first
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
    command = [sys.executable, "-c", FORKED, str(load_first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


SHARED_THREADS = """
import os, sys, threading, torch
from jitkern import store_cache
torch.set_num_threads(3)
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
if sys.argv[1] == "True":  # in the main thread
    run()
else:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in /proc")
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_threads_are_those_of_torch(in_main_thread: bool) -> None:
    """Their number is torch.get_num_threads() at the call, and torch uses the same threads."""
    command = [sys.executable, "-c", SHARED_THREADS, str(in_main_thread)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0"]
