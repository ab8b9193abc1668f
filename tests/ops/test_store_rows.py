"""store_rows against the formats' descriptions in plain PyTorch, every byte accounted for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from buffers import INT_DTYPES, Buffer, make_buffer, out_of_range, strided_buffer
from format_reference import E4M3, e4m3_bits, hard_values, quantised, ref_store_row
from mistakes import Mistake, zeros
from rows_mistakes import LIST, store_rows_mistakes
from stems import OpCheck, Rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern import gather_rows, store_rows

ROWS, BLOCKS, PAGE = 19, 5, 8
SLOTS = BLOCKS * PAGE
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def indices(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    made = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(7))[:ROWS]
    made[4], made[11] = -1, -(2**31)
    return made.to(dtype).to(device)


# -- formats with scales in the cache --------------------------------------------------------------

# name, rule, values of a row, bytes of the rest, bytes of a row
IN_CACHE = [
    ("fp8_ds_mla", None, 512, 128, 656),
    ("fp8_ds_mla", "pow2", 128, 6, 138),
    ("fp8_ds_mla", "fp32", 512, 128, 656),
    ("fp8_ds_mla", "fp32", 384, 0, 396),
    ("fp8_index_k", None, 128, 0, 132),
    ("fp8_index_k", "pow2", 128, 0, 132),
    ("fp8_ds_v41", None, 512, 0, 528),
    ("fp8_ds_v41_paged", None, 512, 0, 528),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize(("name", "rule", "dim", "rest_bytes", "row_bytes"), IN_CACHE)
def test_scales_in_the_cache(
    device: torch.device,
    name: str,
    rule: str | None,
    dim: int,
    rest_bytes: int,
    row_bytes: int,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    if row_bytes % 4:
        row_bytes += 2  # scales are aligned
        rest_bytes += 2
    values = hard_values(ROWS, dim, dtype)
    rest = make_buffer((ROWS, rest_bytes)).view if rest_bytes else None
    gap = 4 * row_bytes  # blocks lie apart
    shape, strides = (BLOCKS, PAGE, row_bytes), (PAGE * row_bytes + gap, row_bytes, 1)
    cache = strided_buffer(shape, strides, torch.uint8, device)
    twin, where = cache.twin(), indices(device, index_dtype)
    parts = [values.to(device)] + ([] if rest is None else [rest.to(device)])
    skip = int(where[0])
    store_rows(cache.view, where, parts, format=name, scale_rule=rule, skip=skip)
    payload, scales = quantised(values, name, rule)
    expected = Buffer(twin.whole.cpu(), twin.view)
    view = expected.whole.as_strided(shape, strides, cache.view.storage_offset())
    for i, slot in enumerate(where.tolist()):
        if slot >= 0 and slot != skip:
            row = None if rest is None else rest[i]
            ref_store_row(view, slot, payload[i], scales[i], row, name)
    assert torch.equal(cache.whole.cpu(), expected.whole)


def test_flat_rows_and_odd_strides(device: torch.device) -> None:
    """Vectors of one byte, from values and to rows at any distance."""
    values = hard_values(ROWS, 256, torch.bfloat16)
    wide = torch.zeros(ROWS, 259, dtype=torch.bfloat16)
    wide[:, 1:257] = values
    cache = make_buffer((SLOTS, 264 + 7), gap=1, device=device)
    rest = make_buffer((ROWS, 7)).view
    where = indices(device)
    store_rows(cache.view, where, (wide[:, 1:257].to(device), rest.to(device)), format="fp8_ds_mla")
    payload, scales = quantised(values, "fp8_ds_mla")
    for i, slot in enumerate(where.tolist()):
        if slot >= 0:
            row = torch.cat([payload[i].flatten(), scales[i].view(torch.uint8), rest[i]])
            assert torch.equal(cache.view[slot].cpu(), row)


# -- formats with scales in tensors of their own ---------------------------------------------------

# heads, dim, whether heads come before the page
HEADS = [
    (8, 128, False),
    (8, 128, True),
    (2, 64, True),
    (1, 96, False),
    (3, 5, True),
    (4, 512, False),
]


def heads_cache(heads: int, dim: int, heads_first: bool, device: torch.device, seed: int) -> Buffer:
    """K or V of [blocks, 2, page, heads, dim], or of [blocks, heads, page, 2 * dim]."""
    if heads_first:
        buffer = make_buffer((BLOCKS, heads, PAGE, 2 * dim), device=device, seed=seed)
        return buffer.part(buffer.view[..., :dim].transpose(1, 2))
    buffer = make_buffer((BLOCKS, 2, PAGE, heads, dim), device=device, seed=seed)
    return buffer.part(buffer.view[:, 0])


def stored(cache: Buffer, where: Tensor, payload: Tensor) -> Tensor:
    """Return the bytes of a cache after a store, on the CPU."""
    whole = cache.whole.cpu().clone()
    view = whole.as_strided(cache.view.shape, cache.view.stride(), cache.view.storage_offset())
    for i, slot in enumerate(where.tolist()):
        if slot >= 0:
            view[slot // PAGE, slot % PAGE] = payload[i]
    return whole


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("heads", "dim", "heads_first"), HEADS)
def test_given_scales(
    device: torch.device, heads: int, dim: int, heads_first: bool, per_head: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    k, v = (hard_values(ROWS, heads * dim, dtype, seed).view(ROWS, heads, dim) for seed in (1, 2))
    k_scale = torch.rand(heads if per_head else 1) * 3
    v_scale = torch.rand(heads if per_head else 1)
    caches = [heads_cache(heads, dim, heads_first, device, seed) for seed in (3, 4)]
    where = indices(device, torch.int32)
    expected = [
        stored(cache, where, e4m3_bits(rows.float() / scale.view(-1, 1)))
        for cache, rows, scale in zip(caches, (k, v), (k_scale, v_scale), strict=True)
    ]
    store_rows(
        [cache.view.view(torch.float8_e4m3fn) for cache in caches],
        where,
        [k.to(device), v.to(device)],
        format="fp8",
        scales=[k_scale.to(device), v_scale.to(device)],
    )
    for cache, whole in zip(caches, expected, strict=True):
        assert torch.equal(cache.whole.cpu(), whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize(("heads", "dim", "heads_first"), HEADS)
def test_scales_per_token_and_head(
    device: torch.device, heads: int, dim: int, heads_first: bool, name: str, dtype: torch.dtype
) -> None:
    rows = [hard_values(ROWS, heads * dim, dtype, seed).view(ROWS, heads, dim) for seed in (1, 2)]
    caches = [heads_cache(heads, dim, heads_first, device, seed) for seed in (3, 4)]
    shape = (BLOCKS, PAGE, heads) if heads_first else (SLOTS, heads)
    scales = [make_buffer(shape, torch.float32, device, seed=seed) for seed in (5, 6)]
    where = indices(device)
    expected, factors = [], []
    for cache, buffer, values in zip(caches, scales, rows, strict=True):
        payload, made = quantised(values, name)
        expected.append(stored(cache, where, payload))
        view = buffer.view.cpu().clone().view(SLOTS, heads)
        for i, slot in enumerate(where.tolist()):
            if slot >= 0:
                view[slot] = made[i]
        factors.append(view)
    store_rows(
        [cache.view for cache in caches],
        where,
        [values.to(device) for values in rows],
        format=name,
        scales=[buffer.view for buffer in scales],
    )
    for cache, whole, buffer, view in zip(caches, expected, scales, factors, strict=True):
        assert torch.equal(cache.whole.cpu(), whole)
        kept = buffer.view.cpu().view(SLOTS, heads).view(torch.int32)
        assert torch.equal(kept, view.view(torch.int32))


def test_k_and_v_of_different_shapes(device: torch.device) -> None:
    k, v = torch.randn(ROWS, 2, 192), torch.randn(ROWS, 4, 64)
    k_cache, v_cache = (
        torch.zeros(SLOTS, *rows.shape[1:], dtype=torch.uint8, device=device) for rows in (k, v)
    )
    one = torch.ones(1, device=device)
    where = torch.arange(ROWS, device=device)
    store_rows((k_cache, v_cache), where, (k.to(device), v.to(device)), format="fp8",
               scales=(one, one))  # fmt: skip
    assert torch.equal(k_cache[:ROWS].cpu(), e4m3_bits(k))
    assert torch.equal(v_cache[:ROWS].cpu(), e4m3_bits(v))


@pytest.mark.parametrize("scale", [1.0, 0.37, 3.0, 2.0**-9, 1e-6, 1e30])
def test_every_bf16_number(device: torch.device, scale: float) -> None:
    numbers = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    cache = torch.zeros(512, 1, 128, dtype=torch.uint8, device=device)
    where, factor = torch.arange(512, device=device), torch.tensor([scale])
    rows = numbers.view(512, 1, 128)
    store_rows(cache, where, rows.to(device), format="fp8", scales=factor.to(device))
    assert torch.equal(cache.cpu(), e4m3_bits(rows.float() / factor))


def test_ties_of_e4m3(device: torch.device) -> None:
    """Halfway between neighbours, and one ulp to either side."""
    middles = ((E4M3[1:] + E4M3[:-1]) / 2).float()
    around = [middles, *(torch.nextafter(middles, torch.tensor(to)) for to in (0.0, 1e9))]
    values = torch.cat([torch.cat(around), -torch.cat(around)])
    values = torch.cat([values, torch.zeros(-len(values) % 128)]).view(-1, 1, 128)
    cache = torch.zeros(values.shape, dtype=torch.uint8, device=device)
    where, one = torch.arange(len(values), device=device), torch.ones(1, device=device)
    store_rows(cache, where, values.to(device), format="fp8", scales=one)
    assert torch.equal(cache.cpu(), e4m3_bits(values))


# -- parts -----------------------------------------------------------------------------------------

PARTS = [(1024, 128), (512, 144), (128, 1024), (3, 5), (1, 8192), (656, 0)]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("sizes", PARTS, ids=str)
def test_parts_of_a_row(device: torch.device, sizes: tuple[int, int], paged: bool) -> None:
    row_bytes = sum(sizes)
    cache = strided_buffer(
        (BLOCKS, PAGE, row_bytes), (PAGE * row_bytes + 16, row_bytes, 1), torch.uint8, device
    ) if paged else make_buffer((SLOTS, row_bytes), device=device)  # fmt: skip
    parts = [make_buffer((ROWS, size), seed=size).view for size in sizes]
    where = indices(device)
    whole = cache.whole.cpu().clone()
    view = whole.as_strided(cache.view.shape, cache.view.stride(), cache.view.storage_offset())
    for i, slot in enumerate(where.tolist()):
        if slot >= 0 and slot != int(where[1]):
            place = view[slot // PAGE, slot % PAGE] if paged else view[slot]
            place.copy_(torch.cat([part[i] for part in parts]))
    store_rows(cache.view, where, [part.to(device) for part in parts], skip=int(where[1]))
    assert torch.equal(cache.whole.cpu(), whole)


@pytest.mark.parametrize("how", [{}, {"format": "fp8_ds_mla"}], ids=str)
def test_an_index_past_the_end(device: torch.device, how: dict[str, Any]) -> None:
    values, rest = torch.ones(3, 512, device=device), torch.ones(3, 64, device=device).bfloat16()
    cache = torch.zeros(9, 656 if how else 2176, dtype=torch.uint8, device=device)
    where = torch.tensor([3, 9, -1], device=device)
    store_rows(cache, where, (values, rest), **how, skip=9)  # as padding
    text = "store_rows: indices: index 9 at position 1, expected below 9"
    with out_of_range(device, text):
        store_rows(cache, where, (values, rest), **how)
    assert cache[4:].count_nonzero() == 0


def test_no_rows(device: torch.device) -> None:
    cache = torch.zeros(9, 656, dtype=torch.uint8, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    store_rows(
        cache,
        none,
        (torch.zeros(0, 512, device=device), torch.zeros(0, 128, dtype=torch.uint8, device=device)),
        format="fp8_ds_mla",
    )
    assert cache.count_nonzero() == 0


class PassOn(TorchDispatchMode):
    """Runs each operator as it is: calls go through PyTorch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [0, 3])
