"""store_rows against the formats' descriptions in plain PyTorch, every byte accounted for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, Buffer, make_buffer, out_of_range, strided_buffer
from format_reference import E4M3, e4m3_bits, hard_values, quantised, ref_store_row
from mistakes import Mistake, zeros
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


def test_parts_of_other_dtypes_than_the_cache(device: torch.device) -> None:
    cache = torch.zeros(SLOTS, 656, dtype=torch.uint8, device=device)
    values, rest = torch.randn(ROWS, 528 // 4), torch.randn(ROWS, 64).bfloat16()
    where = torch.arange(ROWS, device=device)
    store_rows(cache, where, (values.to(device), rest.to(device)))
    assert torch.equal(cache[:ROWS, :528].cpu().view(torch.float32), values)
    assert torch.equal(cache[:ROWS, 528:].cpu().view(torch.bfloat16), rest)


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


# -- wrong arguments -------------------------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    cache = zeros(5, 10, 2, 4, dtype=torch.uint8)
    return {
        "cache": cache, "indices": torch.arange(3), "parts": zeros(3, 2, 4),
        "format": "fp8_per_token_head", "scales": zeros(50, 2), "scale_rule": None, "skip": 0,
    }  # fmt: skip


NAMES = ('"fp8_ds_mla", "fp8_index_k", "fp8_ds_v41", "fp8_ds_v41_paged", "fp8", '
         '"fp8_per_token_head" or "int8_per_token_head"')  # fmt: skip
LIST = "expected a tensor, or a list of one or two"
FLOAT_TYPES = "expected float32, float16 or bfloat16"
ROWS_APART = (
    "expected rows apart in a tensor that is written, as those of one that was expanded are not"
)


def no_list(good: dict[str, Any], name: str) -> list[Mistake]:
    """Return what is neither a tensor nor a list of one or two."""
    optional = name if name == "scales" else ""
    table = common.not_tensors(good, name, optional=optional)
    table = [mistake for mistake in table if not isinstance(mistake[0][name], list)]
    tensor = good[name]
    table += [
        ({name: [tensor] * 3}, ValueError, f"{name}: a list of 3, {LIST}"),
        ({name: [1, 2]}, TypeError, f"{name}[0]: int, expected a tensor"),
        ({name: [tensor, None]}, TypeError, f"{name}[1]: None, expected a tensor"),
        ({name: [None]}, TypeError, f"{name}: None, expected a tensor"),
    ]
    if not optional:
        table.append(({name: []}, ValueError, f"{name}: a list of 0, {LIST}"))
    return table


def rows_mistakes(good: dict[str, Any], name: str) -> list[Mistake]:
    """Return what store_rows and gather_rows have in common; `name` is `parts` or `outputs`."""
    slots = zeros(50, 8, dtype=torch.uint8)
    two = {"cache": [good["cache"], slots], name: [good[name], zeros(3, 2, 4)],
           "scales": [good["scales"], zeros(50, 2)]}  # fmt: skip
    mla = {"cache": zeros(50, 656, dtype=torch.uint8), "format": "fp8_ds_mla", "scales": None,
           name: [zeros(3, 512), zeros(3, 64).half()]}  # fmt: skip
    index_k = {"cache": zeros(5, 10, 132, dtype=torch.uint8), "format": "fp8_index_k",
               name: zeros(3, 128), "scales": None}  # fmt: skip
    given = {"format": "fp8", "scales": zeros(2)}
    v41 = {"format": "fp8_ds_v41", "scales": None}
    heads = f"{name}: shape %s, expected [rows, heads, dim] or [rows, dim]"
    aligned = "expected an address and strides that are multiples of 4 bytes"
    in_cache = "expected None: the scales of this format lie in the cache"
    one = "expected one tensor: this format has no bytes beside the values"
    apart = "expected [num_slots, 2] or [num_blocks, page, 2]"
    counts = "expected 1 element, or one for each of 2 heads"
    pages = "expected [num_blocks, page, 132]"
    table = no_list(good, "cache") + no_list(good, name) + no_list(good, "scales")
    table += common.read_only(good, "cache", name, "scales", "indices")
    table += common.not_tensors(good, "indices") + common.bad_indices("indices", good["indices"])
    table += [
        # cache
        ({"cache": zeros(50, 8)}, TypeError,
         "cache: dtype float32, expected uint8, or another dtype of one byte"),
        ({"cache": torch.tensor(1, dtype=torch.uint8)}, ValueError,
         "cache: shape [], expected at least 1 dimension"),
        ({"cache": zeros(5, 10, 2, 5, dtype=torch.uint8)}, ValueError,
         "cache: rows of 100 bytes (shape [5, 10, 2, 5]), expected 8 bytes for "
         f"{name} (shape [3, 2, 4])"),
        ({"cache": zeros(8, 50, dtype=torch.uint8).t()}, ValueError,
         common.stride_text("cache", 50, 1, [50, 8], 1)),
        ({"cache": zeros(5, 10, 2, 8, dtype=torch.uint8)[..., ::2]}, ValueError,
         common.stride_text("cache", 2, 3, [5, 10, 2, 4], 1)),
        ({**two, name: good[name]}, ValueError,
         f"{name}: one tensor, expected two, one for each cache"),
        ({**two, "cache": [good["cache"], slots[:49]]}, ValueError,
         "cache[1]: 49 rows (shape [49, 8]), expected 50 rows as in cache[0]"),
        ({**two, name: [good[name], zeros(3, 2, 5)]}, ValueError,
         f"cache[1]: rows of 8 bytes (shape [50, 8]), expected 10 bytes for {name}[1] "
         "(shape [3, 2, 5])"),
        ({**mla, "cache": zeros(50, 657, dtype=torch.uint8)}, ValueError,
         f"cache: rows of 657 bytes (shape [50, 657]), expected 656 bytes for {name}[0] "
         f"(shape [3, 512]) and {name}[1] (shape [3, 64])"),
        ({**mla, "cache": zeros(50, 657, dtype=torch.uint8)[:, :656]}, ValueError,
         f"cache: scales that are not aligned to 4 bytes, {aligned}"),
        ({**mla, "cache": zeros(50 * 656 + 1, dtype=torch.uint8)[1:].view(50, 656)}, ValueError,
         f"cache: scales that are not aligned to 4 bytes, {aligned}"),
        ({**mla, "cache": zeros(5, 2, 10, 328, dtype=torch.uint8).transpose(1, 2)}, ValueError,
         "cache: rows that are not contiguous (shape [5, 10, 2, 328]), expected contiguous rows"),
        ({**index_k, "cache": zeros(50, 132, dtype=torch.uint8)}, ValueError,
         f"cache: shape [50, 132], {pages}"),
        ({**index_k, "cache": zeros(5, 10, 1, 132, dtype=torch.uint8)}, ValueError,
         f"cache: shape [5, 10, 1, 132], {pages}"),
        ({**index_k, "cache": zeros(5, 10, 133, dtype=torch.uint8)[..., :132]}, ValueError,
         "cache: stride 133 of dimension 1, expected contiguous pages, stride 132"),
        # values
        *(({name: zeros(3, 2, 4, dtype=dtype)}, TypeError,
           f"{name}: dtype {str(dtype).removeprefix('torch.')}, {FLOAT_TYPES}")
          for dtype in (torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn)),
        *(({name: zeros(n, 2, 4)}, ValueError, common.count_text(name, n, [n, 2, 4], 3))
          for n in (0, 4)),
        *(({name: torch.zeros(shape)}, ValueError, heads % list(shape))
          for shape in [(3,), (), (3, 1, 2, 4)]),
        *(({name: zeros(*shape)}, ValueError,
           f"{name}: shape {list(shape)}, expected rows of 1 value or more")
          for shape in [(3, 0), (3, 2, 0)]),
        ({name: zeros(3, 2, 8)[..., ::2]}, ValueError,
         common.stride_text(name, 2, 2, [3, 2, 4], 1)),
        ({name: zeros(3, 2, 1).expand(3, 2, 4)}, ValueError,
         common.stride_text(name, 0, 2, [3, 2, 4], 1)),
        ({name: [good[name], zeros(3, 8)]}, ValueError, f"{name}[1]: given, {one}"),
        ({**two, name: [good[name], zeros(4, 2, 4)]}, ValueError,
         common.count_text(f"{name}[1]", 4, [4, 2, 4], 3)),
        ({**v41, name: zeros(3, 500)}, ValueError,
         f"{name}: shape [3, 500], expected rows of a multiple of 32 values"),
        ({**mla, name: [zeros(3, 0), zeros(3, 64)]}, ValueError,
         f"{name}[0]: shape [3, 0], expected rows of a multiple of 128 values"),
        ({**mla, name: [zeros(3), zeros(3, 64)]}, ValueError,
         f"{name}[0]: shape [3], expected [rows, dim]"),
        # the rest of a row
        ({**mla, name: zeros(3, 512)}, ValueError,
         "cache: rows of 656 bytes (shape [50, 656]), expected 528 bytes for "
         f"{name} (shape [3, 512])"),
        ({**mla, name: [zeros(3, 512), zeros(4, 64).half()]}, ValueError,
         common.count_text(f"{name}[1]", 4, [4, 64], 3)),
        ({**mla, name: [zeros(3, 512), zeros(3, 128).half()[:, ::2]]}, ValueError,
         common.stride_text(f"{name}[1]", 2, 1, [3, 64], 1)),
        ({**mla, name: [zeros(3, 512), torch.tensor(1.0)]}, ValueError,
         f"{name}[1]: shape [], expected at least 1 dimension"),
        # scales
        *(({"scales": scales}, ValueError, "scales: None, expected one for each cache")
          for scales in (None, [])),
        ({"scales": [good["scales"], zeros(50, 2)]}, ValueError,
         "scales: two tensors, expected one for each cache"),
        ({**two, "scales": good["scales"]}, ValueError,
         "scales: one tensor, expected one for each cache"),
        *(({"format": kept, "scales": zeros(1)}, ValueError, f"scales: one tensor, {in_cache}")
          for kept in ("fp8_ds_mla", "fp8_index_k", "fp8_ds_v41", "fp8_ds_v41_paged")),
        *(({"scales": good["scales"].to(dtype)}, TypeError,
           f"scales: dtype {str(dtype).removeprefix('torch.')}, expected float32")
          for dtype in (torch.float64, torch.bfloat16)),
        *(({"scales": zeros(*shape)}, ValueError, f"scales: shape {list(shape)}, {apart}")
          for shape in [(50, 3), (50,), (100,), (5, 10, 3)]),
        ({"scales": torch.tensor(1.0)}, ValueError,
         "scales: shape [], expected at least 1 dimension"),
        ({"scales": zeros(49, 2)}, ValueError,
         "scales: 49 rows (shape [49, 2]), expected 50 rows as in cache"),
        ({"scales": zeros(2, 50).t()}, ValueError,
         common.stride_text("scales", 50, 1, [50, 2], 1)),
        ({**two, "scales": [good["scales"], zeros(50, 3)]}, ValueError,
         f"scales[1]: shape [50, 3], {apart}"),
        *(({**given, "scales": zeros(*shape)}, ValueError,
           f"scales: shape {list(shape)}, {counts}") for shape in [(0,), (3,), (2, 1), (50, 2)]),
        ({**given, "scales": zeros(2).half()}, TypeError,
         "scales: dtype float16, expected float32"),
        # indices
        *(({"indices": torch.zeros(shape, dtype=torch.int64)}, ValueError,
           f"indices: shape {shape}, expected 1 dimension") for shape in ([3, 1], [])),
        ({"indices": torch.arange(4)}, ValueError, common.count_text(name, 3, [3, 2, 4], 4)),
        ({"indices": torch.tensor([4, 50, 51])}, IndexError,
         common.index_text("indices", 50, 1, 50)),
        ({"indices": torch.tensor([-4, 2**40, -50])}, IndexError,
         common.index_text("indices", 1099511627776, 1, 50)),
    ]  # fmt: skip
    return table


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = rows_mistakes(good, "parts")
    slots, memory = zeros(50, 8, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
    # In one memory: a cache, and what may not lie in it.
    cache, values = memory.view(torch.uint8)[:400].view(50, 8), memory.view(torch.float32)
    scales, rows = values[:100].view(50, 2), values[50:74].view(3, 2, 4)
    where = memory[30:33]
    two = {"cache": [good["cache"], slots], "parts": [good["parts"], zeros(3, 2, 4)],
           "scales": [good["scales"], zeros(50, 2)]}  # fmt: skip
    plain = {"format": None, "scales": None}
    parts = {**plain, "cache": zeros(50, 8), "parts": [zeros(3, 6), zeros(3, 2)]}
    table += [
        *common.not_words("format", NAMES, "fp9", "FP8", optional=True),
        *common.not_words("scale_rule", '"pow2" or "fp32"', "fp16", optional=True),
        *common.not_ints("skip", optional=True),
        *(({"scale_rule": rule}, ValueError,
           "scale_rule: given, expected None: this format has one rule")
          for rule in ("pow2", "fp32")),
        # expanded
        ({"cache": zeros(1, 10, 2, 4, dtype=torch.uint8).expand(5, 10, 2, 4)}, ValueError,
         f"cache: rows of 8 bytes that overlap (shape [5, 10, 2, 4]), {ROWS_APART}"),
        *(({name: tensor[:1].expand(50, -1)}, ValueError,
           common.apart_text(name, 0, [50, tensor.shape[1]]).replace("32", "8"))
          for name, tensor in (("cache", slots), ("scales", good["scales"]))),
        # overlap
        ({"cache": cache, "parts": rows}, ValueError, common.overlap_text("parts", "cache")),
        ({"cache": cache, "indices": where}, ValueError, common.overlap_text("indices", "cache")),
        ({"cache": cache, "scales": scales}, ValueError, common.overlap_text("scales", "cache")),
        ({"scales": scales, "parts": rows}, ValueError, common.overlap_text("parts", "scales")),
        ({"scales": scales, "indices": where}, ValueError,
         common.overlap_text("indices", "scales")),
        ({"cache": cache, "format": "fp8", "scales": values[:2]}, ValueError,
         common.overlap_text("scales", "cache")),
        ({**two, "cache": [cache, cache]}, ValueError, common.overlap_text("cache[1]", "cache[0]")),
        ({**two, "cache": [slots, cache], "parts": [rows, good["parts"]]}, ValueError,
         common.overlap_text("parts[0]", "cache[1]")),
        ({**two, "cache": [cache, slots], "parts": [good["parts"], rows]}, ValueError,
         common.overlap_text("parts[1]", "cache[0]")),
        ({**two, "scales": [scales, scales]}, ValueError,
         common.overlap_text("scales[1]", "scales[0]")),
        ({**two, "cache": [cache, slots], "scales": [good["scales"], scales]}, ValueError,
         common.overlap_text("scales[1]", "cache[0]")),
        ({**two, "cache": [slots, cache], "scales": [scales, good["scales"]]}, ValueError,
         common.overlap_text("cache[1]", "scales[0]")),
        # without a format
        ({"format": None}, ValueError, "scales: given without a format, expected None"),
        ({**plain, "scale_rule": "fp32"}, ValueError,
         "scale_rule: given without a format, expected None"),
        ({**plain, "cache": zeros(50, 8), "parts": zeros(3, 7)}, ValueError,
         common.bytes_text("parts", 28, [3, 7], "cache")),
        ({**parts, "cache": zeros(50, 9)}, ValueError,
         "cache: rows of 36 bytes (shape [50, 9]), expected 32 bytes, those of the parts together"),
        ({**parts, "cache": zeros(5, 2, 10, 4).transpose(1, 2)}, ValueError,
         "cache: rows that are not contiguous (shape [5, 10, 2, 4]), expected contiguous rows"),
        ({**parts, "cache": zeros(1, 8).expand(50, 8)}, ValueError,
         common.apart_text("cache", 0, [50, 8])),
        ({**parts, "parts": [zeros(4, 6), zeros(3, 2)]}, ValueError,
         common.count_text("parts[0]", 4, [4, 6], 3)),
        ({**parts, "parts": [zeros(3, 6), zeros(4, 2)]}, ValueError,
         common.count_text("parts[1]", 4, [4, 2], 3)),
        ({**parts, "parts": [zeros(3, 12)[:, ::2], zeros(3, 2)]}, ValueError,
         common.stride_text("parts[0]", 2, 1, [3, 6], 1)),
        ({**parts, "cache": [zeros(50, 6), zeros(49, 2)]}, ValueError,
         "cache[1]: 49 rows (shape [49, 2]), expected 50 rows as in cache[0]"),
        ({**parts, "cache": [values[:100].view(50, 2)] * 2, "parts": [zeros(3, 2)] * 2}, ValueError,
         common.overlap_text("cache[1]", "cache[0]")),
        ({**parts, "cache": values[:80].view(10, 8),
          "parts": [zeros(3, 6), values[9:15].view(3, 2)]}, ValueError,
         common.overlap_text("parts[1]", "cache")),
        ({**parts, "cache": values[:80].view(10, 8), "indices": memory[9:12]}, ValueError,
         common.overlap_text("indices", "cache")),
        ({**parts, "indices": torch.tensor([4, 50, 51])}, IndexError,
         common.index_text("indices", 50, 1, 50)),
    ]  # fmt: skip
    return table


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


def test_scales_of_several_head_strides_are_refused() -> None:
    """A group's scale would be written beside the view."""
    scales = torch.zeros(1024).as_strided((4, 8, 2, 2), (64, 8, 4, 1))
    cache = torch.zeros(4, 8, 4, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^store_rows: scales: heads at several strides"):
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


def test_pages_of_one_slot(device: torch.device) -> None:
    wide = torch.zeros(SLOTS, 1, 2, 20, dtype=torch.uint8, device=device)
    rows, where = torch.randn(ROWS, 2, 16), torch.arange(ROWS, device=device)
    one = torch.ones(1, device=device)
    store_rows(wide[..., :16], where, rows.to(device), format="fp8", scales=one)
    assert torch.equal(wide[:ROWS, 0, :, :16].cpu(), e4m3_bits(rows))
    assert wide[..., 16:].count_nonzero() == 0
