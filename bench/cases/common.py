"""What cases of several ops share: rows, implementations that are copies or floors, call costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row, Run
from bench.measure import measure
from jitkern.jit.device import DeviceModule

COPY, NO_OP = "copy of the same bytes", "no-op FFI call"
MEMCPY = "cudaMemcpyAsync, contiguous"
# (rows, bytes of a row) of the guard: in the L1, in the L2, in memory; on a GPU small and large.
CPU_SIZES = ((64, 656), (1024, 1024), (8192, 2048))
CUDA_SIZES = ((1024, 656), (131_072, 1024))
COPY_THREADS = 256


def empty_rows(rows: int, row_bytes: int, device: str, pin: bool = False) -> torch.Tensor:
    """Return uninitialised bfloat16 [rows, row_bytes / 2]."""
    return torch.empty(rows, row_bytes // 2, dtype=torch.bfloat16, device=device, pin_memory=pin)


def random_rows(rows: int, row_bytes: int, device: str, pin: bool = False) -> torch.Tensor:
    """Return random finite bfloat16 [rows, row_bytes / 2].

    Finite, because code that passes bfloat16 through float32 changes a NaN's bits.
    """
    words = empty_rows(rows, row_bytes, device, pin).view(torch.int16)
    return words.random_().bitwise_and_(~0x4000).view(torch.bfloat16)  # no top exponent bit


def sizes(ctx: Context) -> Sequence[tuple[int, int]]:
    return CUDA_SIZES if ctx.device == "cuda" else CPU_SIZES


# -- implementations -------------------------------------------------------------------------------


def ours(run: Run, name: str = "jitkern", **how: Any) -> Impl:
    return Impl(name, "ours", lambda: run, **how)


def peer(name: str, run: Run, **how: Any) -> Impl:
    return Impl(name, "peer", lambda: run, **how)


def ceiling(name: str, run: Run, **how: Any) -> Impl:
    return Impl(name, "ceiling", lambda: run, check=False, **how)


def empty_kernel() -> Impl:
    return Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0)


def memcpy(dst: Callable[[Any], Any], src: Callable[[Any], Any], num_bytes: int) -> Impl:
    """Return the copy engine's ceiling: so many bytes in one piece."""
    return ceiling(MEMCPY, lambda b: peers.host().copy_bytes(dst(b), src(b), num_bytes))


def copy_impl(ctx: Context, pair: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> Impl:
    """Return a contiguous copy; `pair` gives its destination and its source.

    On a GPU sizes are a multiple of 16 bytes, and may differ as in a conversion. What it reaches is
    the ceiling of this very machine.
    """

    def build() -> Run:
        if ctx.device == "cpu":
            return lambda buffers: torch.Tensor.copy_(*pair(buffers))
        module = copy_module()

        def copy(buffers: Any) -> None:
            dst, src = pair(buffers)
            vecs = dst.nbytes // 16, src.nbytes // 16
            module.launch("copy", dst, src, *vecs, grid=-(-min(vecs) // COPY_THREADS))

        return copy

    return Impl(COPY, "ceiling", build, check=False)


@cache
def copy_module() -> DeviceModule:
    return jitkern.load_jit(
        "copy",
        device_files=[Path(__file__).parents[1] / "copy.cu"],
        device_wrappers=[("copy", f"jitkern::CopyKernel<{COPY_THREADS}>")],
    )


def beside(
    ctx: Context,
    case: Case,
    peers: Sequence[Impl],
    copy: str = "copy kernel",
    is_small: bool = False,
) -> list[Row]:
    """Measure a case of the guard, jitkern and a copy, beside peers.

    On a GPU a small one also beside an empty kernel, and with a warm L2 cache.
    """
    on_gpu = ctx.device == "cuda"
    name = copy if on_gpu else "copy_ of as many bytes"
    impls = [case.ours(), *peers, replace(case.impls[1], name=name)]
    if not (is_small and on_gpu):
        return measure(ctx, replace(case, impls=impls))
    case = replace(case, impls=[*impls, empty_kernel()])
    warm = replace(case, name=f"{case.name}, warm", is_warm=True)
    return measure(ctx, case) + measure(ctx, warm)


# -- the guard's cases -----------------------------------------------------------------------------


def host_copy_case(
    ctx: Context, moved: int, run: Run, copy: Run | None = None, **fields: Any
) -> Case:
    """Return the guard's case of an op that moves bytes over the link; on the CPU, in memory.

    `copy` moves as many in one piece, by default from `src` to `dst` of the working set. `fields`
    are the other fields of the case.
    """

    def in_one_piece(b: Any) -> None:
        count = moved // b.dst.itemsize
        b.dst.view(-1)[:count].copy_(b.src.view(-1)[:count], non_blocking=True)

    return Case(
        impls=[ours(run), ceiling(COPY, copy or in_one_piece)],
        bytes_moved=moved if ctx.device == "cuda" else 2 * moved,  # read and written
        calls=3 if moved > 50_000_000 else 20,
        touched_bytes=moved,
        **fields,
    )


def no_op(arguments: Sequence[Any], name: str = NO_OP) -> Impl:
    """Return a call into C++ that does nothing: to hand tensors over is most of its time."""

    def build() -> Run:
        import tvm_ffi

        nop = tvm_ffi.get_global_func("testing.nop")
        return lambda _: nop(*arguments)

    return Impl(name, "floor", build, check=False, bytes_moved=0)


def call_case(op: str, name: str, call: Callable[[], object], arguments: Sequence[Any]) -> Case:
    """Return the case of what one call costs the host, beside one of as many tensors to C++."""
    return Case(op, name, [ours(lambda _: call(), check=False), no_op(arguments)], clock="host")


def call_cases(
    op: str, call: Callable[..., object], empty: Sequence[Any], one: Sequence[Any], **how: Any
) -> Iterator[Case]:
    """Yield what a call with these arguments costs the host: an empty one, and one of a row."""
    for name, arguments in (("call, checks only", empty), ("call, 1 row", one)):
        yield call_case(op, name, partial(call, *arguments, **how), arguments)
