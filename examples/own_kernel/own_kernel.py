"""A kernel of your own: device code, its CPU version, and a function that launches it.

NVRTC compiles kernel.cu for each row size; the C++ compiler compiles kernel.cc, for tensors on the
CPU. The script compares both with PyTorch, shows the errors of wrong arguments, and with --warm
compiles for GPUs that this machine does not have:

    python examples/own_kernel/own_kernel.py
    python examples/own_kernel/own_kernel.py --warm 9.0,10.0

For an image that compiles nothing, record a run, and replay it when the image is built:

    JITKERN_RECORD=run.jsonl python examples/own_kernel/own_kernel.py --warm 9.0
    jitkern warm --replay run.jsonl --arch 9.0,10.0 --out kernels/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from jitkern import Arch, CompileError, DeviceModule, KernelConfig, load_jit, make_cpp_args

FOLDER = Path(__file__).resolve().parent
CONFIG = KernelConfig(num_threads=256, max_occupancy=4, use_pdl=True)
NUM_BLOCKS = 132 * CONFIG.max_occupancy  # fills the SMs of an H200


@cache
def kernel(dim: int) -> DeviceModule:
    """Return the kernel for rows of `dim` values; the first launch compiles it."""
    args = make_cpp_args(dim, *CONFIG)
    # jitkern does not map `signed char` to a dtype; the declaration names the dtypes to check.
    params = "int8* x, float* scale, float* out, int64 rows"
    return load_jit(
        "dequantise",
        *args,
        device_files=[str(FOLDER / "kernel.cu")],
        device_wrappers=[("dequantise", f"Dequantise<{args}>", params)],
        cpp_files=[str(FOLDER / "kernel.cc")],
        cpp_wrappers=[("dequantise", f"dequantise_on_cpu<{dim}>")],
    )


def dequantise(x: Tensor, scale: Tensor) -> Tensor:
    """Return rows `[rows, dim]` of int8 times `[rows]` of float32, on the current stream."""
    rows, dim = x.shape
    if scale.shape != (rows,):  # a launch checks no shapes: kernels get pointers
        raise ValueError(f"dequantise: scale: shape {list(scale.shape)}, expected [{rows}]")
    out = torch.empty(rows, dim, device=x.device)
    args = (x, scale, out, rows)
    kernel(dim).launch("dequantise", *args, grid=NUM_BLOCKS, use_pdl=CONFIG.use_pdl)
    return out


def error_text(call: Callable[[], object]) -> str:
    """Return the first line of the error of a call that must fail."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    raise AssertionError("a wrong call went through")


def warm(dim: int, archs: Sequence[str]) -> None:
    """Compile for other GPUs, and show the error of a wrong template."""
    for arch in archs:
        code = kernel(dim).image(Arch.parse(arch))
        print(f"for {arch}: {len(code)} bytes of code")
    try:
        kernel(6).image(Arch.parse(archs[0]))
    except CompileError as error:
        lines = [line for line in error.log.splitlines() if "error" in line]
        print(f"rows of 6 values: {lines[0]}")
    else:
        raise AssertionError("rows of 6 values were compiled")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare with PyTorch; return 1 if a value is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--dim", type=int, default=576, help="values per row")
    parser.add_argument("--warm", metavar="A[,A]", help="compile for these GPUs as well: 9.0,10.0")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"compiling a kernel for rows of {args.dim}", flush=True)
    torch.manual_seed(0)
    x = torch.randint(-128, 128, (1000, args.dim), dtype=torch.int8, device=device)
    scale = torch.rand(1000, device=device)

    is_equal = torch.equal(dequantise(x, scale), x * scale.unsqueeze(1))
    print(f"1000 rows of {args.dim} on {device}: {'equal' if is_equal else 'DIFFERENT'}")
    print("errors of wrong calls:")
    print(error_text(lambda: dequantise(x.float(), scale)))
    print(error_text(lambda: dequantise(x[:, ::2], scale)))
    print(error_text(lambda: dequantise(x, scale[1:])))
    if args.warm:
        warm(args.dim, args.warm.split(","))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
