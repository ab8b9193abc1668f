"""merge: partial results of attention with their log-sum-exp, two and more, into one.

A peer whose code is others' is found where ``bench.peers.ELSEWHERE`` says. FlashInfer's sums are of
base 2: they are made before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

import jitkern
from bench import peers
from bench.cases.common import NO_OP, call_case, copy_impl
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (
    peers.vllm_merge_state,
    peers.flashinfer_merge_state,
    peers.flashinfer_merge_states,
    peers.merge_by_triton,
)
PLOTS = ("of the copy",)

# (name, relative, absolute) error: about a unit in the last place of the output's dtype, and where
# large partials leave a small sum, one of the floats that they are added in.
_DTYPES = {
    torch.float32: ("fp32", 2.0**-20, 1e-5),
    torch.float16: ("fp16", 2.0**-10, 1e-5),
    torch.bfloat16: ("bf16", 2.0**-7, 1e-4),
}
_LSE_ERROR = 1e-5


@dataclass(frozen=True)
class Size:
    """What is merged, and in which form it comes."""

    tokens: int
    heads: int = 32
    dim: int = 128
    partials: int = 2
    dtype: torch.dtype = torch.bfloat16
    stacked: bool = False

    @property
    def name(self) -> str:
        """What the case is called."""
        name = f"{self.tokens} x {self.heads} x {self.dim} {_DTYPES[self.dtype][0]}"
        name = f"{self.partials} of {name}" if self.partials > 2 else name
        return name + ", stacked" * self.stacked

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written: every partial, and the result."""
        row_bytes = self.dtype.itemsize * self.dim + 4
        return self.tokens * self.heads * (self.partials + 1) * row_bytes


@dataclass
class Buffers:
    """One working set. The separate partials lie in the stacked ones: memory is memory."""

    stacked: torch.Tensor  # [n, tokens, heads, dim]
    stacked_lse: torch.Tensor  # float32 [n, tokens, heads]
    out: torch.Tensor
    lse: torch.Tensor
    copied: torch.Tensor  # bytes, where the copy goes
    expected: tuple[torch.Tensor, torch.Tensor] | None = None  # float64
    # What an implementation needs of it besides: a graph reads it for as long as the buffers.
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outs, self.lses = self.stacked.unbind(), self.stacked_lse.unbind()


TOKENS = (1, 64, 256, 1024, 4096, 16_384)
MOST, MANY = TOKENS[-1], 8
OTHER_SIZES = (
    *(Size(MOST, dim=dim) for dim in (64, 96, 192, 256, 512, 576)),
    *(Size(MOST, heads=heads) for heads in (1, 8, 128)),
    Size(MOST, dtype=torch.float32),
    Size(MOST, dtype=torch.float16),
)


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        size = Size(256 if ctx.quick else 4096, dtype=torch.float32)
        impls = [Impl("torch", "peer", lambda: _torch_two)]
        yield from measure(ctx, _with(ctx, size, impls, "copy_ of as many bytes"))
        return
    tokens = TOKENS[::5] if ctx.quick else TOKENS
    for size in map(Size, tokens):
        yield from measure(ctx, _with(ctx, size, _peers_of_two()))
    for size in (Size(n, partials=MANY, stacked=form) for form in (False, True) for n in tokens):
        yield from measure(ctx, _with(ctx, size, _peers_of_many(size.stacked)))
    for size in () if ctx.quick else OTHER_SIZES:
        yield from measure(ctx, _with(ctx, size, []))
    with torch.inference_mode():
        for count in (2, MANY):
            yield from measure(ctx, _host_case(ctx, count))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    on_gpu = ctx.device == "cuda"
    for tokens in (64, MOST) if on_gpu else (8, 1024):
        yield case_of(ctx, Size(tokens, dtype=torch.bfloat16 if on_gpu else torch.float32))
    one = _buffers(ctx, Size(1))
    for name, rows in (("call, checks only", 0), ("call, 1 row", 1)):
        pairs = zip((*one.outs, one.out), (*one.lses, one.lse), strict=True)
        a, lse_a, b, lse_b, out, lse = (x[:rows] for pair in pairs for x in pair)
        call = partial(jitkern.merge_state, a, lse_a, b, lse_b, output=out, lse=lse)
        yield call_case("merge", name, call, (a, lse_a, b, lse_b, out, lse))


