"""The memory of indices: their own, or refused; and rewritten during a call it harms nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from buffers import INT_DTYPES

from jitkern import store_cache
from jitkern.host import module as host

Call = Callable[[], object]


def test_what_is_refused_to_the_byte(device: torch.device) -> None:
    """Also between rows that lie apart: only where a row would be written over an index."""
    memory = torch.full((400,), -1, dtype=torch.int8, device=device)
    first, stride_bytes, row_bytes, slots = 64, 40, 24, 5
    cache = memory.as_strided((slots, row_bytes), (stride_bytes, 1), first)
    other = torch.zeros(slots, row_bytes, dtype=torch.int8, device=device)
    row = other[:1].clone()
    starts = [first + slot * stride_bytes for slot in range(slots)]
    for count in (0, 1, 3, 8):
        rows = row.expand(count, row_bytes)
        for begin in range(0, len(memory) - 4 * count, 4):
            end = begin + 4 * count
            indices = memory[begin:end].view(torch.int32)  # -1: nothing is written
            if any(count and begin < start + row_bytes and start < end for start in starts):
                with pytest.raises(ValueError, match="indices: overlaps v_cache"):
                    store_cache(other, cache, indices, rows, rows)
            else:
                store_cache(other, cache, indices, rows, rows)


# A process that rewrites indices as fast as it can, and calls on them: good ones, ones just behind
# the end, where a page that may not be touched begins, and ones far out.
ATTACK = """
import ctypes, mmap, os, signal, struct, sys, time

kind, seconds = sys.argv[1], float(sys.argv[2])
ROWS, ROW_BYTES = 64, 4096
FAR = {"i": 2**31 - 1, "q": 2**40}[kind]
ITEM_BYTES = struct.calcsize(kind)
index_memory, map_memory = (mmap.mmap(-1, 2 * ROWS * ITEM_BYTES) for _ in range(2))

def rewrite(parent):
    def items(*pattern):
        return struct.pack(f"{2 * ROWS}{kind}", *(pattern * (2 * ROWS))[: 2 * ROWS])
    good = struct.pack(f"{2 * ROWS}{kind}", *(i // 2 for i in range(2 * ROWS)))
    bad = [items(ROWS), items(FAR), items(0, FAR), items(FAR, 0), items(0, ROWS), items(0, 0, FAR)]
    rounds = [now for each in bad for now in (good, each)]
    slots = [now for each in bad for now in (items(-1), items(-1, 5), items(7), each)]
    while os.getppid() == parent:
        for number in range(1000):
            index_memory[:] = rounds[number % len(rounds)]
            map_memory[:] = slots[number % len(slots)]

parent = os.getpid()
writer = os.fork()
if writer == 0:
    os.closerange(0, 3)  # nobody waits for what is written there
    try:
        rewrite(parent)
    finally:
        os._exit(0)

import torch
import jitkern

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def table():
    bytes_ = ROWS * ROW_BYTES
    memory = mmap.mmap(-1, bytes_ + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(address + bytes_, mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(memory, dtype=torch.uint8, count=bytes_).view(ROWS, ROW_BYTES)

dtype = {"i": torch.int32, "q": torch.int64}[kind]
items = torch.frombuffer(index_memory, dtype=dtype)
slot_map = torch.frombuffer(map_memory, dtype=dtype)[:ROWS]
indices, pairs = items[:ROWS], items.view(ROWS, 2)
a, b, c, d = (table() for _ in range(4))

def on_two_threads():
    torch.set_num_threads(2)
    try:
        jitkern.store_cache(a, b, indices, c, d)
    finally:
        torch.set_num_threads(1)

torch.set_num_threads(1)
jitkern.store_cache(a, b, indices[:0], c[:0], d[:0])  # loads the host module
calls = {
    "store": lambda: jitkern.store_cache(a, b, indices, c, d),
    "store_on_two_threads": on_two_threads,
    "index": lambda: jitkern.indexing(a, indices, output=b),
    "index_of_a_part": lambda: jitkern.indexing(a, indices, output=b, vocab_range=(3, ROWS)),
    "gather": lambda: jitkern.h2d_gather(a, b, pairs),
    "gather_with_map": lambda: jitkern.h2d_gather(a, b, pairs, slot_map=slot_map),
    "gather_resident": lambda: jitkern.h2d_gather(
        a, b, pairs, slot_map=slot_map, reuse_resident=True
    ),
    "scatter": lambda: jitkern.d2h_scatter(a, b, pairs),
}
try:
    for name, call in calls.items():
        print(name, end=" ", flush=True)
        passed = refused = 0
        end = time.monotonic() + seconds
        # Longer on a busy machine, where each call may be interrupted by some that are written.
        is_refused = name != "index_of_a_part"  # there they are padding
        while time.monotonic() < (end if passed and (refused or not is_refused) else end + 30):
            try:
                call()
                passed += 1
            except IndexError:
                refused += 1
        print(passed, refused)
finally:
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and guards pages")
@pytest.mark.parametrize("dtype", INT_DTYPES, ids=str)
def test_indices_that_are_rewritten_during_the_call(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]], dtype: torch.dtype
) -> None:
    host.module()  # built here if it has to be, and not beside the attack
    done = fresh_python(ATTACK, {torch.int32: "i", torch.int64: "q"}[dtype], "0.3", check=False)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    for line in done.stdout.splitlines():
        name, passed, refused = line.split()
        assert int(passed) > 0, line
        assert int(refused) > 0 or name == "index_of_a_part", line
