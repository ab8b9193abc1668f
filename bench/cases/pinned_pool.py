"""How long a pool of pinned memory takes, beside CUDA's own.

A virtual machine's memory is backed at its first touch ever, so whoever comes first pays for it:
each order runs in a process of its own, on memory that was touched before. What a pool takes on
memory as it is found is a row of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.goals import Figures, Goal, at_least
from bench.peers import host_pool
from jitkern.bench.case import Context, Row, error_row

ROOT = Path(__file__).resolve().parents[2]
POOL, ALLOC = "PinnedPool", "cuMemHostAlloc"
TORCH = "torch, pin_memory=True"
FOUND = "PinnedPool, memory as it is found"
SIZES_GIB = (32, 64)


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("pinned_pool: needs a GPU, skipped")
        return
    sizes = [1] if ctx.quick else [gib for gib in SIZES_GIB if gib <= host_pool.sizes(64)[-1]]
    for gib in sizes:
        found: dict[str, list[float]] = {}
        notes: dict[str, str] = {}
        orders = [(FOUND, POOL, ALLOC), ("touched", ALLOC, POOL)]
        if gib == sizes[0]:
            orders[1] += (TORCH,)
        for order in orders:
            try:
                results = _measured(gib, order)
            except (subprocess.SubprocessError, ValueError) as error:
                yield error_row("pinned_pool", _name(gib), " then ".join(order), "ours", error)
                continue
            for name, (taken_s, note) in zip(order, results, strict=True):
                found.setdefault(name, []).append(taken_s)
                notes[name] = note
        found.pop("touched", None)
        for name, taken in found.items():
            role = "ours" if name in (POOL, FOUND) else "peer"
            middle = statistics.median(taken)
            yield Row(
                "pinned_pool", _name(gib), name, role, {"gib": gib}, median_us=1e6 * middle,
                min_us=1e6 * min(taken), gb_s=gib * host_pool.GIB / middle / 1e9,
                bytes_moved=gib * host_pool.GIB, bytes_note="pinned",
                note=notes[name],
            )  # fmt: skip


def goals(f: Figures) -> Iterator[Goal]:
    for case in f.cases("pinned_pool"):
        got = f.speed("pinned_pool", case, POOL, ALLOC)
        yield from at_least(f"pinned_pool, {case}: of {ALLOC}", got, 8.0)


def _name(gib: int) -> str:
    return f"{gib} GiB"


def _measured(gib: int, order: tuple[str, ...]) -> list[tuple[float, str]]:
    """Return seconds, and what is to be said of them, for each way."""
    ways = [POOL if name == FOUND else name for name in order]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.peers.pin_memory", str(gib), *ways],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(lines[-1])
    return [(seconds, note) for seconds, note in json.loads(done.stdout.splitlines()[-1])]
