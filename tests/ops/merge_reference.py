"""What the tests of merge_state and merge_states have in common: the reference, and their calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from buffers import Buffer, strided_buffer
from ref import same_bits
from torch import Tensor

from jitkern import merge_states

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
TYPES = [F32, F16, BF16]
OUT_TYPES = [*TYPES, FP8]
INF, NAN = math.inf, math.nan

# The error of fp32 results, in parts of the largest value that went into a row: 3 roundings of
# 2^-24 for weight, product and quotient, and some of the sum.
TOLERANCE = 1e-6
# On a GPU more partials are merged in groups: twice the roundings, and the LSE of a group is fp32.
STATES_OF_LAUNCH = 8


def ref_merge(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    base: str = "e",
    *,
    lse_layout: str = "tokens_heads",
    scale: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The merged values and their lse, in float64 and on the CPU."""
    values = torch.stack([out.cpu().double() for out in outs])
    logs = torch.stack([lse.cpu().double() for lse in lses])
    if lse_layout == "heads_tokens":
        logs = logs.mT
    input_logs = logs
    logs = torch.where(logs == INF, -INF, logs)
    largest = logs.amax(0)  # NaN where one is
    center = torch.where(largest == -INF, 0.0, largest)
    to_log_e = math.log(2) if base == "2" else 1.0
    weights = torch.where(logs == center, 1.0, torch.exp((logs - center) * to_log_e))
    parts = torch.where(weights[..., None] == 0, 0.0, weights[..., None] * values)
    total = weights.sum(0)
    merged = torch.where(total[..., None] == 0, 0.0, parts.sum(0) / total[..., None])
    merged_lse = center + torch.log(total) / to_log_e
    if prefill_tokens_with_context is not None:
        is_copy = torch.arange(values.shape[1]).view(-1, 1) >= prefill_tokens_with_context
        merged = torch.where(is_copy[..., None], values[1], merged)
        merged_lse = torch.where(is_copy, input_logs[1], merged_lse)
    if scale is not None:
        merged = (merged / scale.cpu().double()).clamp(-448, 448)
    return merged, merged_lse.mT if lse_layout == "heads_tokens" else merged_lse


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their type lie between them: 1 for neighbours, 0 for -0 and 0."""

    def place(tensor: Tensor) -> Tensor:
        bits = tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int8).long()
        least = -(1 << (8 * tensor.itemsize - 1))
        return torch.where(bits < 0, least - bits, bits)

    return (place(a) - place(b)).abs()


def assert_close(result: Tensor, wanted: Tensor, error: Tensor | float) -> None:
    """fp32 is within `error`; a smaller type has the nearest number or its neighbour."""
    assert result.shape == wanted.shape
    result = result.cpu()
    is_nan = wanted.isnan()
    assert torch.equal(result.isnan(), is_nan)
    rounded = wanted.float().to(result.dtype)
    exact = (result.float() == rounded.float()) | is_nan  # infinities as well
    off = (result.double() - wanted).abs()
    near = off <= error
    if result.dtype == F32:
        assert (exact | near).all(), f"off by {off[~exact].max().item()}"
        return
    # A sum of large numbers that is close to 0 has the error of large numbers.
    near = (result.double() - rounded.double()).abs() <= error
    assert (exact | near | (steps_apart(result, rounded) <= 1)).all()
    if exact.numel() > 1000:
        assert (exact | near).double().mean() > 0.99


def assert_merged(
    result: tuple[Tensor, Tensor | None],
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    **options: Any,
) -> None:
    """Compare a result with the reference's, of arguments that are as they were."""
    wanted, wanted_lse = ref_merge(outs, lses, **options)
    tolerance = lse_tolerance = TOLERANCE
    if result[0].is_cuda and len(outs) > STATES_OF_LAUNCH:
        lse_tolerance = 2 * TOLERANCE
        finite = [lse.cpu().double().nan_to_num(0, 0, 0).abs().flatten() for lse in lses]
        largest = max((lse.max().item() for lse in finite if lse.numel()), default=0.0)
        tolerance = 2 * TOLERANCE + 2**-24 * largest
    error = torch.stack([out.cpu().double() for out in outs]).nan_to_num(0, 0, 0).abs()
    error = tolerance * error.amax(0).amax(-1, keepdim=True) if error.numel() else error.sum()
    scale = options.get("scale")
    assert_close(result[0], wanted, error if scale is None else error / scale.cpu())
    if result[1] is not None:
        size = 1 + wanted_lse.abs().nan_to_num(0, 0, 0)
        assert_close(result[1], wanted_lse, lse_tolerance * size)


