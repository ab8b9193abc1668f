"""What moves rows of host memory in its order: the same result as they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from buffers import make_buffer
from ref import ref_h2d_gather
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jitkern import d2h_scatter, h2d_gather

HOST_ROWS = 3000
DEVICE_ROWS = 2500


def pairs_of(count: int, sources: int, targets: int, dtype: torch.dtype) -> Tensor:
    """Random pairs of distinct rows on both sides, every seventh of them padding."""
    generator = torch.Generator().manual_seed(count)
    columns = [torch.randperm(n, generator=generator)[:count] for n in (sources, targets)]
    pairs = torch.stack(columns, dim=1).to(dtype)
    pairs[::7, count % 2] = -3
    return pairs


@pytest.mark.cuda
@pytest.mark.parametrize("row_bytes", [8, 656])
def test_many_pairs_of_every_region(row_bytes: int) -> None:
    """300,000 of 600,000 rows that are 2 KiB apart, in regions of 512 KiB."""
    count, num_src, device = 300_000, 600_000, torch.device("cuda")
    memory = torch.empty(num_src * 2048, dtype=torch.uint8, pin_memory=True)
    src = memory.view(num_src, 2048)[:, 64 : 64 + row_bytes]
    src.random_()
    dst = make_buffer((count, row_bytes), device=device, seed=1)
    twin = dst.twin()
    pairs = pairs_of(count, num_src, count, torch.int32).to(device)
    h2d_gather(src, dst.view, pairs)
    ref_h2d_gather(src, twin.view, pairs)
    assert dst.same(twin)
    src.zero_()
    back = pairs.flip(1).contiguous()
    d2h_scatter(dst.view, src, back)
    wanted = torch.zeros_like(src)
    ref_h2d_gather(dst.view, wanted, back)
    torch.cuda.synchronize()
    assert torch.equal(src, wanted)


def kernels_of(call: Any) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.key for event in seen.key_averages() if event.key.startswith("jitkern")]


@pytest.mark.cuda
@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_auto_sorts_large_calls_on_large_pools(op: Any) -> None:
    """1.5 GiB, of which the calls touch little."""
    rows, few = 3 << 19, 3 << 18
    pool = torch.empty(rows, 1024, dtype=torch.uint8, pin_memory=True)
    cache = torch.zeros(7000, 1024, dtype=torch.uint8, device="cuda")
    pairs = pairs_of(6000, pool.shape[0], 7000, torch.int64)
    pairs, ends = (pairs, (pool, cache)) if op is h2d_gather else (pairs.flip(1), (cache, pool))
    pairs = pairs.contiguous().cuda()

    def ordered(pairs: Tensor, rows: int, **how: Any) -> bool:
        large = ends[0][:rows] if op is h2d_gather else ends[0]
        to = ends[1] if op is h2d_gather else ends[1][:rows]
        found = kernels_of(lambda: op(large, to, pairs, **how))
        assert len(found) in (1, 4), found
        return "jitkern_scan_regions" in found

    assert ordered(pairs, rows)
    assert not ordered(pairs, rows, order="given")
    assert not ordered(pairs[:4095], rows)
    assert ordered(pairs[:64], rows, order="host")
    inside = pairs.clone()
    inside[:, 0 if op is h2d_gather else 1] %= few
    assert not ordered(inside, few)
    assert ordered(inside, few, order="host")
