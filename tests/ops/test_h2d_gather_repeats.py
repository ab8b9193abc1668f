"""h2d_gather of rows that are asked for several times, or resident already."""

from __future__ import annotations

import pytest
import torch
from buffers import INT_DTYPES, Buffer, host_buffer, make_buffer, out_of_range
from ref import ref_h2d_gather
from torch import Tensor

from jitkern import h2d_gather


def gather_with_map(
    src: Buffer, dst: Buffer, pairs: Tensor, slot_map: Tensor, **how: bool
) -> tuple[Tensor, Tensor]:
    """Gather, and return where the map says each source row is, and the rows there."""
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map, **how)
    resident = (slot_map >= 0).nonzero().flatten()
    return resident, dst.view[slot_map[resident].long()]


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("row_bytes", [5, 656, 1024])
@pytest.mark.parametrize("distinct_rows", [1, 7, 20_000])
def test_large_calls_with_repeated_sources(
    device: torch.device, distinct_rows: int, row_bytes: int, dedup: bool, index_dtype: torch.dtype
) -> None:
    """40,000 pairs: on CUDA each source row is fetched once and copied on the GPU."""
    count = 40_000
    generator = torch.Generator().manual_seed(distinct_rows)
    src = host_buffer((20_000, row_bytes), torch.uint8, device)
    dst = make_buffer((count + 9, row_bytes), device=device, seed=1)
    sources = torch.randint(0, distinct_rows, (count,), generator=generator)
    sources[::97] = -1
    pairs = torch.stack([sources, torch.randperm(count + 9, generator=generator)[:count]], dim=1)
    pairs = pairs.to(index_dtype).to(device)
    twin = dst.twin()
    slot_map = torch.full((20_000,), -1, dtype=torch.int32, device=device)
    resident, rows = gather_with_map(src, dst, pairs, slot_map, dedup=dedup)
    ref_h2d_gather(src.view, twin.view, pairs)
    assert dst.same(twin)
    assert torch.equal(resident.cpu(), sources[sources >= 0].unique())
    assert torch.equal(rows.cpu(), src.view[resident.cpu()])


@pytest.mark.parametrize("map_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 50, 40_000])
@pytest.mark.parametrize("row_bytes", [5, 656])
def test_resident_rows_come_from_the_destination(
    device: torch.device, row_bytes: int, count: int, map_dtype: torch.dtype
) -> None:
    """Their copies in `src` are overwritten, so that a fetch of one would show."""
    num_src, generator = 2 * count + 3, torch.Generator().manual_seed(count)
    src = host_buffer((num_src, row_bytes), torch.uint8, device)
    dst = make_buffer((2 * num_src + count, row_bytes), device=device, seed=1)
    original = src.view.clone()
    resident = torch.randperm(num_src, generator=generator)[: num_src // 2]
    slot_map = torch.full((num_src,), -1, dtype=map_dtype)
    slot_map[resident] = torch.arange(len(resident), dtype=map_dtype)
    dst.view[: len(resident)] = original[resident].to(device)
    src.view[resident] = 255 - original[resident]
    sources = torch.randint(0, num_src, (count,), generator=generator)
    targets = num_src + torch.randperm(num_src + count, generator=generator)[:count]
    pairs = torch.stack([sources, targets], dim=1).to(device)
    twin = dst.twin()
    slot_map = slot_map.to(device)
    before = slot_map.clone()
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map, reuse_resident=True)
    twin.view[targets.to(device)] = original[sources].to(device)
    assert dst.same(twin)
    asked = torch.zeros(num_src, dtype=torch.bool)
    asked[sources] = True
    assert torch.equal(slot_map[~asked.to(device)], before[~asked.to(device)])
    now = slot_map.cpu().long()[asked]
    assert torch.equal(dst.view.cpu()[now], original[asked])
    assert all(int(slot) >= num_src for slot in now)


def test_out_of_range_in_a_large_call(device: torch.device) -> None:
    src = host_buffer((1000, 40), torch.uint8, device)
    dst = make_buffer((40_000, 40), device=device, seed=1)
    twin = dst.twin()
    pairs = torch.stack([torch.arange(40_000) % 1000, torch.arange(40_000)], dim=1).to(device)
    pairs[33_333, 0] = 1000
    with out_of_range(device, "h2d_gather: pairs[..., 0]: index 1000 at position 33333, expected"):
        h2d_gather(src.view, dst.view, pairs)
    if device.type == "cuda":
        pairs[33_333, 0] = -1
        ref_h2d_gather(src.view, twin.view, pairs)
    assert dst.same(twin)


@pytest.mark.parametrize("slot_dtype", INT_DTYPES)
def test_resident_rows_past_int32_need_int64_pairs(slot_dtype: torch.dtype) -> None:
    src = torch.zeros(3, 1, dtype=torch.uint8)
    dst = torch.empty(2**31 + 1, 1, dtype=torch.uint8)  # never touched, so it takes no memory
    pairs = torch.tensor([[0, 1]], dtype=torch.int32)
    slot_map = torch.full((3,), -1, dtype=slot_dtype)
    arg = "slot_map" if slot_dtype == torch.int32 else "pairs"
    with pytest.raises(TypeError, match=f"^h2d_gather: {arg}: dtype int32, expected int64 for "):
        h2d_gather(src, dst, pairs, slot_map=slot_map, reuse_resident=True)
