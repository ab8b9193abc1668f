"""merge: partial results of attention with their log-sum-exp, two and more, into one.

A peer whose code is others' is found where ``bench.peers.ELSEWHERE`` says. FlashInfer's sums are of
base 2: they are made before anything is timed. Bytes: every partial is read once and the result
written once, with their sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import call_case, call_cases, copy_impl, empty_kernel, ours, peer
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (
    peers.vllm_merge_state,
    peers.flashinfer_merge_state,
    peers.flashinfer_merge_states,
    peers.merge_by_triton,
)
TOKENS = (1, 64, 256, 1024, 4096, 16_384)
MOST, MANY = TOKENS[-1], 8
FP32, BF16 = torch.float32, torch.bfloat16
# (name, relative, absolute) error: about a unit in the last place of the output's dtype, and where
# large partials leave a small sum, one of the floats that they are added in.
DTYPES = {FP32: ("fp32", 2.0**-20, 1e-5), BF16: ("bf16", 2.0**-7, 1e-4)}
LSE_ERROR = 1e-5


@dataclass
class Buffers:
    """One working set. The separate partials lie in the stacked ones: memory is memory."""

    stacked: torch.Tensor  # [n, tokens, heads, dim]
    stacked_lse: torch.Tensor  # float32 [n, tokens, heads]
    out: torch.Tensor
    lse: torch.Tensor
    copied: torch.Tensor  # bytes, where the copy goes
    # What an implementation needs of it besides: a graph reads it for as long as the buffers.
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outs, self.lses = self.stacked.unbind(), self.stacked_lse.unbind()
        self.two = (self.outs[0], self.lses[0], self.outs[1], self.lses[1])


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        case = case_of(ctx, 256 if ctx.quick else 4096, dtype=FP32)
        copied = replace(case.impls[1], name="copy_ of as many bytes")
        impls = [case.ours(), peer("torch", _torch_two), copied]
        yield from measure(ctx, replace(case, impls=impls))
        return
    tokens = TOKENS[::5] if ctx.quick else TOKENS
    for n in tokens:
        yield from _measured(ctx, case_of(ctx, n), _peers_of_two())
    for stacked in (False, True):
        for n in tokens:
            case = case_of(ctx, n, partials=MANY, stacked=stacked)
            yield from _measured(ctx, case, _peers_of_many(stacked))
    others: list[dict[str, Any]] = [{"dim": 576}, {"heads": 8}, {"dtype": FP32}]
    for how in [] if ctx.quick else others:
        yield from _measured(ctx, case_of(ctx, MOST, **how), [])
    with torch.inference_mode():
        for count in (2, MANY):
            yield from measure(ctx, _host_case(ctx, count))


def _measured(ctx: Context, case: Case, others: list[Impl]) -> list[Row]:
    impls = [case.ours(), *others, replace(case.impls[1], name="copy kernel")]
    impls += [empty_kernel()] if case.params["tokens"] <= 1024 else []
    return measure(ctx, replace(case, impls=impls))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    on_gpu = ctx.device == "cuda"
    for tokens in (64, MOST) if on_gpu else (8, 1024):
        yield case_of(ctx, tokens, dtype=BF16 if on_gpu else FP32)
    b = case_of(ctx, 1).make(0)
    one = (*b.two, b.out, b.lse)

    def merge(a: Any, lse_a: Any, b: Any, lse_b: Any, out: Any, lse: Any) -> None:
        jitkern.merge_state(a, lse_a, b, lse_b, output=out, lse=lse)

    yield from call_cases("merge", merge, [x[:0] for x in one], one)


def case_of(
    ctx: Context,
    tokens: int,
    heads: int = 32,
    dim: int = 128,
    partials: int = 2,
    dtype: torch.dtype = BF16,
    stacked: bool = False,
) -> Case:
    """Return the case of one size: jitkern and a copy of as many bytes."""
    moved = tokens * heads * (partials + 1) * (dtype.itemsize * dim + 4)
    name = f"{tokens} x {heads} x {dim} {DTYPES[dtype][0]}" + ", stacked" * stacked

    def make(_: int) -> Buffers:
        shape = (partials, tokens, heads)
        outs = torch.empty(*shape, dim, dtype=dtype, device=ctx.device).normal_()
        lses = 2 * torch.randn(shape, device=ctx.device)
        copied = moved // 32 * 16  # half is read, half written; by vectors of 16 bytes
        copied = torch.empty(copied, dtype=torch.uint8, device=ctx.device)
        return Buffers(outs, lses, torch.empty_like(outs[0]), torch.empty_like(lses[0]), copied)

    def copy_pair(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
        return b.copied, b.stacked.view(-1).view(torch.uint8)[: len(b.copied)]

    def poison(b: Buffers) -> None:
        for tensor in (b.out, b.lse):
            tensor.view(torch.uint8).fill_(0xFF)  # a NaN in every dtype

    def merge(b: Buffers) -> None:
        if partials == 2 and not stacked:
            jitkern.merge_state(*b.two, output=b.out, lse=b.lse)
        else:
            forms = (b.stacked, b.stacked_lse) if stacked else (b.outs, b.lses)
            jitkern.merge_states(*forms, output=b.out, lse=b.lse)

    return Case(
        op="merge",
        name=f"{partials} of {name}" if partials > 2 else name,
        params={"tokens": tokens, "partials": partials},
        bytes_moved=moved,
        make=make,
        # Sums differ in their last places from one order to another: what is compared bit for bit
        # is whether they are close.
        outputs=lambda b: (torch.tensor([_is_close(b)], dtype=torch.uint8),),
        prepare=poison,
        reference=lambda _: (torch.ones(1, dtype=torch.uint8),),
        impls=[ours(merge), copy_impl(ctx, copy_pair)],
        calls=4 if moved > 100_000_000 else 8 if moved > 10_000_000 else 50,
    )


def _host_case(ctx: Context, count: int) -> Case:
    """Return the case of what a call costs the host, beside a call that does nothing."""
    b = case_of(ctx, 1, partials=count).make(0)
    call = partial(jitkern.merge_states, b.outs, b.lses)
    if count == 2:
        call = partial(jitkern.merge_state, *b.two)
    tensors = (*b.outs, *b.lses, b.out, b.lse)
    name = f"host time, {count} of 1 row"
    case = call_case("merge", name, partial(call, output=b.out, lse=b.lse), tensors)
    case.impls.insert(1, ours(lambda _: call(), "jitkern, new outputs"))
    return case


def _is_close(b: Buffers) -> bool:
    """Say whether the outputs are what the partials give in float64, to about their last place."""
    if "expected" not in b.kept:
        lses = b.stacked_lse.double()
        lse = torch.logsumexp(lses, dim=0)
        out = torch.zeros(b.out.shape, dtype=torch.float64, device=b.out.device)
        for weight, partial_out in zip(torch.exp(lses - lse), b.outs, strict=True):
            out += weight.unsqueeze(-1) * partial_out.double()
        b.kept["expected"] = out, lse
    out, lse = b.kept["expected"]
    _, relative, absolute = DTYPES[b.out.dtype]
    return torch.allclose(b.out.double(), out, rtol=relative, atol=absolute) and torch.allclose(
        b.lse.double(), lse, rtol=LSE_ERROR, atol=LSE_ERROR
    )


# -- peers -----------------------------------------------------------------------------------------


def _peers_of_two() -> list[Impl]:
    def one_kernel(b: Buffers) -> None:
        peers.merge_by_triton().one_kernel(b.out, b.lse, *b.two)

    def flashinfer(b: Buffers) -> None:
        lse_a, lse_b = b.kept["base 2"].unbind()
        peers.flashinfer_merge_state()(b.out, b.lse, b.outs[0], lse_a, b.outs[1], lse_b)

    return [
        peer("vLLM", lambda b: peers.vllm_merge_state()(b.out, b.lse, *b.two)),
        peer("FlashInfer", partial(_to_base_e, flashinfer)),
        peer("triton, one kernel", one_kernel),
        peer("torch", _torch_two),
    ]


def _peers_of_many(stacked: bool) -> list[Impl]:
    def flashinfer(b: Buffers) -> None:
        """It wants the partials of a token side by side: they are copied as well."""
        if stacked:
            forms = [x.transpose(0, 1).contiguous() for x in (b.stacked, b.kept["base 2"])]
        else:
            forms = [torch.stack(b.outs, 1), torch.stack(b.kept["base 2"].unbind(), 1)]
        peers.flashinfer_merge_states()(b.out, b.lse, *forms)

    def of_torch(b: Buffers) -> None:
        outs = b.stacked if stacked else torch.stack(b.outs)
        lses = b.stacked_lse if stacked else torch.stack(b.lses)
        top = lses.amax(0)
        weights = torch.exp(lses - top)
        total = weights.sum(0)
        torch.div((outs * weights.unsqueeze(-1)).sum(0), total.unsqueeze(-1), out=b.out)
        torch.add(torch.log(total), top, out=b.lse)

    name, torch_name = "torch.stack, FlashInfer", "torch.stack, torch"
    if stacked:
        name, torch_name = "transposed, FlashInfer", "torch"
    return [peer(name, partial(_to_base_e, flashinfer)), peer(torch_name, of_torch)]


def _to_base_e(merge: Any, b: Buffers) -> None:
    """Give `merge` sums of base 2; what its first call leaves, which is checked, goes back to e."""
    is_first = "base 2" not in b.kept
    if is_first:
        b.kept["base 2"] = b.stacked_lse / math.log(2)
    merge(b)
    if is_first:
        b.lse.mul_(math.log(2))


def _torch_two(b: Buffers) -> None:
    """As it is usually written: four passes over what is large, and the small ones on the sums."""
    out_a, lse_a, out_b, lse_b = b.two
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    merged = out_a * weight_a.unsqueeze(-1) + out_b * weight_b.unsqueeze(-1)
    torch.div(merged, total.unsqueeze(-1), out=b.out)
    torch.add(torch.log(total), top, out=b.lse)