def partials(
    device: torch.device | str,
    n: int,
    tokens: int,
    heads: int,
    dim: int,
    dtype: torch.dtype = F32,
    *,
    lse_layout: str = "tokens_heads",
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Stacked partial results, a tenth of them over no keys: those hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, tokens, heads, dim, generator=generator)
    lses = 3 * torch.randn(n, tokens, heads, generator=generator) + 7
    empty = torch.rand(n, tokens, heads, generator=generator) < 0.1
    outs[empty] = NAN
    lses[empty] = -INF
    if lse_layout == "heads_tokens":
        lses = lses.mT.contiguous()
    return outs.to(dtype).to(device), lses.to(device)


def scale_for(out_dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return torch.tensor([0.0123], device=device) if out_dtype == FP8 else None


# Strides of tokens and heads, and the first element, of rows of some elements. "far" keeps what
# divides 64; the others make vectors narrow.
LAYOUTS = ["contiguous", "far", "slice", "heads_first", "odd"]
EXPANDED = ["one_token", "one_head", "one_row"]


def strides_of(layout: str, tokens: int, heads: int, dim: int) -> tuple[int, int, int]:
    return {
        "contiguous": (heads * dim, dim, 0),
        "far": ((heads + 2) * (dim + 64), dim + 64, 64),
        "slice": ((heads + 2) * (dim + 3), dim + 3, 1),
        "heads_first": (dim, tokens * dim, 0),
        "odd": (heads * (dim + 2) + 5, dim + 2, 1),
        "one_token": (0, dim + 1, 0),
        "one_head": (dim, 0, 1),
        "one_row": (0, 0, 0),
    }[layout]


def placed(values: Tensor, layout: str = "contiguous", *, seed: int = 0) -> Buffer:
    """Return the values, [tokens, heads] of rows or numbers, within random bytes."""
    tokens, heads = values.shape[:2]
    dim = values.shape[2] if values.ndim == 3 else 1
    token_stride, head_stride, first = strides_of(layout, tokens, heads, dim)
    strides = (token_stride, head_stride, 1)[: values.ndim]
    where = (values.shape, strides, values.dtype, values.device)
    made = strided_buffer(*where, offset=first, seed=seed)
    if layout in EXPANDED:  # what the first rows say holds for all
        only = slice(None if token_stride else 1), slice(None if head_stride else 1)
        made.view[only].copy_(values[only])
    else:
        made.view.copy_(values)
    return made


@dataclass
class Call:
    """Arguments of merge_states, each within memory of which every byte is accounted for."""

    outs: list[Buffer]
    lses: list[Buffer]
    out: Buffer
    lse: Buffer

    def run_and_compare(self, **options: Any) -> tuple[Tensor, Tensor]:
        read = [*self.outs, *self.lses]
        twins = [buffer.twin() for buffer in read]
        written = [(buffer, buffer.twin()) for buffer in (self.out, self.lse)]
        outs, lses = ([one.view for one in many] for many in (self.outs, self.lses))
        result = merge_states(outs, lses, output=self.out.view, lse=self.lse.view, **options)
        assert result[0] is self.out.view and result[1] is self.lse.view
        assert all(map(Buffer.same, read, twins))
        for buffer, twin in written:  # all around the result is as it was
            twin.view.copy_(buffer.view)
            assert buffer.same(twin)
        assert_merged(result, outs, lses, **options)
        return self.out.view, self.lse.view


def call_of(
    outs: Tensor,
    lses: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    layouts: Sequence[str] = ("contiguous",),
    lse_layouts: Sequence[str] = ("contiguous",),
    out_layout: str = "contiguous",
) -> Call:
    """Return a call on those partials, which are laid out in turn as `layouts` say."""
    n, out_dtype = len(outs), out_dtype or outs.dtype
    out, lse = torch.zeros_like(outs[0], dtype=F32), torch.zeros_like(lses[0])
    return Call(
        [placed(outs[i], layouts[i % len(layouts)], seed=i) for i in range(n)],
        [placed(lses[i], lse_layouts[i % len(lse_layouts)], seed=i + n) for i in range(n)],
        placed(out.to(out_dtype), out_layout, seed=77),
        placed(lse, seed=78),
    )


def assert_same(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> None:
    """Bit for bit, NaN included."""
    assert a[1] is not None and b[1] is not None
    assert same_bits(a[0], b[0]) and same_bits(a[1], b[1])
