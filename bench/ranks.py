"""Benchmarks of several ranks: a process a GPU, or some of gloo, that measure together.

`run("comm", ...)` starts them; in each, `measure_ranks(ranks, quick)` of that benchmark's module
runs, and the rows that it yields in rank 0 come back, also those in front of what fails. Ranks do
the same in the same order: a replay that holds a collective keeps them in step.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
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
from torch.nn import functional

from jitkern.bench.case import Context, Row, error_row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Replay, Timing, cpu_replay, cuda_replay, host_ms, time_replays

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400
IS_REHEARSAL = os.environ.get("RANKS_ON_ONE_GPU") == "1"
"""Two ranks share a GPU: every call is made, no figure means anything. See tests/shared_gpu.py."""

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 3 if IS_REHEARSAL else 21
SLEEP_CYCLES = 2_000_000  # 1 ms: hosts leave a barrier 0.1 ms apart, and queue a graph in as much
_TEXT_BYTES = 1024
_PREFIX = re.compile(r"^\[rank\d+\]: ")  # torch's, of what a rank raises


@dataclass(frozen=True)
class Ranks:
    """What one of the processes knows of all."""

    rank: int
    size: int
    device: torch.device
    cpu_group: Any  # gloo

    @property
    def where(self) -> str:
        """What rows call them."""
        if IS_REHEARSAL:
            return f"{self.size} ranks of one GPU"
        return f"{self.size} {'GPUs' if self.device.type == 'cuda' else 'processes'}"

    def barrier(self) -> None:
        """Wait for the GPU, then for the other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self.cpu_group)

    def first_text(self, text: str) -> str:
        """Return the first text of all ranks' that is not empty; the same on each of them."""
        said = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        own = torch.tensor(list(said), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.cpu_group)
        texts = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in found]
        return next(filter(None, texts), "")


# -- what ranks measure ----------------------------------------------------------------------------

Calls = Mapping[str, tuple[str, Callable[[], object]]]
"""Role and call of each, by its name."""


def timed(ranks: Ranks, rows: list[Row], calls_of: Calls, calls: int) -> list[Row]:
    """Fill rows of these names, each by replays of so many calls."""
    word = torch.zeros(1, device=ranks.device)

    def line_up() -> None:
        ranks.barrier()
        if ranks.device.type == "cuda":
            # Hosts come out of it one after the other. GPUs sleep until all have queued what is
            # timed, and then wait for each other: they begin within a microsecond or two.
            torch.cuda._sleep(SLEEP_CYCLES)
            dist.all_reduce(word)

    replays = {name: _replay(ranks, call, calls) for name, (_, call) in calls_of.items()}
    timings = time_replays(replays, device=ranks.device.type, rounds=ROUNDS, before=line_up)
    for row in rows:
        fill(row, timings[row.impl])
    return rows


HOST_CALLS = 30  # fewer than wait for the GPU: one that comes after 32 others waits for some


