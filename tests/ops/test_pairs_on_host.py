"""h2d_gather of pairs on the CPU, whose destination is on a GPU: every way that rows can take.

On CPU tensors a way is checked and changes nothing. When rows are read and written on a GPU, and
what is refused there, is in test_pairs_on_host_cuda.py.
"""

from __future__ import annotations

import os
import re
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
