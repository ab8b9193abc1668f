"""``jitkern demo``: the ops on real tensors, compared bit by bit with PyTorch, and timed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jitkern
from jitkern.arch import SUPPORTED_ARCHS
from jitkern.cli import ui
from jitkern.errors import JitkernError, ToolchainError

if TYPE_CHECKING:
    from torch import Tensor

SUMMARY = "run the ops on real tensors against PyTorch"
DESCRIPTION = """\
Run three ops on real tensors, compare every bit with PyTorch, and show time, bandwidth and ratio.
On the GPU if there is one. Otherwise on the CPU, and the CUDA kernels are compiled for four archs.
Without NVRTC it runs on the CPU and names what is missing: an error if there is a GPU."""
EXAMPLE = "jitkern demo"

# 656: one token's row of a latent KV cache with its scales, no multiple of 128.
_ROW_BYTES = {"store_cache": 656, "indexing": 8192, "h2d_gather": 656}
_ROWS = {
    "cuda": {"store_cache": 131_072, "indexing": 65_536, "h2d_gather": 262_144},
    "cpu": {"store_cache": 8192, "indexing": 4096, "h2d_gather": 8192},
}

Call = Callable[[], Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the demo has no options."""


def run(args: argparse.Namespace) -> int:
    """Print the tables; raise JitkernError if a result differs or the GPU could not be used."""
    del args
    ui.require_torch()
    import torch

    start = time.perf_counter()
    missing: ToolchainError | None = None
    ui.say(f"jitkern {jitkern.__version__}, torch {torch.__version__}")
    if torch.cuda.is_available():
        try:
            wrong = _compare("cuda", torch.cuda.get_device_name())
        except ToolchainError as error:
            missing = error
    if not torch.cuda.is_available() or missing is not None:
        wrong = _compare("cpu", f"{torch.get_num_threads()} CPU threads")
    if not torch.cuda.is_available():
        try:
            _compile()
        except ToolchainError as error:
            ui.say(f"CUDA kernels were not compiled: {error}")
    ui.say(f"{time.perf_counter() - start:.1f} s in all")
    if wrong:
        raise JitkernError(f"demo: {', '.join(wrong)}: the result differs from PyTorch's")
    if missing is not None:
        raise missing
    return 0


def _compare(device: str, name: str) -> list[str]:
    """Print one line per op; return the ops whose results differ."""
    import torch

    from jitkern.perf import perf_cpu, perf_cuda

    # No graph: PyTorch's gather waits for the host.
    ms = perf_cpu if device == "cpu" else partial(perf_cuda, cuda_graph_repetitions=None)
    rows, wrong = [], []
    for op, output, expected, num_bytes, ours, peer, theirs in _cases(device):
        ours()
        theirs()
        is_right = torch.equal(output, expected)
        wrong += [] if is_right else [op]
        ours_ms, theirs_ms = ms(ours), ms(theirs)
        what = f"{output.numel() // _ROW_BYTES[op]:,} of {_ROW_BYTES[op]} B"
        cells = [op, what, "ok" if is_right else "failed", ui.ms_text(ours_ms)]
        cells += [f"{num_bytes / ours_ms / 1e6:,.1f}", peer, ui.ms_text(theirs_ms)]
        rows.append([*cells, f"{theirs_ms / ours_ms:.2f}x"])
    jitkern.check(device)
    columns = ("op", "rows", "bits", ">ms", ">GB/s", "PyTorch", ">its ms", ">ratio")
    ui.say(f"\n{name}")
    ui.console().print(ui.table(columns, rows))
    ui.say("")
    return wrong


def _cases(device: str) -> Iterator[tuple[str, Tensor, Tensor, int, Call, str, Call]]:
    """Yield op, output, expected output, bytes, our call, PyTorch's by name, PyTorch's call."""
    import torch

    torch.manual_seed(0)

    def random(op: str, count: int, on: str = device) -> Tensor:
        return torch.randint(256, (count, _ROW_BYTES[op]), dtype=torch.uint8, device=on)

    count = _ROWS[device]["store_cache"]
    k, v = random("store_cache", count), random("store_cache", count)
    slots = torch.randperm(count, device=device)
    caches, expected = torch.zeros(2, 2, *k.shape, dtype=k.dtype, device=device)

    def assign() -> None:
        expected[0][slots] = k
        expected[1][slots] = v

    def store() -> None:
        jitkern.store_cache(caches[0], caches[1], slots, k, v)

    yield "store_cache", caches, expected, 4 * k.nbytes, store, "cache[slots] = x, twice", assign

    count = _ROWS[device]["indexing"]
    table, indices = random("indexing", count), torch.randint(count, (count,), device=device)
    out, expected_out = torch.zeros_like(table), torch.zeros_like(table)

    def look_up() -> None:
        jitkern.indexing(table, indices, output=out)

    def select() -> None:
        torch.index_select(table, 0, indices, out=expected_out)

    yield "indexing", out, expected_out, 2 * table.nbytes, look_up, "index_select", select

    count = _ROWS[device]["h2d_gather"]
    src = random("h2d_gather", count, "cpu")
    src = src.pin_memory() if device == "cuda" else src
    dst, expected_dst = torch.zeros(2, *src.shape, dtype=src.dtype, device=device)
    pairs = torch.stack([torch.randperm(count), torch.randperm(count)], dim=1).to(device)

    def fetch() -> None:
        jitkern.h2d_gather(src, dst, pairs)

    def gather() -> None:
        expected_dst[pairs[:, 1]] = src[pairs[:, 0].cpu()].to(device)

    yield "h2d_gather", dst, expected_dst, 2 * src.nbytes, fetch, "dst[slots] = src[rows]", gather


def _compile() -> None:
    """Compile the kernels for GPUs that are not here, and show how long that takes."""
    start = time.perf_counter()
    kernels = [
        one
        for op, row_bytes in _ROW_BYTES.items()
        for one in jitkern.warm([op], [row_bytes], SUPPORTED_ARCHS)
        if one.arch and one.source != "memo"
    ]
    took_s = time.perf_counter() - start
    num_compiled = sum(one.source == "compiled" for one in kernels)
    archs = ", ".join(map(str, SUPPORTED_ARCHS))
    ui.say(f"{len(kernels)} CUDA kernels for {archs} in {took_s:.1f} s, {num_compiled} compiled,")
    ui.say("without a GPU or a CUDA toolkit")