def _buffers(ctx: Context, size: Size) -> Buffers:
    """Return random partials and outputs for them."""
    shape = (size.partials, size.tokens, size.heads)
    stacked = torch.empty(*shape, size.dim, dtype=size.dtype, device=ctx.device).normal_()
    stacked_lse = 2 * torch.randn(shape, device=ctx.device)
    copied = size.bytes_moved // 32 * 16  # half is read, half written; by vectors of 16 bytes
    return Buffers(
        stacked,
        stacked_lse,
        torch.empty_like(stacked[0]),
        torch.empty_like(stacked_lse[0]),
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
            "stacked": size.stacked,
        },
        bytes_moved=moved,
        bytes_note="every partial read once, the result written once, with their sums",
        make=lambda _: _buffers(ctx, size),
        # Sums differ in their last places from one order to another: what is compared bit for bit
        # is whether they are close.
        outputs=lambda b: (torch.tensor([_is_close(b)], dtype=torch.uint8),),
        prepare=_poison,
        reference=lambda _: (torch.ones(1, dtype=torch.uint8),),
        impls=[
            Impl("jitkern", "ours", lambda: _ours(size)),
            copy_impl(
                ctx, lambda b: (b.copied, b.stacked.view(-1).view(torch.uint8)[: len(b.copied)])
            ),
        ],
        calls=4 if moved > 100_000_000 else 8 if moved > 10_000_000 else 50,
    )


def _with(ctx: Context, size: Size, others: list[Impl], copy: str = "copy kernel") -> Case:
    """Return the case with these peers, and for a small one the floor."""
    case = case_of(ctx, size)
    impls = [case.ours(), *others, replace(case.impls[1], name=copy)]
    if size.tokens <= 1024 and ctx.device == "cuda":
        empty = Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0)
        impls.append(empty)
    return replace(case, impls=impls)


def _host_case(ctx: Context, count: int) -> Case:
    """Return the case of what a call costs the host, beside a call that does nothing."""
    b = _buffers(ctx, Size(1, partials=count))
    tensors = [x for pair in zip(b.outs, b.lses, strict=True) for x in pair]
    call: Callable[..., object] = partial(jitkern.merge_states, b.outs, b.lses)
    if count == 2:
        call = partial(jitkern.merge_state, *tensors)
    case = call_case("merge", "", partial(call, output=b.out, lse=b.lse), (*tensors, b.out, b.lse))
    case.name = f"host time, {count} of 1 row"
    case.impls.insert(1, Impl("jitkern, new outputs", "ours", lambda: lambda _: call()))
    assert case.impls[2].name == NO_OP
    return case


def _is_close(b: Buffers) -> bool:
    """Say whether the outputs are what the partials give in float64, to about their last place."""
    if b.expected is None:
        b.expected = _merged(b)
    out, lse = b.expected
    _, relative, absolute = _DTYPES[b.out.dtype]
    return torch.allclose(b.out.double(), out, rtol=relative, atol=absolute) and torch.allclose(
        b.lse.double(), lse, rtol=_LSE_ERROR, atol=_LSE_ERROR
    )


