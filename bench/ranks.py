"""Benchmarks of several ranks: a process a GPU, or some of gloo, that measure together.

`rows_of("comm", ...)` starts them; in each, `measure_ranks(ranks, quick)` of that benchmark's
module runs, and what rank 0 returns comes back. Ranks do the same in the same order: a replay that
holds a collective keeps them in step.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import cases
from jitkern.bench.case import Context, Row
from jitkern.bench.measure import fill
from jitkern.bench.timing import Replay, cpu_replay, cuda_replay, time_replays

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400
IS_REHEARSAL = os.environ.get("RANKS_ON_ONE_GPU") == "1"
"""Two ranks share a GPU: every call is made, no figure means anything. See tests/shared_gpu.py."""


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
        torch.distributed.barrier(self.cpu_group)


# -- what ranks measure ----------------------------------------------------------------------------

Calls = Mapping[str, tuple[str, Callable[[], object]]]
"""Role and call of each, by its name."""


def timed(ranks: Ranks, rows: list[Row], calls_of: Calls, calls: int) -> list[Row]:
    """Fill rows of these names, each by replays of so many calls."""
    replays = {name: _replay(ranks, call, calls) for name, (_, call) in calls_of.items()}
    timings = time_replays(replays, device=ranks.device.type, rounds=21, before=ranks.barrier)
    for row in rows:
        fill(row, timings[row.impl])
    return rows


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


def rows_of(name: str, ctx: Context, size: int) -> Iterator[Row]:
    """Measure a benchmark with so many ranks.

    Raises
    ------
    RuntimeError
        A process has failed; its output is the message.
    """
    with tempfile.TemporaryDirectory(prefix="jitkern-ranks-") as folder:
        result = Path(folder, "rows.json")
        command = [sys.executable, "-W", "ignore", "-m", "bench.ranks", name, ctx.device]
        command += ["quick" if ctx.quick else "all", str(result)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(size),
        }
        logs = [Path(folder, f"rank{rank}.log") for rank in range(size)]
        started = []
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, env={**env, "RANK": str(rank)}, stdout=file, stderr=file
                )
            started.append(process)
        try:
            for rank, process in enumerate(started):
                if process.wait(timeout=TIMEOUT_S) != 0:
                    text = logs[rank].read_text(errors="replace").strip()
                    raise RuntimeError(f"rank {rank} of {size}: {text[-2000:]}")
        finally:
            for process in started:
                process.kill()
        yield from (Row(**row) for row in json.loads(result.read_text()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(name: str, kind: str, how: str, result: str) -> None:
    import torch.distributed as dist

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
    rows = list(cases.module(name).measure_ranks(ranks, how == "quick"))
    if rank == 0:
        Path(result).write_text(json.dumps([asdict(row) for row in rows]))
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
