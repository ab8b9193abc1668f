"""Benchmarks of several ranks: a process a GPU, or some of gloo, that measure together.

`run("comm", ...)` starts them; in each, `measure_ranks(ranks, quick)` of that benchmark's module
runs, and the rows that it yields in rank 0 come back, also those before a failure. Ranks do the
same in the same order: a replay that holds a collective keeps them in step.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn import functional

from jitkern.bench.case import Context, Row, error_row, error_text
from jitkern.bench.measure import fill
from jitkern.bench.timing import Replay, Timing, cpu_replay, cuda_replay, host_ms, time_replays

TIMEOUT_S = 400

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 21
SLEEP_CYCLES = 2_000_000  # 1 ms: hosts leave a barrier 0.1 ms apart, and queue a graph in as much
HOST_CALLS = 30  # fewer than wait for the GPU: one that comes after 32 others waits for some
VOCAB, HIDDEN, CPU_VOCAB, CPU_HIDDEN = 131_072, 4096, 4096, 1024


@dataclass(frozen=True)
class Ranks:
    """What one of the processes knows of all."""

    rank: int
    size: int
    device: torch.device
    cpu_group: Any  # gloo

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def where(self) -> str:
        """What rows call them."""
        return f"{self.size} {'GPUs' if self.on_gpu else 'processes'}"

    def barrier(self) -> None:
        """Wait for the GPU, then for the other ranks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self.cpu_group)

    def first_text(self, text: str) -> str:
        """Return the first text of all ranks' that is not empty; the same on each of them."""
        texts: list[Any] = [""] * self.size
        dist.all_gather_object(texts, text, group=self.cpu_group)
        return next(filter(None, texts), "")


# -- what ranks measure ----------------------------------------------------------------------------

Calls = Mapping[str, tuple[str, Callable[[], object]]]
"""Role and call of each, by its name."""


def timed(ranks: Ranks, op: str, case: str, calls: Calls, count: int, **fields: Any) -> list[Row]:
    """Return rows of replays of so many calls; `fields` are those of each row."""
    word = torch.zeros(1, device=ranks.device)

    def line_up() -> None:
        ranks.barrier()
        if ranks.on_gpu:
            # Hosts come out of it one after the other. GPUs sleep until all have queued what is
            # timed, and then wait for each other: they begin within a microsecond or two.
            torch.cuda._sleep(SLEEP_CYCLES)
            dist.all_reduce(word)

    replays = {name: _replay(ranks, call, count) for name, (_, call) in calls.items()}
    timings = time_replays(replays, device=ranks.device.type, rounds=ROUNDS, before=line_up)
    rows = [Row(op, case, name, role, **fields) for name, (role, _) in calls.items()]
    for row in rows:
        row.bytes_moved = None if row.role == "floor" else row.bytes_moved
        fill(row, timings[row.impl])
    return rows


def _replay(ranks: Ranks, call: Callable[[], object], count: int) -> Replay:
    for _ in range(2):
        call()
    ranks.barrier()
    return (cuda_replay if ranks.on_gpu else cpu_replay)([call] * count)


def calls_for(ranks: Ranks, num_bytes: int) -> int:
    """Return the calls of a replay: so many that what it costs once is little beside them."""
    if num_bytes > 8 * MIB:
        return 5
    return 200 if num_bytes <= 128 * KIB and ranks.on_gpu else 50


@dataclass(frozen=True)
class Sum:
    """One implementation: it sums a tensor over the ranks, in place or into what it returns."""

    role: str
    tensor: torch.Tensor
    call: Callable[[], object]


def sum_case(num_bytes: int, ranks: Ranks) -> str:
    size = f"{num_bytes // MIB} MB" if num_bytes >= MIB else f"{num_bytes // KIB} KB"
    return f"all_reduce, {size} bf16, {ranks.where}"


def sum_rows(
    ranks: Ranks, op: str, num_bytes: int, sums: Mapping[str, Sum], in_a_row: str = ""
) -> Iterator[Row]:
    """Yield what sums of so many bytes take, those that are wrong as errors.

    Behind each stands a small kernel, as in a model, whose time is in: two of NCCL's kernels in a
    row cost 3 us more. `in_a_row` names ours without it, and adds a row of the small kernel.
    """
    case, params = sum_case(num_bytes, ranks), {"ranks": ranks.size, "num_bytes": num_bytes}
    spacer = torch.zeros(1, device=ranks.device)

    def spaced(call: Callable[[], object]) -> None:
        call()
        spacer.zero_()

    calls: dict[str, tuple[str, Callable[[], object]]] = {}
    for name, one in sums.items():
        if wrong := ranks.first_text(_wrong(ranks, one)):
            yield Row(op, case, name, one.role, params=params, error=wrong)
        else:
            calls[name] = (one.role, partial(spaced, one.call))
    if in_a_row:
        calls[in_a_row] = ("ours", sums["jitkern"].call)
        calls["the small kernel behind each call"] = ("floor", spacer.zero_)
    moved = 2 * (ranks.size - 1) * num_bytes // ranks.size  # bus bandwidth
    count = calls_for(ranks, num_bytes)
    yield from timed(ranks, op, case, calls, count, params=params, bytes_moved=moved)


