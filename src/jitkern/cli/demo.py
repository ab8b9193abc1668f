"""``jitkern demo``: the ops on real tensors, checked bit for bit against PyTorch, and timed."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jitkern
from jitkern.arch import SUPPORTED_ARCHS
from jitkern.cli import ui
from jitkern.errors import JitkernError, ToolchainError
from jitkern.ops._ops import OPS

if TYPE_CHECKING:
    from jitkern.bench.case import Case, Context
    from jitkern.bench.timing import Call

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
    """Yield large cases of three ops, each beside PyTorch."""
    import torch

    from jitkern.bench.case import Case, Impl

    device, gpu = ctx.device, ctx.device == "cuda"

    def rows_of(count: int, op: str, where: str = device) -> torch.Tensor:
        shape = (count, _ROW_BYTES[op])
        pin = gpu and where == "cpu"
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=where, pin_memory=pin)

    def numbers(count: int, below: int) -> torch.Tensor:
        return torch.randperm(below, device=device)[:count]

    def case(
        op: str,
        what: str,
        moved: int,
        out: Sequence[torch.Tensor],
        ours: Call,
        name: str,
        them: Call,
    ) -> Case:
        """Both write `out`; what PyTorch leaves there is the reference."""

        def reference(_: object) -> tuple[torch.Tensor, ...]:
            them()
            return tuple(tensor.clone() for tensor in out)

        impls = [
            Impl("jitkern", "ours", lambda: lambda _: ours()),
            # What waits for the host, as a gather on the CPU does, no graph can hold.
            Impl(name, "peer", lambda: lambda _: them(), graph=op != "h2d_gather"),
        ]
        return Case(
            op,
            what,
            impls,
            bytes_moved=moved,
            make=lambda _: None,
            outputs=lambda _: tuple(out),
            reference=reference,
        )

    count = 131_072 if gpu else 8192
    caches = [rows_of(2 * count, "store") for _ in range(2)]
    k, v = (rows_of(count, "store") for _ in range(2))
    slots = numbers(count, 2 * count)

    def assign() -> None:
        caches[0][slots] = k
        caches[1][slots] = v

    yield case(
        "store",
        f"K and V, {count} rows of {_ROW_BYTES['store']} B",
        4 * k.numel(),
        caches,
        partial(jitkern.store_cache, caches[0], caches[1], slots.to(torch.int32), k, v),
        "cache[slots] = x, twice",
        assign,
    )
    count = 65_536 if gpu else 4096
    table, output = rows_of(131_072 if gpu else 16_384, "index"), rows_of(count, "index")
    ids = torch.randint(0, len(table), (count,), device=device)
    yield case(
        "index",
        f"{count} rows of {_ROW_BYTES['index']} B",
        2 * output.numel(),
        [output],
        partial(jitkern.indexing, table, ids.to(torch.int32), output=output),
        "index_select",
        partial(torch.index_select, table, 0, ids, out=output),
    )
    count = 262_144 if gpu else 8192
    pool = 300_000 if gpu else 2 * count
    src, dst = rows_of(pool, "h2d_gather", "cpu"), rows_of(pool, "h2d_gather")
    rows, to = numbers(count, pool), numbers(count, pool)

    def gather() -> None:
        dst[to] = src[rows.to(src.device)].to(dst.device)

    yield case(
        "h2d_gather",
        f"{count} rows of {_ROW_BYTES['h2d_gather']} B",
        (1 if gpu else 2) * count * _ROW_BYTES["h2d_gather"],
        [dst],
        partial(jitkern.h2d_gather, src, dst, torch.stack([rows, to], 1).to(torch.int32)),
        "dst[slots] = src[rows].to(device)" if gpu else "dst[slots] = src[rows]",
        gather,
    )


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
