"""``jitkern demo``: the ops on real tensors, checked bit for bit against PyTorch, and timed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jitkern
from jitkern.arch import SUPPORTED_ARCHS
from jitkern.cli import ui
from jitkern.errors import JitkernError

if TYPE_CHECKING:
    import torch

SUMMARY = "run the ops on real tensors against PyTorch"
DESCRIPTION = """\
Run three of the ops on real tensors, check every bit against PyTorch, and show time, bandwidth and
ratio. On the GPU if there is one; else on the CPU, and the CUDA kernels are compiled for four
archs all the same."""
EXAMPLE = "jitkern demo"

_ROW_BYTES = 656  # one token's row of a latent KV cache with its scales: no multiple of 128


@dataclass(frozen=True)
class Comparison:
    """One op on one set of tensors.

    `ours` and `theirs` enqueue the same work; `results` are what each of them writes.
    """

    op: str
    what: str
    moved_bytes: int
    ours: Callable[[], object]
    theirs: Callable[[], object]
    their_name: str
    results: list[tuple[torch.Tensor, torch.Tensor]]
    in_graph: bool = True

    def run(self) -> bool:
        """Run both once and tell whether every bit is the same."""
        self.ours()
        self.theirs()
        return all(_equal(ours, theirs) for ours, theirs in self.results)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the demo is the same everywhere."""


def run(args: argparse.Namespace) -> int:
    """Print the tables; raise JitkernError where a result differs."""
    del args
    import torch

    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{_threads()} CPU threads"
    ui.say(f"jitkern {jitkern.__version__}, torch {torch.__version__}, {name}\n")
    wrong = _compare(_cases(device), device)
    if device.type == "cpu":
        ui.say("")
        _compile()
    ui.say(f"\n{time.perf_counter() - start:.1f} s in all")
    if wrong:
        raise JitkernError(f"demo: {', '.join(wrong)}: the result differs from PyTorch's")
    return 0


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _compare(cases: list[Comparison], device: torch.device) -> list[str]:
    """Print one line a case; return the ops whose result is wrong."""
    rows = []
    wrong = []
    for case in cases:
        right = case.run()
        if not right:
            wrong.append(case.op)
        ours_ms, theirs_ms = _time_ms(case.ours, case, device), _time_ms(case.theirs, case, device)
        rows.append(
            (
                case.op,
                case.what,
                "ok" if right else "failed",
                ui.ms_text(ours_ms),
                f"{case.moved_bytes / ours_ms / 1e6:,.1f}",
                case.their_name,
                ui.ms_text(theirs_ms),
                f"{theirs_ms / ours_ms:.2f}x",
            )
        )
    jitkern.check(device)
    columns = ("op", "what", "bits", ">ms", ">GB/s", "PyTorch", ">its ms", ">ratio")
    ui.console().print(ui.table(columns, rows))
    return wrong


def _time_ms(call: Callable[[], object], case: Comparison, device: torch.device) -> float:
    from jitkern.perf import perf_cpu, perf_cuda

    if device.type == "cpu":
        return perf_cpu(call)
    # What waits for the host, such as a gather on the CPU, no graph can hold.
    return perf_cuda(call, cuda_graph_repetitions=10 if case.in_graph else None)


# The working sets are several times larger than any L2 cache, so that no flush is needed.


def _cases(device: torch.device) -> list[Comparison]:
    gpu = device.type == "cuda"
    return [
        _store(device, num_slots=300_000 if gpu else 32_768, num_rows=131_072 if gpu else 8_192),
        _index(device, num_rows=65_536 if gpu else 8_192, num_indices=65_536 if gpu else 4_096),
        _gather(device, num_slots=300_000 if gpu else 32_768, num_rows=262_144 if gpu else 8_192),
    ]