def host_rows(ranks: Ranks, op: str, case: str, calls: Calls, rounds: int) -> Iterator[Row]:
    """Yield what each call costs the host, all ranks calling at once."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds + 1):
        for name, (_, call) in calls.items():
            ranks.barrier()
            ms = host_ms(call, HOST_CALLS)
            if round_number > 0:
                samples[name].append(ms)
    for name, (role, _) in calls.items():
        row = Row(op, case, name, role, params={"ranks": ranks.size})
        fill(row, Timing(tuple(samples[name])))
        yield row


def embedding_rows(ranks: Ranks, op: str, ours: Any, tokens: Sequence[int]) -> Iterator[Row]:
    """Yield a TPEmbedding beside what is usual: a mask, F.embedding and a sum over the ranks."""
    start, count = ours.vocab_range
    weight = ours.weight.detach()[:count].clone()  # of the usual memory
    hidden = weight.shape[1]

    def usual(ids: torch.Tensor) -> torch.Tensor:
        outside = (ids < start) | (ids >= start + count)
        out = functional.embedding((ids - start).masked_fill(outside, 0), weight)
        out = out.masked_fill(outside.unsqueeze(-1), 0)
        dist.all_reduce(out)
        return out

    for many in tokens:
        torch.manual_seed(0)  # the same tokens on all ranks
        ids = torch.randint(ours.num_embeddings, (many,), device=ranks.device)
        if not torch.equal(usual(ids), ours(ids)):
            raise RuntimeError(f"{op}: TPEmbedding differs from mask, F.embedding, all_reduce")
        calls: Calls = {
            "jitkern": ("ours", partial(ours, ids)),
            "mask, F.embedding, all_reduce": ("peer", partial(usual, ids)),
        }
        case = f"TPEmbedding, {many:,} tokens of {hidden:,} bf16, {ranks.where}"
        params = {"ranks": ranks.size, "tokens": many}
        rows = [Row(op, case, name, role, params=params) for name, (role, _) in calls.items()]
        yield from timed(ranks, rows, calls, calls_for(ranks, 2 * many * hidden))


def calls_for(ranks: Ranks, num_bytes: int) -> int:
    """Return the calls of a replay: so many that what it costs once is little beside them."""
    if IS_REHEARSAL or num_bytes > 8 * MIB:
        return 5
    return 200 if num_bytes <= 128 * KIB and ranks.device.type == "cuda" else 50


def spaced(call: Callable[[], object], spacer: torch.Tensor) -> None:
    """Make a call, and launch a small kernel behind it."""
    call()
    spacer.zero_()


def size_text(num_bytes: int) -> str:
    """Return `num_bytes` in whole KB, or MB."""
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"


def _replay(ranks: Ranks, call: Callable[[], object], calls: int) -> Replay:
    for _ in range(2):
        call()
    ranks.barrier()
    return (cuda_replay if ranks.device.type == "cuda" else cpu_replay)([call] * calls)


# -- their processes -------------------------------------------------------------------------------


def sizes(ctx: Context) -> list[int]:
    """Return how many ranks there are to measure with on this machine."""
    if ctx.device != "cuda":
        return [2]
    return [2] if IS_REHEARSAL else [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]


def run(op: str, module: str, ctx: Context) -> Iterator[Row]:
    """Measure a benchmark with each number of ranks; what fails is a row, behind those before."""
    for size in sizes(ctx):
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
        Behind the rows that were measured: a process has failed, or they were not done in time. The
        message has the end of what each has said, that of the one that failed first in front.
    """
    with tempfile.TemporaryDirectory(prefix="jitkern-ranks-") as folder:
        result = Path(folder, "rows")
        result.touch()
        command = [sys.executable, "-W", "ignore", "-m", "bench.ranks", module, ctx.device]
        command += ["quick" if ctx.quick else "all", str(result)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(size),
        }
        logs = [Path(folder, f"rank{rank}.log") for rank in range(size)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        command, env={**env, "RANK": str(rank)}, stdout=file, stderr=file
                    )
                started.append(process)
            failure = _failure(started, logs)
        finally:
            for process in started:
                process.kill()
                process.wait()
        yield from (Row(**json.loads(line)) for line in result.read_text().splitlines())
    if failure:
        raise RuntimeError(failure)


def _failure(started: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> str:
    """Wait for all, or for the first that fails; return what went wrong, empty where nothing."""
    until = time.monotonic() + TIMEOUT_S
    codes: list[int | None] = [None] * len(started)
    while None in codes and not any(codes) and time.monotonic() < until:
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    failed = [rank for rank, code in enumerate(codes) if code]
    late = [rank for rank, code in enumerate(codes) if code is None]
    if not failed and not late:
        return ""
    texts = [log.read_text(errors="replace").strip() for log in logs]
    if failed:
        first = failed[0]
        lines = texts[first].splitlines() or ["it has said nothing"]
        why = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        said = [f"rank {first} of {len(logs)} exited with {codes[first]}: {_PREFIX.sub('', why)}"]
    else:
        ranks = ", ".join(map(str, late))
        said = [f"ranks {ranks} of {len(logs)} were not done within {TIMEOUT_S} s"]
    for rank in sorted(range(len(logs)), key=lambda rank: rank not in (failed or late)):
        said += [f"-- rank {rank}:", texts[rank][-2000:]]
    return "\n".join(said)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(module: str, kind: str, how: str, result: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if kind == "cuda":
        device = _take_gpu(rank)
        dist.init_process_group("nccl", device_id=device)
        group = dist.new_group(backend="gloo")
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    ranks = Ranks(rank, size, device, group)
    for row in import_module(module).measure_ranks(ranks, how == "quick"):
        if rank == 0:
            with Path(result).open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    ranks.barrier()
    dist.destroy_process_group()


def _take_gpu(rank: int) -> torch.device:
    if not IS_REHEARSAL:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    sys.path.append(str(ROOT / "tests"))
    import shared_gpu

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return shared_gpu.take(rank)


if __name__ == "__main__":
    _main(*sys.argv[1:])
