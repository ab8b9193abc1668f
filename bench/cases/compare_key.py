"""fast_compare_key: the common prefix of two keys of a radix-tree prefix cache, on the CPU.

The keys stay in the cache, as the node that a request has just matched does; memcmp, which only
says equal or not, is the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import jitkern
from bench import peers
from bench.goals import Figures, Goal, at_least, at_most
from jitkern.bench.case import Context, Row, error_row
from jitkern.bench.measure import compare, fill
from jitkern.bench.timing import Replay, cpu_replay, time_replays

DTYPES = (torch.int32, torch.int64)

PEERS = (peers.host,)


def run(ctx: Context) -> Iterator[Row]:
    lengths = (1, 16, 1024, 131_072) if ctx.quick else (1, 4, 16, 64, 256, 1024, 8192, 131_072)
    for dtype in DTYPES:
        for length in lengths:
            yield from _rows(ctx, dtype, length)


def goals(f: Figures) -> Iterator[Goal]:
    op, case = "compare_key", "131072 equal int32 tokens"
    got = f.speed(op, case, "jitkern", "std::mismatch -O3")
    yield from at_least(f"fast_compare_key, {case}: of std::mismatch -O3", got, 4.0)
    slower = f.speed(op, case, "memcmp", "jitkern")
    yield from at_most(f"fast_compare_key, {case}: time of memcmp", slower, 1.3)
    for tokens in (1, 16):
        case = f"{tokens} equal int32 tokens"
        ours, floor = f.us(op, case, "jitkern"), f.us(op, case, "no-op FFI call")
        if ours and floor:
            name = f"fast_compare_key, {case}: above a no-op FFI call"
            yield from at_most(name, ours - floor, 0.1, "us")


def _rows(ctx: Context, dtype: torch.dtype, length: int) -> list[Row]:
    name = f"{length} equal {str(dtype).removeprefix('torch.')} tokens"
    ctx.say(f"compare_key: {name}")
    x = torch.randint(0, 150_000, (length,), dtype=dtype)
    y = x.clone()
    builds: list[tuple[str, str, Callable[[], Callable[[], object]]]] = [
        ("jitkern", "ours", lambda: partial(jitkern.fast_compare_key, x, y)),
        ("std::mismatch -O3", "peer", lambda: partial(peers.host().common_prefix, x, y)),
        ("torch (x == y).cumprod", "peer", lambda: partial(_torch, x, y)),
        ("memcmp", "ceiling", lambda: partial(peers.host().same_bytes, x, y)),
        ("no-op FFI call", "floor", lambda: partial(peers.host().noop_pair, x, y)),
    ]
    rows: list[Row] = []
    replays: dict[str, Replay] = {}
    for impl, role, build in builds:
        row = Row("compare_key", name, impl, role)
        row.params = {"tokens": length, "dtype": str(dtype)}
        row.bytes_note = "both keys read once"
        row.bytes_moved = 0 if role == "floor" else 2 * length * x.element_size()
        rows.append(row)
        try:
            call = build()
            got = call()
            if role != "floor" and got != length:
                raise ValueError(f"got {got}, expected {length}")
        except Exception as error:  # a peer that fails is a row, not the end of the run
            row.error = error_row("", "", "", "", error).error
            continue
        calls = max(3, min(2000, 2_000_000 // (length + 200)))
        replays[impl] = cpu_replay([call] * calls)
    timings = time_replays(replays, device="cpu", rounds=ctx.rounds)
    for row in rows:
        if row.impl in timings:
            fill(row, timings[row.impl])
    compare(rows)
    return rows


def _torch(x: torch.Tensor, y: torch.Tensor) -> int:
    return int((x == y).to(torch.int32).cumprod(0).sum())
