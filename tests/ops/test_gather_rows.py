"""gather_rows against the formats' descriptions in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, out_of_range, random_bytes, strided_buffer
from format_reference import hard_values, quantised, ref_store_row, values_of
from mistakes import Mistake, zeros
from rows_mistakes import NAMES, ROWS_APART, rows_mistakes
from stems import OpCheck, Rows
from test_store_rows import FLOATS, HEADS, IN_CACHE, heads_cache
from torch import Tensor

from jitkern import gather_rows, store_rows

ROWS, BLOCKS, PAGE = 19, 5, 8
SLOTS = BLOCKS * PAGE


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Tell whether bits are the same, but those of NaN."""
    a, b = a.cpu(), b.cpu()
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    alike = a.contiguous().view(kind) == b.contiguous().view(kind)
    return bool((alike | (a.isnan() & b.isnan())).all())


def indices(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    made = torch.randint(0, SLOTS, (ROWS,), generator=torch.Generator().manual_seed(7))
    made[4], made[11], made[12] = -1, -(2**31), made[0]
    return made.to(dtype).to(device)


def zeros_where_negative(rows: Tensor, where: Tensor) -> Tensor:
    rows[where.cpu() < 0] = 0
    return rows


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize(("name", "rule", "dim", "rest_bytes", "row_bytes"), IN_CACHE)
def test_scales_in_the_cache(
    device: torch.device, name: str, rule: str | None, dim: int, rest_bytes: int, row_bytes: int,
    index_dtype: torch.dtype, dtype: torch.dtype, on_host: bool,
) -> None:  # fmt: skip
    if row_bytes % 4:
        row_bytes, rest_bytes = row_bytes + 2, rest_bytes + 2
    values = hard_values(SLOTS, dim, dtype)
    rest = random_bytes(SLOTS * rest_bytes).view(SLOTS, rest_bytes)
    shape, strides = (BLOCKS, PAGE, row_bytes), (PAGE * row_bytes + 4 * row_bytes, row_bytes, 1)
    pinned = on_host and device.type == "cuda"
    where_cache = "cpu" if on_host else device
    cpu = strided_buffer(shape, strides, torch.uint8, "cpu")
    payload, scales = quantised(values, name, rule)
    for slot in range(SLOTS):
        row = rest[slot] if rest_bytes else None
        ref_store_row(cpu.view, slot, payload[slot], scales[slot], row, name)
    cache = strided_buffer(shape, strides, torch.uint8, where_cache, pinned=pinned)
    cache.whole.copy_(cpu.whole)
    where = indices(device, index_dtype)
    # Values and the rest side by side, as in vLLM's workspace.
    output = torch.full((ROWS, dim * dtype.itemsize + rest_bytes + 6), 7, dtype=torch.uint8)
    output = output.to(device)
    ends = (dim * dtype.itemsize, dim * dtype.itemsize + rest_bytes)
    if output.shape[1] % dtype.itemsize:
        output = output[:, : -(output.shape[1] % dtype.itemsize)].contiguous()
    outputs = [output[:, : ends[0]].view(dtype)] + [output[:, ends[0] : ends[1]]] * (rest_bytes > 0)
    gather_rows(cache.view, where, outputs, format=name)
    at = where.cpu().long().clamp(min=0)
    numbers = values_of(payload, scales, dtype).flatten(-2)[at]
    assert same_numbers(outputs[0], zeros_where_negative(numbers, where))
    if rest_bytes:
        assert torch.equal(outputs[1].cpu(), zeros_where_negative(rest[at], where))
    assert bool((output[:, ends[1] :] == 7).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize(("heads", "dim", "heads_first"), HEADS)
def test_scales_apart(
    device: torch.device, heads: int, dim: int, heads_first: bool, name: str, dtype: torch.dtype
) -> None:
    caches = [heads_cache(heads, dim, heads_first, device, seed) for seed in (3, 4)]
    shape = (heads,) if name == "fp8" else (BLOCKS, PAGE, heads)
    scales = [torch.rand(shape) * 2 for _ in caches]
    where = indices(device)
    outputs = [torch.empty(ROWS, heads, dim, dtype=dtype, device=device) for _ in caches]
    gather_rows(
        [cache.view for cache in caches],
        where,
        outputs,
        format=name,
        scales=[scale.to(device) for scale in scales],
    )
    at = where.cpu().clamp(min=0)
    for cache, scale, output in zip(caches, scales, outputs, strict=True):
        payload = cache.view.cpu()[at // PAGE, at % PAGE].contiguous()
        factors = scale if name == "fp8" else scale[at // PAGE, at % PAGE]
        numbers = values_of(payload, factors, dtype, name.startswith("int8"))
        assert same_numbers(output, zeros_where_negative(numbers, where))


@pytest.mark.parametrize("count", [-3, 0, 1, 7, ROWS, 100])
@pytest.mark.parametrize("count_dtype", INT_DTYPES, ids=str)
def test_count(device: torch.device, count: int, count_dtype: torch.dtype) -> None:
    cache = torch.zeros(SLOTS, 528, dtype=torch.uint8, device=device)
    where = torch.arange(ROWS, device=device)
    store_rows(cache, where, torch.ones(ROWS, 512, device=device), format="fp8_ds_v41")
    output = torch.full((ROWS, 512), 5.0, device=device)
    used = torch.tensor([count], dtype=count_dtype, device=device)
    gather_rows(cache, where, output, format="fp8_ds_v41", count=used)
    assert bool((output[: max(count, 0)] == 1).all())
    assert bool((output[max(count, 0) :] == 5).all())


def test_indices_past_the_count_are_not_read(device: torch.device) -> None:
    cache = torch.zeros(4, 16, dtype=torch.uint8, device=device)
    where, one = torch.tensor([0, 999], device=device), torch.tensor([1], device=device)
    output = torch.ones(2, 16, device=device)
    gather_rows(cache, where, output, format="fp8", scales=one.float(), count=one)
    assert bool((output[0] == 0).all()) and bool((output[1] == 1).all())


def test_an_index_past_the_end(device: torch.device) -> None:
    cache = torch.zeros(9, 132, dtype=torch.uint8, device=device).view(1, 9, 132)
    output = torch.full((3, 128), 5.0, device=device)
    where = torch.tensor([3, 2**31, 8], device=device)
    text = "gather_rows: indices: index 2147483648 at position 1, expected below 9"
    with out_of_range(device, text):
        gather_rows(cache, where, output, format="fp8_index_k")
    if device.type == "cuda":
        assert output.count_nonzero() == 0


def test_every_e4m3_number(device: torch.device) -> None:
    cache = torch.arange(256).to(torch.uint8).view(2, 1, 128).to(device)
    for scale in (1.0, 0.3, 2.0**-120, 3e38):
        factor = torch.tensor(scale)
        for dtype in FLOATS:
            output = torch.empty(2, 1, 128, dtype=dtype, device=device)
            where = torch.arange(2, device=device)
            gather_rows(cache, where, output, format="fp8", scales=factor.to(device))
            assert same_numbers(output, values_of(cache.cpu(), factor.view(1), dtype))


# -- wrong arguments -------------------------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    return {
        "cache": zeros(5, 10, 2, 4, dtype=torch.uint8), "indices": torch.arange(3),
        "outputs": zeros(3, 2, 4), "format": "fp8_per_token_head", "scales": zeros(50, 2),
        "count": torch.tensor([2]),
    }  # fmt: skip


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = rows_mistakes(good, "outputs")
    memory = torch.zeros(100, dtype=torch.int64)
    # In one memory: rows of outputs, and what may not lie in them.
    values = memory.view(torch.float32)
    cache, rows = memory.view(torch.uint8)[:400].view(50, 8), values[50:74].view(3, 2, 4)
    slots, wide = zeros(50, 8, dtype=torch.uint8), zeros(3, 576)
    two = {"cache": [slots, slots], "outputs": [good["outputs"], rows],
           "scales": [zeros(50, 2), zeros(50, 2)]}  # fmt: skip
    mla = {"cache": zeros(50, 656, dtype=torch.uint8), "format": "fp8_ds_mla", "scales": None}
    table += [
        *common.not_words("format", NAMES, "mxfp4", "FP8", optional=True, a_list="list"),
        ({"format": "fp8_dsmla"}, ValueError,
         f"format: 'fp8_dsmla', expected {NAMES}; did you mean 'fp8_ds_mla'?"),
        ({"format": None}, TypeError,
         f"format: None, expected {NAMES}; without a format: indexing"),
        ({**mla, "outputs": wide}, ValueError,
         "outputs: shape [3, 576], expected rows of a multiple of 128 values; give two, such as "
         "outputs.split([512, 64], dim=1)"),
        *common.not_tensors(good, "count", optional="count"),
        *common.read_only(good, "count"),
        *(({"count": good["count"].to(dtype)}, TypeError,
           f"count: dtype {str(dtype).removeprefix('torch.')}, expected int32 or int64")
          for dtype in (torch.float32, torch.int16)),
        *(({"count": torch.arange(n)}, ValueError, f"count: shape [{n}], expected 1 element")
          for n in (0, 2)),
        # expanded
        ({"outputs": zeros(1, 2, 4).expand(3, 2, 4)}, ValueError,
         f"outputs: rows of 16 bytes that overlap (shape [3, 2, 4]), {ROWS_APART}"),
        ({**mla, "outputs": [wide[:, :512], wide[:1, 512:544].expand(3, 32)]}, ValueError,
         common.apart_text("outputs[1]", 0, [3, 32]).replace("32 ", "128 ", 1)
         .replace("expected 32", "expected 128")),
        # overlap
        ({"cache": cache, "outputs": rows}, ValueError, common.overlap_text("cache", "outputs")),
        ({"scales": values[:100].view(50, 2), "outputs": rows}, ValueError,
         common.overlap_text("scales", "outputs")),
        ({"indices": memory[30:33], "outputs": rows}, ValueError,
         common.overlap_text("indices", "outputs")),
        ({"count": memory[30], "outputs": rows}, ValueError,
         common.overlap_text("count", "outputs")),
        ({"format": "fp8", "scales": values[60:62], "outputs": rows}, ValueError,
         common.overlap_text("scales", "outputs")),
        ({**two, "outputs": [rows, rows]}, ValueError,
         common.overlap_text("outputs[1]", "outputs[0]")),
        ({**two, "cache": [cache, slots]}, ValueError,
         common.overlap_text("cache[0]", "outputs[1]")),
        ({**mla, "outputs": [wide[:, :512], wide[:, 511:543]]}, ValueError,
         common.overlap_text("outputs[1]", "outputs[0]")),
    ]  # fmt: skip
    return table


def test_versions_of_outputs_are_bumped() -> None:
    outputs = [zeros(3, 512), zeros(3, 64).half()]
    cache = zeros(50, 656, dtype=torch.uint8)
    gather_rows(cache, torch.arange(3), outputs, format="fp8_ds_mla")
    assert [output._version for output in outputs] == [1, 1]
    assert cache._version == 0


MIXED_DEVICES = [(name, "cuda:0 as in cache") for name in ("outputs", "scales")]
MIXED_DEVICES += [("count", "cuda:0 as in indices")]


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    new = rows(len(where))
    dim = int(new.shape[1:].numel())
    cache = torch.zeros(slots, 1, dim, dtype=torch.uint8, device=new.device)
    scales = torch.zeros(slots, 1, device=new.device)
    values = new.reshape(len(where), 1, dim)
    how = {"format": "fp8_per_token_head", "scales": [scales]}
    yield "default", ([cache], where, values, None), how
