"""What cases of several ops share: sizes, and the yardsticks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import jitkern
from jitkern.bench.case import Case, Context, Impl, Run
from jitkern.bench.timing import Call

if TYPE_CHECKING:
    import torch

    from jitkern.jit.device import DeviceModule

COPY, NO_OP = "copy of the same bytes", "no-op FFI call"
# (rows, bytes of a row): in the L1, in the L2, in memory; on a GPU a small and a large call.
CPU_SIZES = ((64, 656), (1024, 1024), (8192, 2048))
CUDA_SIZES = ((1024, 656), (131_072, 1024))
COPY_THREADS = 256


def sizes(ctx: Context) -> Sequence[tuple[int, int]]:
    """Return (rows, bytes of a row) of the copies that are timed on this device."""
    return CUDA_SIZES if ctx.device == "cuda" else CPU_SIZES


def copy_impl(ctx: Context, pair: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> Impl:
    """Return a contiguous copy; `pair` gives its destination and its source."""

    def build() -> Run:
        copy = copy_kernel() if ctx.device == "cuda" else _copy_
        return lambda buffers: copy(*pair(buffers))

    return Impl(COPY, "ceiling", build, check=False)


def _copy_(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


def copy_kernel() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return ``copy(dst, src)``: contiguous CUDA tensors of equal size, a multiple of 16 bytes.

    What it reaches is the ceiling of this very machine.
    """
    module = copy_module()

    def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        vecs, rest = divmod(src.numel() * src.element_size(), 16)
        if rest or dst.numel() * dst.element_size() != vecs * 16:
            raise ValueError("copy_kernel: dst, src: expected equal sizes, multiples of 16 bytes")
        blocks = -(-vecs // COPY_THREADS)
        module.launch("copy", dst, src, vecs, grid=blocks)

    return copy


@cache
def copy_module() -> DeviceModule:
    """Return the kernel of :func:`copy_kernel`, for blocks of ``COPY_THREADS``."""
    return jitkern.load_jit(
        "copy",
        device_files=["jitkern:perf/copy.cu"],
        device_wrappers=[("copy", f"jitkern::CopyKernel<{COPY_THREADS}>")],
    )


def host_copy_case(
    ctx: Context, moved: int, ours: Run, copy: Run, note: str = "over the link", **fields: Any
) -> Case:
    """Return the case of an op that moves bytes over the link to a GPU; on the CPU, in memory.

    `copy` moves as many in one piece. `note` says what is counted on a GPU; `fields` are the other
    fields of the case.
    """
    on_gpu = ctx.device == "cuda"
    return Case(
        impls=[
            Impl("jitkern", "ours", lambda: ours),
            Impl(COPY, "ceiling", lambda: copy, check=False),
        ],
        bytes_moved=moved if on_gpu else 2 * moved,
        bytes_note=note if on_gpu else "read and written",
        calls=3 if moved > 50_000_000 else 20,
        touched_bytes=moved,
        **fields,
    )


def call_case(op: str, name: str, call: Call, arguments: Sequence[Any]) -> Case:
    """Return the case of what one call costs the host, beside a call into C++ that does nothing.

    The no-op gets `arguments`, as many tensors as the op: to hand them over is most of its time.
    """

    def no_op() -> Run:
        import tvm_ffi

        nop = tvm_ffi.get_global_func("testing.nop")
        return lambda _: nop(*arguments)

    impls = [
        Impl("jitkern", "ours", lambda: lambda _: call(), check=False),
        Impl(NO_OP, "floor", no_op, check=False),
    ]
    return Case(op, name, impls, clock="host")