def _wrong(ranks: Ranks, one: Sum) -> str:
    """Return what is wrong with a sum on this rank; its tensor is zeros afterwards, which stay."""
    one.tensor.fill_(ranks.rank + 1)
    ranks.barrier()
    wrong = ""
    try:
        returned = one.call()
        total = returned if isinstance(returned, torch.Tensor) else one.tensor
        if not bool((total == sum(range(1, ranks.size + 1))).all()):
            wrong = f"rank {ranks.rank}: a wrong sum of {total.numel()} items; not timed"
    except Exception as error:  # a peer that fails is a row, not the end of the run
        wrong = error_text(error)
    ranks.barrier()
    one.tensor.zero_()
    ranks.barrier()
    return wrong


def host_rows(ranks: Ranks, op: str, case: str, calls: Calls, rounds: int) -> Iterator[Row]:
    """Yield what each call costs the host, all ranks calling at once."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, (_, call) in calls.items():
            ranks.barrier()
            samples[name].append(host_ms(call, HOST_CALLS))
    for name, (role, _) in calls.items():
        row = Row(op, f"{case}, host time", name, role, params={"ranks": ranks.size})
        fill(row, Timing(tuple(samples[name][1:])))
        yield row


def embedding_rows(
    ranks: Ranks, op: str, comm: Any, tokens: Sequence[int], **how: Any
) -> Iterator[Row]:
    """Yield a TPEmbedding beside what is usual: a mask, F.embedding and a sum over the ranks."""
    from jitkern.nn import TPEmbedding

    size = (VOCAB, HIDDEN) if ranks.on_gpu else (CPU_VOCAB, CPU_HIDDEN)
    ours = TPEmbedding(*size, comm=comm, dtype=torch.bfloat16, device=ranks.device, **how)
    ours.weight.requires_grad_(False)
    torch.manual_seed(ranks.rank)
    ours.weight.normal_()
    start, count = ours.vocab_range
    weight = ours.weight[:count].clone()  # of the usual memory

    def usual(ids: torch.Tensor) -> torch.Tensor:
        outside = (ids < start) | (ids >= start + count)
        out = functional.embedding((ids - start).masked_fill(outside, 0), weight)
        out = out.masked_fill(outside.unsqueeze(-1), 0)
        dist.all_reduce(out)
        return out

    for many in tokens:
        torch.manual_seed(0)  # the same tokens on all ranks
        ids = torch.randint(size[0], (many,), device=ranks.device)
        if not torch.equal(usual(ids), ours(ids)):
            raise RuntimeError(f"{op}: TPEmbedding differs from mask, F.embedding, all_reduce")
        calls: Calls = {
            "jitkern": ("ours", partial(ours, ids)),
            "mask, F.embedding, all_reduce": ("peer", partial(usual, ids)),
        }
        case = f"TPEmbedding, {many:,} tokens of {size[1]:,} bf16, {ranks.where}"
        params = {"ranks": ranks.size, "tokens": many}
        yield from timed(
            ranks, op, case, calls, calls_for(ranks, 2 * many * size[1]), params=params
        )


# -- their processes -------------------------------------------------------------------------------


def run(op: str, module: str, ctx: Context) -> Iterator[Row]:
    """Measure a benchmark with 2, 4 and 8 ranks, as many as there are GPUs; what fails is a row."""
    sizes = [2]
    if ctx.device == "cuda":
        sizes = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
    for size in sizes:
        ctx.say(f"{op}: {size} ranks")
        try:
            yield from rows_of(module, ctx, size)
        except RuntimeError as error:
            ctx.say(str(error))
            yield error_row(op, f"{size} ranks", "jitkern", "ours", error)


def rows_of(module: str, ctx: Context, size: int) -> Iterator[Row]:
    """Measure the benchmark of a module with so many ranks.

    Raises
    ------
    RuntimeError
        After the rows that were measured: a rank has failed, or they were not done in time.
    """
    failure = ""
    with tempfile.TemporaryDirectory(prefix="jitkern-ranks-") as folder:
        rows = Path(folder, "rows")
        rows.touch()
        arguments = (size, _free_port(), module, ctx.device, ctx.quick, rows)
        started = spawn(_main, arguments, size, join=False)
        until = time.monotonic() + TIMEOUT_S
        try:
            while not failure and not started.join(1.0):
                if time.monotonic() > until:
                    failure = f"{size} ranks were not done within {TIMEOUT_S} s"
        except ProcessException as error:
            failure = f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        yield from (Row(**json.loads(line)) for line in rows.read_text().splitlines())
    if failure:
        raise RuntimeError(failure)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(rank: int, size: int, port: int, module: str, kind: str, quick: bool, rows: Path) -> None:
    device, backend = torch.device("cpu"), "gloo"
    if kind == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        device_id=device if kind == "cuda" else None,
    )
    group = dist.new_group(backend="gloo") if kind == "cuda" else dist.group.WORLD
    ranks = Ranks(rank, size, device, group)
    for row in import_module(module).measure_ranks(ranks, quick):
        if rank == 0:
            with rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    ranks.barrier()
    dist.destroy_process_group()
