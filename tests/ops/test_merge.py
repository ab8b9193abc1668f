"""merge_states and merge_state against float64, every byte around the results accounted for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from merge_mistakes import mistakes_of_many, mistakes_of_two
from merge_reference import (
    BF16,
    EXPANDED,
    F16,
    F32,
    FP8,
    INF,
    LAYOUTS,
    NAN,
    OUT_TYPES,
    TYPES,
    assert_merged,
    assert_same,
    call_of,
    partials,
    scale_for,
)
from mistakes import Mistake
from stems import OpCheck, Rows
from torch import Tensor

import jitkern.torch_ops  # noqa: F401 - registers the operators
from jitkern import merge_state, merge_states

NUMBERS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 64]
DIMS = [1, 2, 3, 7, 40, 64, 96, 128, 192, 576, 1000, 5000]
LSE_LAYOUTS = ["tokens_heads", "heads_tokens"]
BASES = ["e", "2"]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", NUMBERS)
def test_numbers_of_partials(device: torch.device, n: int, dtype: torch.dtype) -> None:
    """In lists, tuples and stacked tensors, whose first dimension is anywhere in memory."""
    for base, lse_layout in zip(BASES, LSE_LAYOUTS, strict=True):
        outs, lses = partials(device, n, 17, 3, 64, dtype, lse_layout=lse_layout, seed=n)
        how = {"base": base, "lse_layout": lse_layout}
        result = call_of(outs, lses).run_and_compare(**how)
        turned = outs.movedim(0, 2).contiguous().movedim(2, 0)  # [tokens, heads, n, dim]
        for lists in ((outs, lses), (turned, list(lses)), (tuple(outs), lses.unbind())):
            assert_same(merge_states(*lists, **how), result)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_dims(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    for n, tokens in ((2, 5), (9, 3)):
        outs, lses = partials(device, n, tokens, 3, dim, dtype, seed=dim)
        call_of(outs, lses).run_and_compare()


@pytest.mark.parametrize("heads", [1, 3, 8, 32, 128])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 300])
def test_tokens_and_heads(device: torch.device, tokens: int, heads: int) -> None:
    n, dim = (2, 8) if tokens * heads > 5000 else (9, 40)
    for lse_layout in LSE_LAYOUTS:
        outs, lses = partials(device, n, tokens, heads, dim, BF16, lse_layout=lse_layout)
        call = call_of(outs, lses, layouts=["contiguous", "slice"], out_layout="far")
        call.run_and_compare(lse_layout=lse_layout)


@pytest.mark.parametrize("out_dtype", OUT_TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    outs, lses = partials(device, 4, 21, 3, 24, dtype)
    call_of(outs, lses, out_dtype).run_and_compare(scale=scale_for(out_dtype, device))


def test_empty_partials_count_nothing(device: torch.device) -> None:
    for n in (2, 3, 9, 17):
        for garbage, none in itertools.product((NAN, INF, -INF, 1e38), (-INF, INF)):
            outs, lses = partials(device, n, 6, 2, 40, F32, seed=n)
            lses[1:, 1::2], lses[0, 3:] = none, none
            outs[lses.isinf()] = garbage
            out, lse = merge_states(outs, lses)
            assert_merged((out, lse), outs, lses)
            empty = lses.isinf().all(0)
            assert empty.any() and torch.equal(lse == -INF, empty) and not out.isnan().any()
            assert not out[empty].view(torch.int32).any()  # not even a sign


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 12, 64])
def test_a_single_one_comes_out_bit_for_bit(
    device: torch.device, n: int, dtype: torch.dtype
) -> None:
    """Among empty ones, at any place: signs of zeros, infinities."""
    odd = [0.0, -0.0, INF, -INF, 1e-40, torch.finfo(dtype).max, torch.finfo(dtype).tiny]
    outs, lses = partials(device, n, 4, 3, 40, dtype)
    for i in {0, n // 2, n - 1}:
        for log in (0.0, -0.0, -3.25, 700.0):
            lses[:], lses[:, 2] = -INF, INF
            lses[i] = log
            outs[i] = 0.5
            outs[i, ..., : len(odd)] = torch.tensor(odd, device=device)
            assert_same(merge_states(outs, lses), (outs[i], lses[i]))
            outs[i, 1] = NAN  # payloads of NaN are not kept
            assert merge_states(outs, lses)[0][1].isnan().all()


def test_nan_stays_in_its_row(device: torch.device) -> None:
    for n in (2, 12, 33):
        for i in {0, 1, n - 1}:
            outs, lses = partials(device, n, 7, 3, 40, seed=i)
            good = merge_states(outs, lses)
            lses[i, 4, 1] = NAN
            others = [j for j in range(n) if j != i]
            for rest in (0.0, -INF, INF):
                lses[others, 4, 1] = rest
                out, lse = merge_states(outs, lses)
                assert out[4, 1].isnan().all() and lse[4, 1].isnan()
                out[4, 1], lse[4, 1] = good[0][4, 1], good[1][4, 1]
                assert_same((out, lse), good)


@pytest.mark.parametrize("lse_layout", LSE_LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_prefill_tokens_with_context(
    device: torch.device, dtype: torch.dtype, lse_layout: str
) -> None:
    """Later tokens are copied from `b`, whatever their lse, and `a` is not read there."""
    how = {"lse_layout": lse_layout, "base": "2"}
    (partial_a, partial_b), (lse_a, lse_b) = partials(
        device, 2, 9, 3, 40, dtype, lse_layout=lse_layout
    )
    partial_b[6:, :, ::3] = -0.0
    (lse_b[6] if lse_layout == "tokens_heads" else lse_b[:, 6]).fill_(-0.0)
    partial_b.nan_to_num_(0.5)
    flat = lse_b.view(-1)
    flat[1::8], flat[2::8], flat[3::8] = -INF, INF, NAN
    every = merge_state(partial_a, lse_a, partial_b, lse_b, **how)
    assert_merged(every, (partial_a, partial_b), (lse_a, lse_b), **how)
    for tokens in (0, 1, 4, 8, 9, 10, 2**63 - 1):
        a, of_a = partial_a.clone(), lse_a.clone()
        a[tokens:] = NAN
        (of_a if lse_layout == "tokens_heads" else of_a.t())[tokens:] = NAN
        result = merge_state(a, of_a, partial_b, lse_b, **how, prefill_tokens_with_context=tokens)
        for here, wanted in ((slice(tokens), every), (slice(tokens, None), (partial_b, lse_b))):
            of_here = here if lse_layout == "tokens_heads" else (slice(None), here)
            same = wanted[0][here], wanted[1][of_here]
            assert_same((result[0][here], result[1][of_here]), same)


@pytest.mark.parametrize("n", [2, 3, 12, 64])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_any_number_of_tokens_gives_the_same_bits(
    device: torch.device, dtype: torch.dtype, n: int
) -> None:
    outs, lses = partials(device, n, 300, 3, 64, dtype)
    every = merge_states(outs, lses)
    for _ in range(3):
        assert_same(merge_states(outs, lses), every)
    for part in (slice(0, 1), slice(299, 300), slice(7, 24), slice(150, 300)):
        some = merge_states(list(outs[:, part]), list(lses[:, part]))
        assert_same(some, (every[0][part], every[1][part]))


def test_new_results(device: torch.device) -> None:
    """Results have the partials' dtype, come from torch's allocator: record_stream() knows them."""
    for dtype in TYPES:
        outs, lses = partials(device, 2, 5, 3, 8, dtype)
        two = merge_state(outs[0], lses[0], outs[1], lses[1])
        for result in (merge_states(outs, lses), two):
            for tensor, of_type in zip(result, (dtype, F32), strict=True):
                assert (tensor.dtype, tensor.device) == (of_type, outs.device)
                assert tensor.untyped_storage().resizable() and tensor.is_contiguous()


def test_without_an_lse(device: torch.device) -> None:
    outs, lses = partials(device, 3, 5, 3, 8)
    wanted, given = merge_states(outs, lses)[0], torch.empty_like(outs[0])
    for result, of_all in (
        (merge_states(outs, lses, lse=False), wanted),
        (merge_states(outs, lses, lse=False, output=given), wanted),
        (merge_state(outs[0], lses[0], outs[1], lses[1], lse=False),
         merge_states(outs[:2], lses[:2])[0]),
    ):  # fmt: skip
        assert result[1] is None and torch.equal(result[0], of_all)
    assert torch.equal(given, wanted)


@pytest.mark.parametrize("spread", [0, 1e-3, 0.1, 1, 5, 20, 87, 88.5, 100])
@pytest.mark.parametrize("base", ["e", "2"])
def test_accuracy(device: torch.device, base: str, spread: float) -> None:
    """Weights are equal, far apart, and so small that they are subnormal."""
    generator = torch.Generator().manual_seed(int(spread))
    for n in (1, 2, 3, 7, 8, 9, 32, 33, 64):
        outs = torch.randn(n, 40, 2, 64, generator=generator)
        for middle in (0, 300, -300):  # exp() of which no fp32 holds
            lses = spread * torch.rand(n, 40, 2, generator=generator) + middle
            lses[0, ::2], lses[-1, ::2] = middle + spread, middle
            outs, lses = outs.to(device), lses.to(device)
            assert_merged(merge_states(outs, lses, base=base), outs, lses, base=base)


def test_large_and_small_values(device: torch.device) -> None:
    """Results that a type does not hold are infinite, in float8 448; subnormal numbers count."""
    one, half = torch.zeros(2, 1, 1, device=device), torch.tensor([0.5], device=device)
    for dtype in TYPES:
        largest = torch.finfo(dtype).max
        outs = torch.full((2, 1, 1, 8), largest, dtype=dtype, device=device)
        if dtype == F16:  # the sum of the others is beyond fp32
            assert merge_states(outs, one)[0].eq(largest).all()
        out = torch.empty(1, 1, 8, dtype=FP8, device=device)
        merge_states(outs / 4, one, output=out, scale=half)
        assert out.float().eq(448).all()
        merge_states(-outs / 4, one, output=out, scale=half)
        assert out.float().eq(-448).all()
        least = torch.finfo(dtype).smallest_normal / 16
        outs = torch.tensor([1, 2, 3, 7], device=device).mul(least).to(dtype).expand(2, 1, 1, 4)
        assert torch.equal(merge_states(outs, one)[0], outs[0])
    outs = torch.full((2, 1, 1, 8), 1e6, device=device)
    assert merge_states(outs, one, output=outs[0].half())[0].eq(INF).all()


@pytest.mark.parametrize("out_dtype", [F16, BF16, FP8], ids=str)
def test_rounding(device: torch.device, out_dtype: torch.dtype) -> None:
    """Every number that is half way between two, and its neighbours: as PyTorch rounds."""
    bits = torch.arange(2 ** (8 * out_dtype.itemsize - 1))
    kind = torch.int16 if out_dtype.itemsize == 2 else torch.int8
    numbers = bits.to(kind).view(out_dtype).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    middles = torch.stack([middles.nextafter(torch.tensor(x)) for x in (INF, -INF)] + [middles])
    values = torch.cat([middles.flatten(), numbers])
    values = torch.cat([values, -values]).view(1, 1, 1, -1).to(device)
    if device.type == "cuda":
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % 1024)).view(1, -1, 1, 1024)
    out = torch.empty(values.shape[1:], dtype=out_dtype, device=device)
    scale = torch.ones(1, device=device) if out_dtype == FP8 else None
    merge_states(values, torch.zeros(values.shape[:3], device=device), output=out, scale=scale)
    assert torch.equal(out.cpu().float(), values[0].cpu().to(out_dtype).float())
    nans = torch.tensor([-1, 2**31 - 1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    values = nans.view(F32).view(1, 1, 1, 4).to(device)
    out = torch.empty(1, 1, 4, dtype=out_dtype, device=device)
    merge_states(values, torch.zeros(1, 1, 1, device=device), output=out, scale=scale)
    assert out.isnan().all()


@pytest.mark.parametrize("out_layout", LAYOUTS)
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANDED])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layouts(device: torch.device, dtype: torch.dtype, layout: str, out_layout: str) -> None:
    """Layouts of all partials, which makes vectors narrow, and of one alone."""
    outs, lses = partials(device, 3, 9, 4, 64, dtype, seed=3)
    for layouts in ([layout], ["contiguous", layout, "contiguous"]):
        lse_layouts = layouts[::-1]
        call = call_of(outs, lses, layouts=layouts, lse_layouts=lse_layouts, out_layout=out_layout)
        call.run_and_compare()


@pytest.mark.parametrize("layout", ["contiguous", "odd", "heads_first"])
@pytest.mark.parametrize("dim", [8, 576, 5000])
@pytest.mark.parametrize("n", [2, 12])
def test_in_place(device: torch.device, n: int, dim: int, layout: str) -> None:
    """`out` as one of `outs`, `lse` as one of `lses`, and both: the bits of a call that is not."""
    for dtype, lse_layout in zip((F32, BF16), LSE_LAYOUTS, strict=True):
        outs, lses = partials(device, n, 3, 2, dim, dtype, lse_layout=lse_layout)
        how = {"lse_layout": lse_layout, "base": "2"}
        wanted = merge_states(outs, lses, **how)
        for of_out, of_lse in ((0, None), (None, n - 1), (n - 1, 0), (1, 1)):
            call = call_of(outs, lses, layouts=[layout], lse_layouts=[layout])
            if of_out is not None:
                call.out = call.outs[of_out]
            if of_lse is not None:
                call.lse = call.lses[of_lse]
            every = [*call.outs, *call.lses, call.out, call.lse]
            twins = [buffer.twin() for buffer in every]
            result = merge_states(
                [one.view for one in call.outs], [one.view for one in call.lses],
                output=call.out.view, lse=call.lse.view, **how,
            )  # fmt: skip
            assert_same(result, wanted)
            for buffer, twin in zip(every, twins, strict=True):
                for written in (call.out, call.lse):
                    if buffer.whole is written.whole:
                        twin.view.copy_(buffer.view)
                assert buffer.same(twin)


SHAPE = (4, 2, 8)
UNCHECKED: set[str] = set()
RESULTS = {"output", "lse", "scale"}
MIXED_DEVICES = [(name, "cuda:0 as in output") for name in ("lse", "scale")]


def good_arguments() -> dict[str, Any]:
    return {
        "partials": [torch.ones(SHAPE), torch.ones(SHAPE), torch.ones(SHAPE)],
        "lses": [torch.zeros(SHAPE[:2]), torch.zeros(SHAPE[:2]), torch.zeros(SHAPE[:2])],
        "output": torch.zeros(SHAPE).to(FP8),
        "lse": torch.zeros(SHAPE[:2]),
        "base": "2",
        "lse_layout": "tokens_heads",
        "scale": torch.ones(1),
    }


def mistakes() -> list[Mistake]:
    return mistakes_of_many(good_arguments())


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    outs = [rows(len(where)).flatten(1)[:, None] for _ in range(3)]
    lses = [rows(len(where)).flatten(1)[:, :1] for _ in range(3)]
    yield "default", (outs, lses), {}
    yield "default", (outs, lses), {"base": "2"}
    turned = [lse.t() for lse in lses]
    yield "default", (outs, turned), {"lse_layout": "heads_tokens"}
    yield "default", (outs[:2], lses[:2]), {"prefill_tokens_with_context": 2}
    out, lse = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])
    yield "out", (outs, lses), {"output": out, "lse": lse}
    half = torch.zeros_like(outs[0], dtype=F16)  # PyTorch's check cannot compare float8
    yield "out", (outs, lses), {"output": half, "lse": None}


def arguments_of_two() -> dict[str, Any]:
    partials = {"partial_a": torch.ones(SHAPE), "lse_a": torch.zeros(SHAPE[:2])}
    partials |= {"partial_b": torch.ones(SHAPE), "lse_b": torch.zeros(SHAPE[:2])}
    how = {"base": "2", "lse_layout": "tokens_heads", "prefill_tokens_with_context": 2}
    return {**partials, "output": torch.zeros(SHAPE), "lse": torch.zeros(SHAPE[:2]), **how}


def test_mistakes_of_merge_state() -> None:
    """With results, and without: then Python makes them before C++ can check."""
    for change, kind, text in mistakes_of_two():
        for without in ({}, dict.fromkeys(RESULTS)):
            good = {**arguments_of_two(), **without}
            with pytest.raises(kind) as caught:
                merge_state(**{**good, **change})
            assert type(caught.value) is kind
            assert str(caught.value) == f"merge_state: {text}"
            assert without or not (good["output"].any() or good["lse"].any())
