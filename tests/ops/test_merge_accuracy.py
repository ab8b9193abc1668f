"""How close merge_states comes to float64, and how it rounds."""

from __future__ import annotations

import pytest
import torch
from merge_reference import BF16, F16, FP8, INF, TYPES, assert_merged

from jitkern import merge_states


@pytest.mark.parametrize("spread", [0, 1e-3, 0.1, 1, 5, 20, 87, 88.5, 100])
@pytest.mark.parametrize("base", ["e", "2"])
def test_accuracy(device: torch.device, base: str, spread: float) -> None:
    """Of weights that are equal, far apart and so small that they are no normal numbers."""
    generator = torch.Generator().manual_seed(int(spread))
    for n in (1, 2, 3, 7, 8, 9, 32, 33, 64):
        outs = torch.randn(n, 40, 2, 64, generator=generator)
        for middle in (0, 300, -300):
            lses = spread * torch.rand(n, 40, 2, generator=generator) + middle
            lses[0, ::2], lses[-1, ::2] = middle + spread, middle
            outs, lses = outs.to(device), lses.to(device)
            assert_merged(merge_states(outs, lses, base=base), outs, lses, base=base)


def test_what_no_fp32_holds_on_the_way(device: torch.device) -> None:
    """exp(lse) overflows from 88 on and vanishes below -104; the differences do not."""
    outs = torch.tensor([1.0, 2.0, 6.0], device=device).view(3, 1, 1, 1)
    for middle in (1e4, -1e4, 3e38, -3e38):
        lses = torch.full((3, 1, 1), middle, device=device)
        out, lse = merge_states(outs, lses)
        assert out.item() == 3
        assert lse.item() == pytest.approx(middle + 1.0986123, rel=1e-7)


def test_large_and_small_values(device: torch.device) -> None:
    """Results that a type does not hold are infinite, in float8 448; subnormal numbers count."""
    one, half = torch.zeros(2, 1, 1, device=device), torch.tensor([0.5], device=device)
    for dtype in TYPES:
        largest = torch.finfo(dtype).max
        outs = torch.full((2, 1, 1, 8), largest, dtype=dtype, device=device)
        if dtype == F16:  # the sum of the others is beyond fp32
            assert merge_states(outs, one)[0].eq(largest).all()
        out = torch.empty(1, 1, 8, dtype=FP8, device=device)
        merge_states(outs / 4, one, out=out, scale=half)
        assert out.float().eq(448).all()
        merge_states(-outs / 4, one, out=out, scale=half)
        assert out.float().eq(-448).all()
        least = torch.finfo(dtype).smallest_normal / 16
        outs = torch.tensor([1, 2, 3, 7], device=device).mul(least).to(dtype).expand(2, 1, 1, 4)
        assert torch.equal(merge_states(outs, one)[0], outs[0])
    outs = torch.full((2, 1, 1, 8), 1e6, device=device)
    assert merge_states(outs, one, out=outs[0].half())[0].eq(INF).all()


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
    merge_states(values, torch.zeros(values.shape[:3], device=device), out=out, scale=scale)
    assert torch.equal(out.cpu().float(), values[0].cpu().to(out_dtype).float())
