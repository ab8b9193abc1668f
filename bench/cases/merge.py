"""merge: two partial results of attention into one, and eight, by tokens; other forms by a copy.

A peer whose code is others' is found where ``bench.peers.ELSEWHERE`` says. FlashInfer's sums are of
base 2: they are made before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.goals import Figures, Goal, at_least, at_most
from jitkern.bench.case import Case, Context, Impl, Row, Run, error_row
from jitkern.bench.cases.common import NO_OP, copy_impl
from jitkern.bench.cases.merge import FP8, Buffers, Size, buffers, copy_pair
from jitkern.bench.cases.merge import case_of as guarded
from jitkern.bench.measure import fill, host_us_of, measure

PEERS = (
    peers.vllm_merge_state,
    peers.flashinfer_merge_state,
    peers.flashinfer_merge_states,
    peers.merge_by_triton,
)
PLOTS = ("of the copy",)

TOKENS = (1, 64, 256, 1024, 4096, 16_384)
QUICK_TOKENS = (1, 1024, 16_384)
MOST = TOKENS[-1]
SMALL_TOKENS = 1024
MANY = 8
CPU_SIZE = Size(4096, dtype=torch.float32)
OTHER_SIZES = (
    *(Size(MOST, dim=dim) for dim in (64, 96, 192, 256, 512, 576)),
    *(Size(MOST, heads=heads) for heads in (1, 8, 128)),
    Size(MOST, by_heads=True),
)
OTHER_DTYPES = (
    Size(MOST, out_dtype=FP8),
    Size(MOST, dtype=torch.float32),
    Size(MOST, dtype=torch.float16),
)
FEW_VALID = Size(MOST, partials=MANY, num_valid=2)

COPY, EMPTY = "copy kernel", "empty kernel"
VLLM, FLASHINFER = "vLLM", "FlashInfer"
TWO_KERNELS, ONE_KERNEL = "triton, two kernels", "triton, one kernel"
TORCH, TORCH_PLAIN = "torch", "torch, no graph"
ONLY_TWO = "jitkern, merge of these two"
CALLS = 400
MOST_HOST_US = {2: 5.0, MANY: 8.0}
OF_VLLM = {1: 0.88, 64: 0.78, 256: 0.87, 1024: 0.84}


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        case = guarded(ctx, Size(256, dtype=torch.float32) if ctx.quick else CPU_SIZE)
        copied = replace(copy_impl(ctx, copy_pair), name="copy_ of as many bytes")
        yield from measure(
            ctx, replace(case, impls=[case.ours(), Impl(TORCH, "peer", lambda: _torch_two), copied])
        )
        return
    tokens = QUICK_TOKENS if ctx.quick else TOKENS
    for size in map(Size, tokens):
        yield from measure(ctx, case_of(ctx, size, _peers_of_two()))
    for size in (Size(n, partials=MANY, stacked=form) for form in (False, True) for n in tokens):
        yield from measure(ctx, case_of(ctx, size, _peers_of_many(size.stacked)))
    for size in () if ctx.quick else (*OTHER_SIZES, *OTHER_DTYPES):
        yield from measure(ctx, case_of(ctx, size, []))
    yield from measure(ctx, case_of(ctx, FEW_VALID, [Impl(ONLY_TWO, "peer", lambda: _only_two)]))
    with torch.inference_mode():
        yield from _host_rows(ctx)


def goals(f: Figures) -> Iterator[Goal]:
    yield from _goals_of_two(f)
    yield from _goals_of_many(f)
    for size in OTHER_SIZES:
        name = f"merge, {size.name}: of {COPY}"
        yield from at_least(name, f.speed("merge", size.name, "jitkern", COPY), 0.92)
    for count, most in MOST_HOST_US.items():
        yield from at_most(
            f"merge of {count}, host time of a call",
            f.us("merge", _host_case(count), "jitkern"),
            most,
            "us",
        )
    got = f.speed("merge", CPU_SIZE.name, "jitkern", TORCH)
    yield from at_least(f"merge on the CPU, {CPU_SIZE.name}: of {TORCH}", got, 4.0)


def _goals_of_two(f: Figures) -> Iterator[Goal]:
    largest = Size(MOST).name
    for other, wanted in ((COPY, 0.98), (TORCH, 4.3), (TWO_KERNELS, 1.5)):
        got = f.speed("merge", largest, "jitkern", other)
        yield from at_least(f"merge, {largest}: of {other}", got, wanted)
    for tokens in TOKENS:
        name = Size(tokens).name
        for other in (VLLM, FLASHINFER):
            got = f.speed("merge", name, "jitkern", other)
            yield from at_least(f"merge, {name}: of {other}", got, 1.0)
        us, theirs = f.us("merge", name, "jitkern"), f.us("merge", name, VLLM)
        if us is not None and theirs is not None and tokens in OF_VLLM:
            yield from at_most(f"merge, {name}: time, of {VLLM}'s", us / theirs, OF_VLLM[tokens])


def _goals_of_many(f: Figures) -> Iterator[Goal]:
    name = Size(MOST, partials=MANY).name
    yield from at_least(f"merge, {name}: of {COPY}", f.speed("merge", name, "jitkern", COPY), 0.98)
    # The better of the two, which is the stricter; without FlashInfer's sources it is torch alone.
    others = [f.speed("merge", name, "jitkern", other) for other in _stacked_first()]
    got = min((one for one in others if one is not None), default=None)
    yield from at_least(f"merge, {name}: of the better after torch.stack", got, 3.0)


def case_of(ctx: Context, size: Size, others: list[Impl]) -> Case:
    """Return the guard's case with these peers, the ceiling and for a small one the floor."""
    case = guarded(ctx, size)
    impls = [case.ours(), *others, replace(copy_impl(ctx, copy_pair), name=COPY)]
    if size.tokens <= SMALL_TOKENS:
        impls.append(Impl(EMPTY, "floor", peers.empty_launch, check=False, bytes_moved=0))
    return replace(case, impls=impls)


