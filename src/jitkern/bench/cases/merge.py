"""merge: partial results of attention with their log-sum-exp, two and more, into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

import jitkern
from jitkern.bench.case import Case, Context, Impl, Run
from jitkern.bench.cases.common import call_case, copy_impl

HEADS, DIM = 32, 128
CPU_TOKENS = (8, 1024)  # in a cache, and in memory
CUDA_TOKENS = (64, 16_384)  # a small and a large call
FP8 = torch.float8_e4m3fn
FP8_SCALE = 1 / 64  # of partials around 1: values of an fp8 that end well below its 448

# (name, relative, absolute) error: about a unit in the last place of the output's dtype, and where
# large partials leave a small sum, one of the floats that they are added in.
_DTYPES = {
    torch.float32: ("fp32", 2.0**-20, 1e-5),
    torch.float16: ("fp16", 2.0**-10, 1e-5),
    torch.bfloat16: ("bf16", 2.0**-7, 1e-4),
    FP8: ("fp8", 2.0**-3, 2.0**-8),
}
_LSE_ERROR = 1e-5


@dataclass(frozen=True)
class Size:
    """What is merged, and in which form it comes."""

    tokens: int
    heads: int = HEADS
    dim: int = DIM
    partials: int = 2
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None  # that of the partials
    stacked: bool = False
    by_heads: bool = False  # lse of [heads, tokens]
    num_valid: int | None = None  # of the partials, the first

    @property
    def name(self) -> str:
        """What the case is called."""
        name = f"{self.tokens} x {self.heads} x {self.dim} {_DTYPES[self.dtype][0]}"
        if self.partials > 2:
            name = f"{self.partials} of {name}"
        if self.num_valid is not None:
            name += f", {self.num_valid} valid"
        if self.out_dtype is not None:
            name += f" to {_DTYPES[self.out_dtype][0]}"
        return name + ", stacked" * self.stacked + ", lse by heads" * self.by_heads

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written: every partial that counts, and the result."""
        rows = self.tokens * self.heads
        out_bytes = (self.out_dtype or self.dtype).itemsize * self.dim
        read = (self.num_valid or self.partials) * (self.dtype.itemsize * self.dim + 4)
        return rows * (read + out_bytes + 4)

    @property
    def lse_layout(self) -> Literal["tokens_heads", "heads_tokens"]:
        """As the op is told."""
        return "heads_tokens" if self.by_heads else "tokens_heads"


@dataclass
class Buffers:
    """One working set. The separate partials lie in the stacked ones: memory is memory."""

    stacked: torch.Tensor  # [n, tokens, heads, dim]
    stacked_lse: torch.Tensor  # float32 [n, tokens, heads], or by heads
    outs: tuple[torch.Tensor, ...]
    lses: tuple[torch.Tensor, ...]
    out: torch.Tensor
    lse: torch.Tensor
    scale: torch.Tensor | None  # for fp8
    num_valid: torch.Tensor | None
    copied: torch.Tensor  # bytes, where the copy goes
    expected: tuple[torch.Tensor, torch.Tensor] | None = None  # float64
    # What an implementation needs of it besides: a graph reads it for as long as the buffers.
    kept: dict[str, torch.Tensor] = field(default_factory=dict)


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    on_gpu = ctx.device == "cuda"
    for tokens in CUDA_TOKENS if on_gpu else CPU_TOKENS:
        yield case_of(ctx, Size(tokens, dtype=torch.bfloat16 if on_gpu else torch.float32))
    one = buffers(ctx, Size(1))
    for name, rows in (("call, checks only", 0), ("call, 1 row", 1)):
        pairs = zip((*one.outs, one.out), (*one.lses, one.lse), strict=True)
        a, lse_a, b, lse_b, out, lse = (x[:rows] for pair in pairs for x in pair)
        call = partial(jitkern.merge_state, a, lse_a, b, lse_b, out=out, lse=lse)
        yield call_case("merge", name, call, (a, lse_a, b, lse_b, out, lse))