def test_a_wrong_number_of_tensors_through_pytorch(count: int) -> None:
    """A third cache was left out without a word."""
    good = good_arguments()
    rows = {**good, "outputs": good["parts"], "count": None}
    for op, names in {store_rows: ("cache", "parts", "scales"),
                      gather_rows: ("cache", "outputs", "scales")}.items():  # fmt: skip
        taken = {name: rows[name] for name in inspect.signature(op).parameters}
        for name in names:
            text = f"{op.__name__}: {name}: a list of {count}, {LIST}"
            if (op, name, count) == (gather_rows, "scales", 0):
                text = "gather_rows: scales: None, expected one for each cache"
            with PassOn(), pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                op(**{**taken, name: [taken[name]] * count})


def test_scales_of_several_head_strides_are_refused() -> None:
    """A group's scale would be written beside the view."""
    scales = torch.zeros(1024).as_strided((4, 8, 2, 2), (64, 8, 4, 1))
    cache = torch.zeros(4, 8, 4, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^store_rows: scales: stride"):
        store_rows(cache, torch.tensor([31]), torch.ones(1, 4, 16), format="fp8_per_token_head",
                   scales=scales)  # fmt: skip
    assert scales.count_nonzero() == 0


@pytest.mark.parametrize("dim", [16384, 1000])
def test_a_wide_row_with_one_scale(device: torch.device, dim: int) -> None:
    rows = hard_values(ROWS, dim, torch.bfloat16)
    cache = torch.zeros(SLOTS, dim, dtype=torch.uint8, device=device)
    where, scale = torch.arange(ROWS, device=device), torch.tensor([0.7])
    store_rows(cache, where, rows.to(device), format="fp8", scales=scale.to(device))
    assert torch.equal(cache[:ROWS].cpu(), e4m3_bits(rows.float() / scale))


# -- wrong arguments -------------------------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    cache = zeros(5, 10, 2, 4, dtype=torch.uint8)
    return {
        "cache": cache, "indices": torch.arange(3), "parts": zeros(3, 2, 4),
        "format": "fp8_per_token_head", "scales": zeros(50, 2), "scale_rule": None, "skip": 0,
    }  # fmt: skip


def mistakes() -> list[Mistake]:
    return store_rows_mistakes(good_arguments())


MIXED_DEVICES = [(name, "cuda:0 as in cache") for name in ("indices", "parts", "scales")]


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    new = rows(len(where))
    dim = int(new.shape[1:].numel())
    cache = torch.zeros(slots, 1, dim, dtype=torch.uint8, device=new.device)
    scales = torch.zeros(slots, 1, device=new.device)
    values = new.reshape(len(where), 1, dim)
    how = {"format": "fp8_per_token_head", "scale": scales}
    yield "scales", (cache, None, where, [values]), how
    yield "default", (cache, cache.clone(), where, [values, values.clone()]), {
        "format": "fp8", "scale": scales[0], "v_scale": scales[1], "skip": 1}  # fmt: skip
    yield "default", (rows(slots), None, where, [new]), {}


@pytest.mark.parametrize("scales", [1.0, [torch.ones(1), 1.0]], ids=str)
def test_scales_that_are_no_tensors_by_their_name_also_while_traced(scales: Any) -> None:
    """PyTorch's operator has other names: ``scale`` and ``v_scale``."""
    cache, rows = torch.zeros(4, 1, 8, dtype=torch.uint8), torch.ones(2, 1, 8)
    where = "scales" if scales == 1.0 else r"scales\[1\]"
    match = f"^store_rows: {where}: float, expected a tensor"
    with PassOn(), pytest.raises(TypeError, match=match):
        store_rows(cache, torch.tensor([0, 1]), rows, format="fp8", scales=scales)