def _stacked_first() -> tuple[str, str]:
    return f"torch.stack, {FLASHINFER}", "torch.stack, torch"


def _peers_of_two() -> list[Impl]:
    return [
        Impl(VLLM, "peer", _vllm),
        Impl(FLASHINFER, "peer", _flashinfer_two),
        Impl(TWO_KERNELS, "peer", _two_kernels),
        Impl(ONE_KERNEL, "peer", _one_kernel),
        Impl(TORCH, "peer", lambda: _torch_two),
        Impl(TORCH_PLAIN, "peer", lambda: _torch_two, graph=False),
    ]


def _peers_of_many(stacked: bool) -> list[Impl]:
    flashinfer, of_torch = _stacked_first()
    if stacked:  # FlashInfer wants the partials of a token side by side: they are copied as well
        flashinfer, of_torch = f"transposed, {FLASHINFER}", TORCH
    return [
        Impl(flashinfer, "peer", lambda: _flashinfer_many(stacked)),
        Impl(of_torch, "peer", lambda: _torch_stacked if stacked else _torch_many),
    ]


def _two(call: Callable[..., object], b: Buffers, lses: tuple[torch.Tensor, ...]) -> None:
    call(b.out, b.lse, b.outs[0], lses[0], b.outs[1], lses[1])


def _vllm() -> Run:
    merge = peers.vllm_merge_state()
    return lambda b: _two(merge, b, b.lses)


def _two_kernels() -> Run:
    merge = peers.merge_by_triton().two_kernels

    def run_merge(b: Buffers) -> None:
        if "weights" not in b.kept:
            b.kept["weights"] = torch.empty_like(b.stacked_lse)
        _two(partial(merge, weights=b.kept["weights"]), b, b.lses)

    return run_merge


def _one_kernel() -> Run:
    merge = peers.merge_by_triton().one_kernel
    return lambda b: _two(merge, b, b.lses)


def _of_base_2(merge: Callable[[Buffers, torch.Tensor], object]) -> Run:
    """Give `merge` the sums in base 2; what it does first with some buffers, which is checked, is
    brought back to base e."""

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
    return _of_base_2(lambda b, lses: _two(merge, b, (lses[0], lses[1])))


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


def _torch_many(b: Buffers) -> None:
    _torch_of(b, torch.stack(b.outs), torch.stack(b.lses))


def _torch_stacked(b: Buffers) -> None:
    _torch_of(b, b.stacked, b.stacked_lse)


def _torch_of(b: Buffers, outs: torch.Tensor, lses: torch.Tensor) -> None:
    top = lses.amax(0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    torch.div((outs * weights.unsqueeze(-1)).sum(0), total.unsqueeze(-1), out=b.out)
    torch.add(torch.log(total), top, out=b.lse)


def _only_two(b: Buffers) -> None:
    jitkern.merge_state(b.outs[0], b.lses[0], b.outs[1], b.lses[1], out=b.out, lse=b.lse)


def _host_case(count: int) -> str:
    return f"host time, {count} of 1 row"


def _host_rows(ctx: Context) -> Iterator[Row]:
    """Yield what a call costs the host, beside a call into C++ that does nothing."""
    import tvm_ffi

    nop = tvm_ffi.get_global_func("testing.nop")
    for count in MOST_HOST_US:
        b = buffers(ctx, Size(1, partials=count))
        given: dict[str, Any] = {"out": b.out, "lse": b.lse}
        tensors = [x for pair in zip(b.outs, b.lses, strict=True) for x in pair]
        if count == 2:
            call: Callable[..., object] = partial(jitkern.merge_state, *tensors)
        else:
            call = partial(jitkern.merge_states, b.outs, b.lses)
        for name, role, timed in (
            ("jitkern", "ours", partial(call, **given)),
            ("jitkern, new outputs", "ours", call),
            (NO_OP, "floor", partial(nop, *tensors, b.out, b.lse)),
        ):
            row = Row("merge", _host_case(count), name, role)
            try:
                timing = host_us_of(timed, calls=CALLS, repeats=ctx.rounds, sync=ctx.sync)
            except Exception as error:  # a row, not the end of the run
                row.error = error_row("", "", "", "", error).error
            else:
                fill(row, timing)
                row.host_us = row.median_us
            yield row
