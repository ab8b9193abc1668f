"""merge: partial results of attention with their log-sum-exp, two and more, into one.

A peer whose code is others' is found where ``bench.peers.ELSEWHERE`` says. FlashInfer's sums are of
base 2: its inputs are made before anything is timed. Bytes: every partial is read once and the
result written once, with their sums.
"""

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import common
from bench.cases.common import ours, peer
from bench.measure import measure

TOKENS = (1, 64, 256, 1024, 4096, 16_384)
MOST, MANY = TOKENS[-1], 8
FP32, BF16 = torch.float32, torch.bfloat16
# (name, relative, absolute) error: about a unit in the last place of the output's dtype, and where
# large partials leave a small sum, one of the floats that they are added in.
DTYPES = {FP32: ("fp32", 2.0**-20, 1e-5), BF16: ("bf16", 2.0**-7, 1e-4)}
LSE_ERROR = 1e-5


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        case = case_of(ctx, 256 if ctx.quick else 4096, dtype=FP32)
        yield from common.beside(ctx, case, [peer("torch", _torch_two)])
        return
    for partials, others in ((2, _peers_of_two()), (MANY, _peers_of_many())):
        for tokens in TOKENS[::5] if ctx.quick else TOKENS:
            case = case_of(ctx, tokens, partials=partials)
            yield from common.beside(ctx, case, others, is_small=tokens <= 1024)
    more: list[dict[str, Any]] = [{"dim": 576}, {"heads": 8}, {"dtype": FP32}]
    for how in [] if ctx.quick else more:
        yield from common.beside(ctx, case_of(ctx, MOST, **how), [])
    with torch.inference_mode():
        yield from measure(ctx, _host_case(ctx))


def cases(ctx: Context) -> Iterator[Case]:
    on_gpu = ctx.device == "cuda"
    for tokens in (64, MOST) if on_gpu else (8, 1024):
        yield case_of(ctx, tokens, dtype=BF16 if on_gpu else FP32)
    b = case_of(ctx, 1).make(0)
    one = (*b.two, b.out, b.lse)

    def merge(a: Any, lse_a: Any, b: Any, lse_b: Any, out: Any, lse: Any) -> None:
        jitkern.merge_state(a, lse_a, b, lse_b, output=out, lse=lse)

    yield from common.call_cases("merge", merge, [x[:0] for x in one], one)


def case_of(
    ctx: Context,
    tokens: int,
    heads: int = 32,
    dim: int = 128,
    partials: int = 2,
    dtype: torch.dtype = BF16,
) -> Case:
    moved = tokens * heads * (partials + 1) * (dtype.itemsize * dim + 4)
    name = f"{tokens} x {heads} x {dim} {DTYPES[dtype][0]}"

    def make(_: int) -> SimpleNamespace:
        outs = torch.empty(partials, tokens, heads, dim, dtype=dtype, device=ctx.device).normal_()
        lses = 2 * torch.randn(partials, tokens, heads, device=ctx.device)
        copied = moved // 32 * 16  # half is read, half written; by vectors of 16 bytes
        return SimpleNamespace(
            outs=outs.unbind(),
            lses=lses.unbind(),
            lses_of_base_2=(lses / math.log(2)).unbind(),
            two=(outs[0], lses[0], outs[1], lses[1]),
            out=torch.empty_like(outs[0]),
            lse=torch.empty_like(lses[0]),
            lse_unit=1.0,  # what an implementation's lse is multiplied by before it is checked
            expected=None,
            copied=torch.empty(copied, dtype=torch.uint8, device=ctx.device),
            copied_from=outs.view(-1).view(torch.uint8)[:copied],
        )

    def poison(b: Any) -> None:
        b.lse_unit = 1.0
        for tensor in (b.out, b.lse):
            tensor.view(torch.uint8).fill_(0xFF)  # a NaN in every dtype

    def merge(b: Any) -> None:
        if partials == 2:
            jitkern.merge_state(*b.two, output=b.out, lse=b.lse)
        else:
            jitkern.merge_states(b.outs, b.lses, output=b.out, lse=b.lse)

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
        impls=[ours(merge), common.copy_impl(ctx, lambda b: (b.copied, b.copied_from))],
        calls=4 if moved > 100_000_000 else 8 if moved > 10_000_000 else 50,
    )


def _host_case(ctx: Context) -> Case:
    b = case_of(ctx, 1).make(0)
    call = partial(jitkern.merge_state, *b.two)
    tensors = (*b.two, b.out, b.lse)
    given = partial(call, output=b.out, lse=b.lse)
    case = common.call_case("merge", "host time, 2 of 1 row", given, tensors)
    case.impls.insert(1, ours(lambda _: call(), "jitkern, new outputs"))
    return case


def _is_close(b: Any) -> bool:
    """Say whether the outputs are what the partials give in float64, to about their last place."""
    if b.expected is None:
        lses = torch.stack(b.lses).double()
        lse = torch.logsumexp(lses, dim=0)
        weights = torch.exp(lses - lse).unsqueeze(-1)
        pairs = zip(weights, b.outs, strict=True)
        b.expected = sum(weight * out.double() for weight, out in pairs), lse
    out, lse = b.expected
    _, relative, absolute = DTYPES[b.out.dtype]
    return torch.allclose(b.out.double(), out, rtol=relative, atol=absolute) and torch.allclose(
        b.lse.double() * b.lse_unit, lse, rtol=LSE_ERROR, atol=LSE_ERROR
    )


# -- peers -----------------------------------------------------------------------------------------


def _peers_of_two() -> list[Impl]:
    def flashinfer(b: Any) -> None:
        b.lse_unit = math.log(2)
        (out_a, out_b), (lse_a, lse_b) = b.outs, b.lses_of_base_2
        peers.flashinfer_merge_state()(b.out, b.lse, out_a, lse_a, out_b, lse_b)

    return [
        peer("vLLM", lambda b: peers.vllm_merge_state()(b.out, b.lse, *b.two)),
        peer("FlashInfer", flashinfer),
        peer("triton, one kernel", lambda b: peers.triton().merge(b.out, b.lse, *b.two)),
        peer("torch", _torch_two),
    ]


def _peers_of_many() -> list[Impl]:
    def flashinfer(b: Any) -> None:
        """It wants the partials of a token side by side: they are copied as well."""
        b.lse_unit = math.log(2)
        forms = (torch.stack(form, 1) for form in (b.outs, b.lses_of_base_2))
        peers.flashinfer_merge_states()(b.out, b.lse, *forms)

    def of_torch(b: Any) -> None:
        outs, lses = torch.stack(b.outs), torch.stack(b.lses)
        top = lses.amax(0)
        weights = torch.exp(lses - top)
        total = weights.sum(0)
        torch.div((outs * weights.unsqueeze(-1)).sum(0), total.unsqueeze(-1), out=b.out)
        torch.add(torch.log(total), top, out=b.lse)

    return [peer("torch.stack, FlashInfer", flashinfer), peer("torch.stack, torch", of_torch)]


def _torch_two(b: Any) -> None:
    """As it is usually written: four passes over what is large, and the small ones on the sums."""
    out_a, lse_a, out_b, lse_b = b.two
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    merged = out_a * weight_a.unsqueeze(-1) + out_b * weight_b.unsqueeze(-1)
    torch.div(merged, total.unsqueeze(-1), out=b.out)
    torch.add(torch.log(total), top, out=b.lse)
