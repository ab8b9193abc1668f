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


# An op, its call, where that writes, what PyTorch does instead, its call, where that writes.
Case = tuple[str, Callable[[], Any], "Tensor", str, Callable[[], Any], "Tensor"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the demo has no options."""


def run(args: argparse.Namespace) -> int:
    """Print the tables; raise JitkernError if a result differs or the GPU could not be used."""
    del args
    ui.require_torch()
    import torch

    start = time.perf_counter()
    has_gpu = torch.cuda.is_available()
    missing: ToolchainError | None = None
    ui.say(f"jitkern {jitkern.__version__}, torch {torch.__version__}")
    try:
        wrong = _compare("cuda", torch.cuda.get_device_name()) if has_gpu else None
    except ToolchainError as error:
        wrong, missing = None, error
    if wrong is None:
        wrong = _compare("cpu", f"{torch.get_num_threads()} CPU threads")
    if not has_gpu:
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
    """Print a line for each op; return the ops whose results differ."""
    import torch

    from jitkern.perf import perf_cpu, perf_cuda

    # No graph: PyTorch's gather waits for the host.
    ms = perf_cpu if device == "cpu" else partial(perf_cuda, cuda_graph_repetitions=None)
    rows, wrong = [], []
    for op, ours, output, peer, theirs, expected in _cases(device):
        ours()
        theirs()
        is_right = torch.equal(output, expected)
        wrong += [] if is_right else [op]
        ours_ms, theirs_ms = ms(ours), ms(theirs)
        what = f"{_ROWS[device][op]:,} of {_ROW_BYTES[op]} B"
        gb_s = f"{2 * output.nbytes / ours_ms / 1e6:,.1f}"  # read once, written once
        cells = [op, what, "ok" if is_right else "failed", ui.ms_text(ours_ms), gb_s]
        rows.append([*cells, peer, ui.ms_text(theirs_ms), f"{theirs_ms / ours_ms:.2f}x"])
    jitkern.check(device)
    columns = ("op", "rows", "bits", ">ms", ">GB/s", "PyTorch", ">its ms", ">ratio")
    ui.say(f"\n{name}\n{ui.table(columns, rows)}\n")
    return wrong


def _cases(device: str) -> Iterator[Case]:
    import torch

    torch.manual_seed(0)

    def random(op: str, on: str = device) -> Tensor:
        shape = (_ROWS[device][op], _ROW_BYTES[op])
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


def _compile() -> None:
    """Compile the kernels for GPUs that are not here, and show how long that takes."""
    start = time.perf_counter()
    found = [jitkern.warm([op], [size], SUPPORTED_ARCHS) for op, size in _ROW_BYTES.items()]
    sources = [one.source for some in found for one in some if one.arch and one.source != "memo"]
    archs, took_s = ", ".join(map(str, SUPPORTED_ARCHS)), time.perf_counter() - start
    ui.say(f"{len(sources)} CUDA kernels for {archs} in {took_s:.1f} s,")
    ui.say(f"{sources.count('compiled')} compiled, without a GPU or a CUDA toolkit")
