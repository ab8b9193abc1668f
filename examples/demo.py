"""Three ops on real tensors, compared bit by bit with PyTorch, and timed; `make demo` runs this.

It uses the GPU if there is one, else the CPU, and then compiles the CUDA kernels for four archs.
Without NVRTC it uses the CPU and says what to install: an error if there is a GPU.

    python examples/demo.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import jitkern
from jitkern import ToolchainError, perf_cpu, perf_cuda

ARCHS = ("8.0", "9.0", "10.0", "12.0")
# 656 bytes: a token of a latent KV cache with its scales; no multiple of 128.
ROW_BYTES = {"store_cache": 656, "indexing": 8192, "h2d_gather": 656}
ROWS = {
    "cuda": {"store_cache": 131_072, "indexing": 65_536, "h2d_gather": 262_144},
    "cpu": {"store_cache": 8192, "indexing": 4096, "h2d_gather": 8192},
}
LINE = "{:12}{:>17}  {:6}{:>7}{:>8}  {:24}{:>7}{:>8}"

# Name, call and output of an op; the same of PyTorch.
Case = tuple[str, Callable[[], Any], Tensor, str, Callable[[], Any], Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    start = time.perf_counter()
    wrong: list[str] | None = None
    missing: ToolchainError | None = None
    print(f"jitkern {jitkern.__version__}, torch {torch.__version__}", flush=True)
    if torch.cuda.is_available():
        try:
            wrong = compare("cuda", torch.cuda.get_device_name())
        except ToolchainError as error:
            missing = error
    if wrong is None:
        wrong = compare("cpu", f"{torch.get_num_threads()} CPU threads")
    if not torch.cuda.is_available():
        try:
            compile_kernels()
        except ToolchainError as error:
            print(f"CUDA kernels were not compiled: {error}")
    print(f"{time.perf_counter() - start:.1f} s in all")
    if wrong:
        print(f"{', '.join(wrong)}: the result differs from PyTorch's", file=sys.stderr)
    if missing is not None:
        print(f"the GPU was not used: {missing}", file=sys.stderr)
    return int(bool(wrong) or missing is not None)


def compare(device: str, name: str) -> list[str]:
    """Print a line for each op; return the ops whose results differ."""
    # No graph: PyTorch's gather waits for the host.
    ms = perf_cpu if device == "cpu" else partial(perf_cuda, cuda_graph_repetitions=None)
    print(f"\n{name}")
    print(LINE.format("op", "rows", "bits", "ms", "GB/s", "PyTorch", "its ms", "ratio"))
    wrong = []
    for op, ours, output, peer, theirs, expected in cases(device):
        ours()
        theirs()
        is_right = torch.equal(output, expected)
        if not is_right:
            wrong.append(op)
        ours_ms, theirs_ms = ms(ours), ms(theirs)
        rows = f"{ROWS[device][op]:,} of {ROW_BYTES[op]} B"
        bits = "ok" if is_right else "failed"
        gb_s = f"{2 * output.nbytes / ours_ms / 1e6:,.1f}"  # read once, written once
        ratio = f"{theirs_ms / ours_ms:.2f}x"
        print(LINE.format(op, rows, bits, f"{ours_ms:.2f}", gb_s, peer, f"{theirs_ms:.2f}", ratio))
    jitkern.check(device)
    print()
    return wrong


def cases(device: str) -> Iterator[Case]:
    torch.manual_seed(0)

    def random(op: str, on: str = device) -> Tensor:
        shape = (ROWS[device][op], ROW_BYTES[op])
        return torch.randint(256, shape, dtype=torch.uint8, device=on)

    k, v = random("store_cache"), random("store_cache")
    slots = torch.randperm(len(k), device=device)
    caches, expected = torch.zeros(2, 2, *k.shape, dtype=k.dtype, device=device)

    def assign() -> None:
        expected[0][slots] = k
        expected[1][slots] = v

    store = partial(jitkern.store_cache, caches[0], caches[1], slots, k, v)
    yield "store_cache", store, caches, "cache[slots] = x, twice", assign, expected

    table = random("indexing")
    indices = torch.randint(len(table), (len(table),), device=device)
    out, expected_out = torch.zeros_like(table), torch.zeros_like(table)
    look_up = partial(jitkern.indexing, table, indices, output=out)
    select = partial(torch.index_select, table, 0, indices, out=expected_out)
    yield "indexing", look_up, out, "index_select", select, expected_out

    src = random("h2d_gather", "cpu")
    src = src.pin_memory() if device == "cuda" else src
    dst, expected_dst = torch.zeros(2, *src.shape, dtype=src.dtype, device=device)
    pairs = torch.stack([torch.randperm(len(src)) for _ in range(2)], dim=1).to(device)

    def gather() -> None:
        expected_dst[pairs[:, 1]] = src[pairs[:, 0].cpu()].to(device)

    fetch = partial(jitkern.h2d_gather, src, dst, pairs)
    yield "h2d_gather", fetch, dst, "dst[slots] = src[rows]", gather, expected_dst


def compile_kernels() -> None:
    """Compile the kernels for GPUs that this machine does not have, and print the time."""
    start = time.perf_counter()
    jobs = [job for op, size in ROW_BYTES.items() for job in jitkern.warm([op], [size], ARCHS)]
    sources = [job.source for job in jobs if job.arch and job.source != "memo"]
    took_s = time.perf_counter() - start
    print(f"{len(sources)} CUDA kernels for {', '.join(ARCHS)} in {took_s:.1f} s,")
    print(f"{sources.count('compiled')} compiled, without a GPU or a CUDA toolkit")


if __name__ == "__main__":
    sys.exit(main())