def _merged(b: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the op means, in plain PyTorch."""
    lses = b.stacked_lse.double()
    lse = torch.logsumexp(lses, dim=0)
    out = torch.zeros(b.out.shape, dtype=torch.float64, device=b.out.device)
    for weight, partial_out in zip(torch.exp(lses - lse), b.outs, strict=True):
        out += weight.unsqueeze(-1) * partial_out.double()
    return out, lse


def _poison(b: Buffers) -> None:
    b.out.view(torch.uint8).fill_(0xFF)  # a NaN in every dtype
    b.lse.view(torch.uint8).fill_(0xFF)


# -- implementations -------------------------------------------------------------------------------


def _ours(size: Size) -> Run:
    def merge_two(b: Buffers) -> None:
        (out_a, out_b), (lse_a, lse_b) = b.outs, b.lses
        jitkern.merge_state(out_a, lse_a, out_b, lse_b, output=b.out, lse=b.lse)

    def merge_many(b: Buffers) -> None:
        outs, lses = (b.stacked, b.stacked_lse) if size.stacked else (b.outs, b.lses)
        jitkern.merge_states(outs, lses, output=b.out, lse=b.lse)

    return merge_two if size.partials == 2 and not size.stacked else merge_many


def _peers_of_two() -> list[Impl]:
    return [
        Impl("vLLM", "peer", lambda: partial(_two, peers.vllm_merge_state())),
        Impl("FlashInfer", "peer", _flashinfer_two),
        Impl("triton, two kernels", "peer", _two_kernels),
        Impl("triton, one kernel", "peer", _one_kernel),
        Impl("torch", "peer", lambda: _torch_two),
        Impl("torch, no graph", "peer", lambda: _torch_two, graph=False),
    ]


def _peers_of_many(stacked: bool) -> list[Impl]:
    if stacked:  # FlashInfer wants the partials of a token side by side: they are copied as well
        flashinfer, of_torch = "transposed, FlashInfer", "torch"
    else:
        flashinfer, of_torch = "torch.stack, FlashInfer", "torch.stack, torch"
    return [
        Impl(flashinfer, "peer", lambda: _flashinfer_many(stacked)),
        Impl(of_torch, "peer", lambda: partial(_torch_many, stacked=stacked)),
    ]


def _two(
    call: Callable[..., object], b: Buffers, lses: tuple[torch.Tensor, ...] | None = None
) -> None:
    lse_a, lse_b = lses or b.lses
    call(b.out, b.lse, b.outs[0], lse_a, b.outs[1], lse_b)


def _one_kernel() -> Run:
    return partial(_two, peers.merge_by_triton().one_kernel)


def _two_kernels() -> Run:
    merge = peers.merge_by_triton().two_kernels

    def run_merge(b: Buffers) -> None:
        if "weights" not in b.kept:
            b.kept["weights"] = torch.empty_like(b.stacked_lse)
        _two(partial(merge, weights=b.kept["weights"]), b)

    return run_merge


def _of_base_2(merge: Callable[[Buffers, torch.Tensor], object]) -> Run:
    """Give `merge` the sums in base 2; what it does first, which is checked, goes back to e."""

    def run_merge(b: Buffers) -> None:
        lses = b.kept.get("of base 2")
        if lses is not None:
            merge(b, lses)
            return
        b.kept["of base 2"] = b.stacked_lse / math.log(2)
        merge(b, b.kept["of base 2"])
        b.lse.mul_(math.log(2))

    return run_merge


def _flashinfer_two() -> Run:
    merge = peers.flashinfer_merge_state()
    return _of_base_2(lambda b, lses: _two(merge, b, lses.unbind()))


def _flashinfer_many(stacked: bool) -> Run:
    merge = peers.flashinfer_merge_states()

    def of_separate(b: Buffers, lses: torch.Tensor) -> None:
        merge(b.out, b.lse, torch.stack(b.outs, 1), torch.stack(lses.unbind(), 1))

    def of_stacked(b: Buffers, lses: torch.Tensor) -> None:
        merge(b.out, b.lse, *(x.transpose(0, 1).contiguous() for x in (b.stacked, lses)))

    return _of_base_2(of_stacked if stacked else of_separate)


def _torch_two(b: Buffers) -> None:
    """As it is usually written: four passes over what is large, and the small ones on the sums."""
    (out_a, out_b), (lse_a, lse_b) = b.outs, b.lses
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    merged = out_a * weight_a.unsqueeze(-1) + out_b * weight_b.unsqueeze(-1)
    torch.div(merged, total.unsqueeze(-1), out=b.out)
    torch.add(torch.log(total), top, out=b.lse)


def _torch_many(b: Buffers, stacked: bool) -> None:
    outs = b.stacked if stacked else torch.stack(b.outs)
    lses = b.stacked_lse if stacked else torch.stack(b.lses)
    top = lses.amax(0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    torch.div((outs * weights.unsqueeze(-1)).sum(0), total.unsqueeze(-1), out=b.out)
    torch.add(torch.log(total), top, out=b.lse)
