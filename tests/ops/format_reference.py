"""The formats of rows in plain PyTorch, from their descriptions in docs/ops/store_rows.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3_LARGEST, INT8_LARGEST = 448.0, 127.0

# The finite float8_e4m3fn numbers of 0 and above by their bits, 0 to 0x7e.
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def e4m3_bits(values: Tensor) -> Tensor:
    """Round to the nearest number, of two the one with even bits; NaN is 0x7f."""
    size = values.double().abs().clamp(max=E4M3_LARGEST).nan_to_num(0)
    above = torch.searchsorted(E4M3, size.contiguous()).clamp(max=0x7E)
    below = (above - 1).clamp(min=0)
    to_above, to_below = E4M3[above] - size, size - E4M3[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    bits = torch.where(takes_above, above, below) | values.signbit().long() << 7
    return torch.where(values.isnan(), 0x7F, bits).to(torch.uint8)


def int8_bits(values: Tensor) -> Tensor:
    """Round half away from zero; NaN is 0."""
    size = (values.double().abs() + 0.5).floor().clamp(max=INT8_LARGEST)
    return (size * values.sign()).nan_to_num(0).to(torch.int8).view(torch.uint8)


def ceil_pow2(scales: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scales)
    powers = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(scales.isinf(), scales, powers)


@dataclass(frozen=True)
class Rule:
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    pow2: bool = False

    def scales(self, values: Tensor, largest: float) -> Tensor:
        """Return the scale of each group, the last dimension. NaN has no part in it."""
        amax = torch.where(values.isnan(), 0.0, values.abs()).amax(-1)
        scales = (amax.clamp(min=self.amax_floor) / largest).clamp(min=self.scale_floor)
        scales = ceil_pow2(scales) if self.pow2 else scales
        return torch.where(scales == 0, 1.0, scales.clamp(min=2.0**-126))


RULES = {
    ("fp8_ds_mla", None): Rule(scale_floor=1e-4, pow2=True),
    ("fp8_ds_mla", "pow2"): Rule(scale_floor=1e-4, pow2=True),
    ("fp8_ds_mla", "fp32"): Rule(),
    ("fp8_index_k", None): Rule(amax_floor=1e-4),
    ("fp8_index_k", "fp32"): Rule(amax_floor=1e-4),
    ("fp8_index_k", "pow2"): Rule(amax_floor=1e-4, pow2=True),
    ("fp8_ds_v41", None): Rule(scale_floor=1e-4, pow2=True),
    ("fp8_ds_v41_paged", None): Rule(scale_floor=1e-4, pow2=True),
    ("fp8_per_token_head", None): Rule(scale_floor=1e-6),
    ("int8_per_token_head", None): Rule(scale_floor=1e-6),
}
GROUP = {"fp8_ds_mla": 128, "fp8_index_k": 128, "fp8_ds_v41": 32, "fp8_ds_v41_paged": 32}
SCALE_BYTES = {"fp8_ds_mla": 4, "fp8_index_k": 4, "fp8_ds_v41": 1, "fp8_ds_v41_paged": 1}
IN_PAGE = ("fp8_index_k", "fp8_ds_v41_paged")


def quantised(values: Tensor, name: str, rule: str | None = None) -> tuple[Tensor, Tensor]:
    """Return payload [..., groups, group] as uint8 and fp32 scales [..., groups]."""
    values = values.float().cpu()
    if name in GROUP:
        values = values.unflatten(-1, (-1, GROUP[name]))
    is_int8 = name.startswith("int8")
    scales = RULES[name, rule].scales(values, INT8_LARGEST if is_int8 else E4M3_LARGEST)
    scaled = values * (1 / scales).unsqueeze(-1)
    return (int8_bits if is_int8 else e4m3_bits)(scaled), scales


def scale_bytes(scales: Tensor, name: str) -> Tensor:
    """Return scales as they are stored: [..., bytes]."""
    if SCALE_BYTES[name] == 4:
        return scales.contiguous().view(torch.uint8)
    _, exponent = torch.frexp(scales)
    return torch.where(scales.isinf(), 255, exponent + 126).to(torch.uint8)


def ref_store_row(
    cache: Tensor, slot: int, payload: Tensor, scales: Tensor, rest: Tensor | None, name: str
) -> None:
    """Write one row in a format whose scales lie in the cache, [slots, bytes] or in pages."""
    payload, factors = payload.flatten(), scale_bytes(scales, name)
    if name not in IN_PAGE:
        row = (
            cache[slot]
            if cache.dim() == 2
            else cache[slot // cache.shape[1], slot % cache.shape[1]]
        )
        parts = [payload, factors] + ([] if rest is None else [rest.contiguous().view(torch.uint8)])
        row.copy_(torch.cat(parts))
        return
    block, at = cache[slot // cache.shape[1]].view(-1), slot % cache.shape[1]
    block[at * len(payload) :][: len(payload)] = payload
    begin = cache.shape[1] * len(payload)
    block[begin + at * len(factors) :][: len(factors)] = factors


def values_of(payload: Tensor, scales: Tensor, dtype: torch.dtype, is_int8: bool = False) -> Tensor:
    """Return payload times scales, [..., groups, group]."""
    numbers = payload.view(torch.int8 if is_int8 else torch.float8_e4m3fn).float()
    return (numbers * scales.unsqueeze(-1)).to(dtype)


def hard_values(rows: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return rows of all magnitudes: zeros, subnormals, powers of two and neighbours, NaN, inf."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator)
    values *= torch.ldexp(
        torch.ones(rows, 1), torch.randint(-20, 14, (rows, 1), generator=generator)
    )
    values = values.to(dtype)
    flat: Any = values.view(-1)
    values[0] = 0
    values[1, : dim // 2] = -0.0
    values[2] = torch.finfo(dtype).smallest_normal / 2
    values[3] = 448 * 2.0**-7  # amax by 448 is a power of two
    values[4] = torch.nextafter(torch.tensor(3.5, dtype=torch.float32), torch.tensor(9.0)).to(dtype)
    values[5] = torch.nextafter(torch.tensor(3.5, dtype=torch.float32), torch.tensor(0.0)).to(dtype)
    flat[6 * dim + 3] = float("nan")
    flat[7 * dim + 5], flat[7 * dim + 6] = float("inf"), -float("inf")
    values[8] = float("nan")
    values[9] = torch.finfo(dtype).max
    values[10] = 0
    values[10, 0] = torch.finfo(dtype).smallest_normal  # its scale's inverse would overflow
    return values
