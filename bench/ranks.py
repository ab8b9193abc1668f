"""Benchmarks of several ranks: a process per GPU, or processes over gloo, that measure together.

`run("peer", ...)` starts them; in each, `measure_ranks(ranks, quick)` of that benchmark's module
runs, and the rows that it yields in rank 0 come back, also those before a failure. Ranks do the
same in the same order: a replay that holds a collective keeps them in step.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn import functional

from bench.case import Context, Row, error_row, error_text
from bench.measure import fill
from bench.timing import Timing, cpu_replay, cuda_replay, host_ms, time_replays

TIMEOUT_S = 400
KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 21
SLEEP_CYCLES = 2_000_000  # 1 ms: hosts leave a barrier and queue a graph in 0.1 ms each
HOST_ROUNDS = 101
HOST_CALLS = 30  # a call behind 32 unfinished ones blocks


@dataclass(frozen=True)
class Call:
    """One implementation. A sum is written to `tensor`, or returned."""

    role: str
    run: Callable[[], object]
    tensor: Any = None


Calls = Mapping[str, Call]


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the measurements that all ranks make together."""

    op: str
    rank: int
    size: int
    device: torch.device
    cpu_group: Any  # gloo

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def where(self) -> str:
        """The ranks in the name of a case."""
        return f"{self.size} {'GPUs' if self.on_gpu else 'processes'}"

    def barrier(self) -> None:
        """Wait for the GPU, then for the other ranks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self.cpu_group)

    def first_text(self, text: str) -> str:
        """Return the first text of all ranks that is not empty; the same on each rank."""
        texts: list[Any] = [""] * self.size
        dist.all_gather_object(texts, text, group=self.cpu_group)
        return next(filter(None, texts), "")

    def timed(self, case: str, calls: Calls, count: int, **fields: Any) -> list[Row]:
        """Return the rows of replays of `count` calls; `fields` go into each row."""
        word = torch.zeros(1, device=self.device)

        def line_up() -> None:
            self.barrier()
            if self.on_gpu:
                # Hosts leave the barrier one after the other. The GPUs sleep until all replays are
                # queued, then wait for each other: they start within two microseconds.
                torch.cuda._sleep(SLEEP_CYCLES)
                dist.all_reduce(word)

        replays = {}
        for name, call in calls.items():
            call.run()
            call.run()
            self.barrier()
            replays[name] = (cuda_replay if self.on_gpu else cpu_replay)([call.run] * count)
        timings = time_replays(replays, device=self.device.type, rounds=ROUNDS, before=line_up)
        rows = [Row(self.op, case, name, call.role, **fields) for name, call in calls.items()]
        for row in rows:
            row.bytes_moved = None if row.role == "floor" else row.bytes_moved
            fill(row, timings[row.impl])
        return rows

    def calls_for(self, num_bytes: int) -> int:
        """Return the calls per replay: enough that the cost of the replay itself is small."""
        if num_bytes > 8 * MIB:
            return 5
        return 200 if num_bytes <= 128 * KIB and self.on_gpu else 50

    def sum_case(self, num_bytes: int) -> str:
        size = f"{num_bytes // MIB} MB" if num_bytes >= MIB else f"{num_bytes // KIB} KB"
        return f"all_reduce, {size} bf16, {self.where}"

    def sum_rows(self, num_bytes: int, sums: Calls, in_a_row: str = "") -> Iterator[Row]:
        """Yield the rows of sums of `num_bytes`; a wrong sum is an error.

        A small kernel follows each sum, as in a model, and its time is included: two NCCL kernels
        in a row cost 3 us more. `in_a_row` names a row of ours without it, and adds a row of the
        small kernel.
        """
        case, params = self.sum_case(num_bytes), {"ranks": self.size, "num_bytes": num_bytes}
        spacer = torch.zeros(1, device=self.device)

        def spaced(call: Callable[[], object]) -> None:
            call()
            spacer.zero_()

        calls: dict[str, Call] = {}
        for name, call in sums.items():
            if wrong := self.first_text(self._wrong(call)):
                yield Row(self.op, case, name, call.role, params=params, error=wrong)
            else:
                calls[name] = replace(call, run=partial(spaced, call.run))
        if in_a_row:
            calls[in_a_row] = sums["jitkern"]
            calls["the small kernel behind each call"] = Call("floor", spacer.zero_)
        moved = 2 * (self.size - 1) * num_bytes // self.size  # bus bandwidth
        count = self.calls_for(num_bytes)
        yield from self.timed(case, calls, count, params=params, bytes_moved=moved)

    def _wrong(self, call: Call) -> str:
        """Return the error of a sum on this rank, if any; its tensor is zeros afterwards."""
        call.tensor.fill_(self.rank + 1)
        self.barrier()
        wrong = ""
        try:
            returned = call.run()
            total = returned if isinstance(returned, torch.Tensor) else call.tensor
            if not bool((total == sum(range(1, self.size + 1))).all()):
                wrong = f"rank {self.rank}: a wrong sum of {total.numel()} items; not timed"
        except Exception as error:  # a peer that fails is a row, not the end of the run
            wrong = error_text(error)
        self.barrier()
        call.tensor.zero_()
        self.barrier()
        return wrong

    def host_rows(self, num_bytes: int, sums: Calls) -> Iterator[Row]:
        """Yield the host time of a call, ours and PyTorch's, with all ranks calling at once."""
        samples: dict[str, list[float]] = {"jitkern": [], "torch.distributed": []}
        for _ in range(HOST_ROUNDS):
            for name, times_ms in samples.items():
                self.barrier()
                times_ms.append(host_ms(sums[name].run, HOST_CALLS))
        for name, times_ms in samples.items():
            case = f"{self.sum_case(num_bytes)}, host time"
            row = Row(self.op, case, name, sums[name].role, params={"ranks": self.size})
            fill(row, Timing(tuple(times_ms[1:])))
            yield row

    def embedding_rows(self, comm: Any, tokens: Sequence[int], **how: Any) -> Iterator[Row]:
        """Yield TPEmbedding beside the usual way: a mask, F.embedding and a sum over ranks."""
        from jitkern.nn import TPEmbedding

        vocab, hidden = (131_072, 4096) if self.on_gpu else (4096, 1024)
        how |= {"dtype": torch.bfloat16, "device": self.device}
        ours = TPEmbedding(vocab, hidden, comm=comm, **how)
        torch.manual_seed(self.rank)
        ours.weight.normal_()
        start, count = ours.vocab_range
        weight = ours.weight[:count].clone()  # in memory of torch's allocator

        def usual(ids: torch.Tensor) -> torch.Tensor:
            outside = (ids < start) | (ids >= start + count)
            out = functional.embedding((ids - start).masked_fill(outside, 0), weight)
            out = out.masked_fill(outside.unsqueeze(-1), 0)
            dist.all_reduce(out)
            return out

        for many in tokens:
            torch.manual_seed(0)  # the same tokens on all ranks
            ids = torch.randint(vocab, (many,), device=self.device)
            if not torch.equal(usual(ids), ours(ids)):
                raise RuntimeError("TPEmbedding differs from mask, F.embedding, all_reduce")
            calls = {
                "jitkern": Call("ours", partial(ours, ids)),
                "mask, F.embedding, all_reduce": Call("peer", partial(usual, ids)),
            }
            case = f"TPEmbedding, {many:,} tokens of {hidden:,} bf16, {self.where}"
            params = {"ranks": self.size, "tokens": many}
            yield from self.timed(case, calls, self.calls_for(2 * many * hidden), params=params)


