"""``jitkern demo``: the ops on real tensors, checked bit for bit against PyTorch, and timed."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jitkern
from jitkern.arch import SUPPORTED_ARCHS
from jitkern.cli import ui
from jitkern.errors import JitkernError, ToolchainError
from jitkern.ops._ops import OPS

if TYPE_CHECKING:
    from jitkern.bench.case import Case, Context

SUMMARY = "run the ops on real tensors against PyTorch"
DESCRIPTION = """\
Run three of the ops on real tensors, check every bit against PyTorch, and show time, bandwidth and
ratio. On the GPU if there is one; else on the CPU, and the CUDA kernels are compiled for four
archs all the same. Without NVRTC it runs on the CPU and says what is missing, which is an error
where there is a GPU."""
EXAMPLE = "jitkern demo"

# 656: one token's row of a latent KV cache with its scales, no multiple of 128.
_ROW_BYTES = {"store": 656, "index": 8192, "h2d_gather": 656}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the demo is the same everywhere."""


def run(args: argparse.Namespace) -> int:
    """Print the tables; raise JitkernError if a result differs or the GPU could not be used."""
    del args
    ui.require_torch()
    import torch

    from jitkern.bench.case import Context

    start = time.perf_counter()
    has_gpu = torch.cuda.is_available()
    missing = _missing_on_gpu() if has_gpu else None
    gpu = has_gpu and missing is None
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} CPU threads"
    ui.say(f"jitkern {jitkern.__version__}, torch {torch.__version__}, {name}\n")
    wrong = _compare(Context("cuda" if gpu else "cpu", quick=True))
    if not has_gpu:
        ui.say("")
        try:
            _compile()
        except ToolchainError as error:
            ui.say(f"CUDA kernels were not compiled: {error}")
    ui.say(f"\n{time.perf_counter() - start:.1f} s in all")
    if wrong:
        raise JitkernError(f"demo: {'; '.join(wrong)}")
    if missing is not None:
        raise missing
    return 0


def _missing_on_gpu() -> ToolchainError | None:
    """Return what a call on the GPU lacks, if anything: a kernel of a cache will do."""
    import torch

    table = torch.zeros(1, _ROW_BYTES["index"], dtype=torch.uint8, device="cuda")
    try:
        jitkern.indexing(table, torch.zeros(1, dtype=torch.int64, device="cuda"))
    except ToolchainError as error:
        return error
    return None


def _compare(ctx: Context) -> list[str]:
    """Print one line a case; say of which ops the result is wrong."""
    from jitkern.bench.measure import measure

    functions = {op.stem: op.function for op in OPS}
    rows = []
    wrong = []
    for case in _cases(ctx):
        op = functions[case.op]
        ours, theirs = measure(ctx, case)
        errors = [f"{op}: {row.error}" for row in (ours, theirs) if row.error]
        wrong += errors
        # What is wrong is not timed.
        ours_ms, theirs_ms = ((row.median_us or math.nan) / 1e3 for row in (ours, theirs))
        rows.append(
            (
                op,
                case.name,
                "failed" if errors else "ok",
                ui.ms_text(ours_ms),
                f"{case.bytes_moved / ours_ms / 1e6:,.1f}",
                theirs.impl,
                ui.ms_text(theirs_ms),
                f"{theirs_ms / ours_ms:.2f}x",
            )
        )
    jitkern.check(ctx.device)
    columns = ("op", "what", "bits", ">ms", ">GB/s", "PyTorch", ">its ms", ">ratio")
    ui.console().print(ui.table(columns, rows))
    return wrong


def _cases(ctx: Context) -> Iterator[Case]:
    """Yield large cases of the benchmarks, each beside PyTorch."""
    import torch

    from jitkern.bench.case import Impl
    from jitkern.bench.cases import index, pair_ops, store

    def beside(case: Case, name: str, them: Callable[[Any], object], graph: bool = True) -> Case:
        return replace(case, impls=[case.ours(), Impl(name, "peer", lambda: them, graph=graph)])

    def assign(b: store.Buffers) -> None:
        b.k_cache[b.indices64] = b.k
        b.v_cache[b.indices64] = b.v

    def select(b: index.Buffers) -> None:
        torch.index_select(b.weights, 0, b.indices64, out=b.output)

    def gather(b: pair_ops.Buffers) -> None:
        rows, slots = b.pairs.long().unbind(1)
        b.dst[slots] = b.src[rows.to(b.src.device)].to(b.dst.device)

    gpu = ctx.device == "cuda"
    num_rows, row_bytes = 131_072 if gpu else 8192, _ROW_BYTES["store"]
    case = store.case_of(ctx, row_bytes, num_rows)
    case.name = f"K and V, {case.name}"
    yield beside(case, "cache[slots] = x, twice", assign)
    size = index.Size(_ROW_BYTES["index"], 65_536 if gpu else 4096)
    yield beside(index.case_of(ctx, size), "index_select", select)
    num_rows, row_bytes = 262_144 if gpu else 8192, _ROW_BYTES["h2d_gather"]
    case = pair_ops.case_of(ctx, "h2d_gather", jitkern.h2d_gather, ctx.device, num_rows, row_bytes)
    # What waits for the host, as a gather on the CPU does, no graph can hold.
    name = "dst[slots] = src[rows].to(device)" if gpu else "dst[slots] = src[rows]"
    yield beside(case, name, gather, graph=False)


def _compile() -> None:
    """Compile the kernels of the demo for GPUs that are not here, and show how long it takes."""
    from jitkern.warming import build_missing, default_threads, look_all, op_jobs

    start = time.perf_counter()
    jobs = op_jobs(_ROW_BYTES.items(), SUPPORTED_ARCHS)
    threads = default_threads()
    outcomes = build_missing(look_all(jobs, threads), threads)
    took_s = time.perf_counter() - start

    by_kernel: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        ms = "" if outcome.lookup is None else f"{ui.ms_text(outcome.lookup.ms)} ms"
        cell = ms if outcome.source == "compiled" else f"{outcome.source} {ms}".rstrip()
        by_kernel.setdefault((outcome.job.name, outcome.job.parameters), []).append(cell)
    columns = ("CUDA kernel", "parameters", *(f">{arch}" for arch in SUPPORTED_ARCHS))
    lines = [(*kernel, *cells) for kernel, cells in by_kernel.items()]
    ui.console().print(ui.table(columns, lines))
    ui.say(f"{len(outcomes)} kernels in {took_s:.1f} s: no GPU, no CUDA toolkit")
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