def _random(num_rows: int, row_bytes: int, device: torch.device, **options: bool) -> torch.Tensor:
    """Rows of bfloat16 with random bits: all the NaN patterns are among them."""
    import torch

    shape = (num_rows, row_bytes)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if options.get("pinned"):
        bits = bits.pin_memory()
    return bits.view(torch.bfloat16)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _store(device: torch.device, *, num_slots: int, num_rows: int) -> Comparison:
    import torch

    k, v = (_random(num_rows, _ROW_BYTES, device) for _ in range(2))
    ours_k, ours_v = (_random(num_slots, _ROW_BYTES, device) for _ in range(2))
    their_k, their_v = ours_k.clone(), ours_v.clone()
    slots = torch.randperm(num_slots, device=device)[:num_rows]

    def ours() -> None:
        jitkern.store_cache(ours_k, ours_v, slots, k, v)

    def theirs() -> None:
        their_k[slots] = k
        their_v[slots] = v

    return Comparison(
        op="store_cache",
        what=f"K and V, {num_rows:,} rows of {_ROW_BYTES} B",
        moved_bytes=4 * num_rows * _ROW_BYTES,  # K and V, read and written
        ours=ours,
        theirs=theirs,
        their_name="cache[slots] = x, twice",
        results=[(ours_k, their_k), (ours_v, their_v)],
    )


def _index(device: torch.device, *, num_rows: int, num_indices: int) -> Comparison:
    import torch

    row_bytes = 8192
    table = _random(num_rows, row_bytes, device)
    indices = torch.randint(0, num_rows, (num_indices,), device=device)
    output, expected = (_random(num_indices, row_bytes, device) for _ in range(2))

    def ours() -> None:
        jitkern.indexing(table, indices, output=output)

    def theirs() -> None:
        torch.index_select(table, 0, indices, out=expected)

    return Comparison(
        op="indexing",
        what=f"{num_indices:,} rows of {row_bytes} B",
        moved_bytes=2 * num_indices * row_bytes,  # read and written
        ours=ours,
        theirs=theirs,
        their_name="index_select",
        results=[(output, expected)],
    )


def _gather(device: torch.device, *, num_slots: int, num_rows: int) -> Comparison:
    import torch

    gpu = device.type == "cuda"
    cpu = torch.device("cpu")
    src = _random(num_slots, _ROW_BYTES, cpu, pinned=gpu)
    ours_dst = _random(num_slots, _ROW_BYTES, device)
    their_dst = ours_dst.clone()
    rows, slots = (torch.randperm(num_slots)[:num_rows] for _ in range(2))
    pairs = torch.stack([rows, slots], dim=1).to(device)
    device_slots = slots.to(device)

    def ours() -> None:
        jitkern.h2d_gather(src, ours_dst, pairs)

    def theirs() -> None:
        their_dst[device_slots] = src[rows].to(device)

    return Comparison(
        op="h2d_gather",
        what=f"{num_rows:,} rows of {_ROW_BYTES} B",
        # Over the bus once; in the CPU's memory read and written.
        moved_bytes=(1 if gpu else 2) * num_rows * _ROW_BYTES,
        ours=ours,
        theirs=theirs,
        their_name="dst[slots] = src[rows].to(device)" if gpu else "dst[slots] = src[rows]",
        results=[(ours_dst, their_dst)],
        in_graph=False,
    )


def _compile() -> None:
    """Compile the kernels of the demo for GPUs that are not here, and show how long it takes."""
    from jitkern.warming import default_threads, op_jobs, run_all

    sizes = {"store": _ROW_BYTES, "index": 8192, "h2d_gather": _ROW_BYTES}
    start = time.perf_counter()
    jobs = [job for op, size in sizes.items() for job in op_jobs(op, size, SUPPORTED_ARCHS)]
    outcomes, failures = run_all(jobs, default_threads())
    took_s = time.perf_counter() - start

    by_kernel: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        ms = "" if outcome.lookup is None else f"{ui.ms_text(outcome.lookup.ms)} ms"
        cell = ms if outcome.source == "compiled" else f"{outcome.source} {ms}".rstrip()
        by_kernel.setdefault((outcome.job.name, outcome.job.parameters), []).append(cell)
    columns = ("CUDA kernel", "parameters", *(f">{arch}" for arch in SUPPORTED_ARCHS))
    lines = [(op, parameters, *cells) for (op, parameters), cells in by_kernel.items()]
    ui.console().print(ui.table(columns, lines))
    ui.say(f"{len(outcomes)} kernels in {took_s:.1f} s: no GPU, no CUDA toolkit")
    if failures:
        raise failures[0]