# -- their processes -------------------------------------------------------------------------------


def run(op: str, module: str, ctx: Context) -> Iterator[Row]:
    """Measure a benchmark with 2, 4 and 8 ranks, up to the number of GPUs; a failure is a row."""
    most = torch.cuda.device_count() if ctx.device == "cuda" else 2
    for size in (n for n in (2, 4, 8) if n <= most):
        ctx.say(f"{op}: {size} ranks")
        with tempfile.TemporaryDirectory(prefix="jitkern-ranks-") as folder:
            failure = _processes(op, size, module, ctx, Path(folder))
            lines = Path(folder, "rows").read_text().splitlines()
        yield from (Row(**json.loads(line)) for line in lines)  # also those before a failure
        if failure:
            ctx.say(failure)
            yield error_row(op, f"{size} ranks", "jitkern", "ours", RuntimeError(failure))


def _processes(op: str, size: int, module: str, ctx: Context, folder: Path) -> str:
    """Have the ranks write rows into the folder; return the error of a rank, or the timeout."""
    Path(folder, "rows").touch()
    started = spawn(_main, (op, size, module, ctx.device, ctx.quick, folder), size, join=False)
    until = time.monotonic() + TIMEOUT_S
    try:
        while not started.join(1.0):
            if time.monotonic() > until:
                return f"{size} ranks were not done within {TIMEOUT_S} s"
    except ProcessException as error:
        return f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    return ""


def _main(rank: int, op: str, size: int, module: str, kind: str, quick: bool, folder: Path) -> None:
    on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    group = dist.new_group(backend="gloo") if on_gpu else dist.group.WORLD
    ranks = Ranks(op, rank, size, device, group)
    for row in import_module(module).measure_ranks(ranks, quick or not on_gpu):
        if rank == 0:
            with Path(folder, "rows").open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    ranks.barrier()
    dist.destroy_process_group()