def buffers(ctx: Context, size: Size) -> Buffers:
    """Return random partials and outputs for them."""
    shape = (size.tokens, size.heads)
    stacked = torch.empty(size.partials, *shape, size.dim, dtype=size.dtype, device=ctx.device)
    stacked.normal_()
    lse_shape = shape[::-1] if size.by_heads else shape
    stacked_lse = 2 * torch.randn(size.partials, *lse_shape, device=ctx.device)
    out = torch.empty_like(stacked[0], dtype=size.out_dtype or size.dtype)
    copied = size.bytes_moved // 32 * 16  # half is read, half written; by vectors of 16 bytes
    return Buffers(
        stacked,
        stacked_lse,
        stacked.unbind(),
        stacked_lse.unbind(),
        out,
        torch.empty_like(stacked_lse[0]),
        torch.full((1,), FP8_SCALE, device=ctx.device) if size.out_dtype == FP8 else None,
        None
        if size.num_valid is None
        else torch.tensor([size.num_valid], dtype=torch.int32, device=ctx.device),
        torch.empty(copied, dtype=torch.uint8, device=ctx.device),
    )


def case_of(ctx: Context, size: Size) -> Case:
    """Return the case of one size: jitkern and a copy of as many bytes."""
    moved = size.bytes_moved
    return Case(
        op="merge",
        name=size.name,
        params={
            "tokens": size.tokens,
            "heads": size.heads,
            "dim": size.dim,
            "partials": size.partials,
            "dtype": _DTYPES[size.dtype][0],
            "out_dtype": _DTYPES[size.out_dtype or size.dtype][0],
            "stacked": size.stacked,
            "lse_layout": size.lse_layout,
            "num_valid": size.num_valid,
        },
        bytes_moved=moved,
        bytes_note="every partial read once, the result written once, with their sums",
        make=lambda _: buffers(ctx, size),
        # Sums differ in their last places from one order to another: what is compared bit for bit
        # is whether they are close.
        outputs=lambda b: (torch.tensor([is_close(b, size)], dtype=torch.uint8),),
        prepare=_poison,
        reference=lambda _: (torch.ones(1, dtype=torch.uint8),),
        impls=[
            Impl("jitkern", "ours", lambda: ours(size)),
            copy_impl(ctx, copy_pair),
        ],
        calls=4 if moved > 100_000_000 else 8 if moved > 10_000_000 else 50,
    )


def ours(size: Size) -> Run:
    """Return the call of the op."""
    layout = size.lse_layout
    if size.partials == 2 and not size.stacked:

        def merge_two(b: Buffers) -> None:
            (a, other), (lse_a, lse_b) = b.outs, b.lses
            jitkern.merge_state(
                a, lse_a, other, lse_b, out=b.out, lse=b.lse, lse_layout=layout, scale=b.scale
            )

        return merge_two

    def merge_many(b: Buffers) -> None:
        outs, lses = (b.stacked, b.stacked_lse) if size.stacked else (b.outs, b.lses)
        jitkern.merge_states(
            outs,
            lses,
            out=b.out,
            lse=b.lse,
            lse_layout=layout,
            scale=b.scale,
            num_valid=b.num_valid,
        )

    return merge_many


def copy_pair(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (to, from) of a copy that reads and writes as much as the op does together."""
    return b.copied, b.stacked.view(-1).view(torch.uint8)[: b.copied.numel()]


def is_close(b: Buffers, size: Size) -> bool:
    """Say whether the outputs are what the partials give in float64, to about their last place."""
    if b.expected is None:
        b.expected = _merged(b, size)
    out, lse = b.expected
    _, relative, absolute = _DTYPES[b.out.dtype]
    return torch.allclose(b.out.double(), out, rtol=relative, atol=absolute) and torch.allclose(
        b.lse.double(), lse, rtol=_LSE_ERROR, atol=_LSE_ERROR
    )


def _merged(b: Buffers, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the op means, in plain PyTorch."""
    count = size.num_valid or size.partials
    lses = b.stacked_lse[:count].double()
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse)
    if size.by_heads:
        weights = weights.mT
    out = torch.zeros(b.out.shape, dtype=torch.float64, device=b.out.device)
    for weight, partial_out in zip(weights, b.outs[:count], strict=True):
        out += weight.unsqueeze(-1) * partial_out.double()
    if b.scale is not None:
        out = (out / b.scale.double()).clamp(-448, 448)
    return out, lse


def _poison(b: Buffers) -> None:
    b.out.view(torch.uint8).fill_(0xFF)  # a NaN in every dtype
    b.lse.view(torch.uint8).fill_(0xFF)
