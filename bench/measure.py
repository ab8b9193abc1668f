"""Measure one case: check each implementation bit for bit, then time them in turn."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal

import torch

from bench.case import Case, Context, Impl, Row, Run, error_text
from bench.timing import (
    Call,
    Replay,
    Timing,
    cache_bytes_of,
    cpu_replay,
    cuda_replay,
    host_ms,
    time_replays,
)

POISON = 0xA5
SLOW_REPLAY_MS = 60.0  # longer replays get fewer calls and fewer rounds
# Limits of a replay for the host's clock: a launch blocks when 1,024 are queued in its stream.
HOST_REPLAY_MS, QUEUED_LAUNCHES = 2.0, 200


@cache
def flush_l2() -> Call:
    """Return a call that fills the L2 with clean lines of another buffer."""
    filler = torch.ones(2 * cache_bytes_of("cuda") // 4, device="cuda")
    sink = torch.zeros((), device="cuda")
    # Read, not written: dirty lines would be written back inside the timed region.
    return lambda: torch.sum(filler, dim=0, out=sink)


def measure(ctx: Context, case: Case) -> list[Row]:
    """Check each implementation of the case against the reference, then time those that pass."""
    ctx.say(case.key)
    on_gpu = ctx.device == "cuda" and case.clock == "device"
    buffers = _working_sets(ctx, case)
    rows: list[Row] = []
    fast: dict[str, Replay] = {}
    slow: dict[str, Replay] = {}
    _poison(case, buffers[0])
    expected = case.reference(buffers[0])
    by_name: dict[str, Row] = {}
    for impl in case.impls:
        moved = case.bytes_moved if impl.bytes_moved is None else impl.bytes_moved
        row = Row(case.op, case.name, impl.name, impl.role, case.params, bytes_moved=moved)
        rows.append(row)
        try:
            run = impl.build()
            _check(ctx, case, impl, run, buffers[0], expected)
            once_ms = _once_ms(ctx, run, buffers[-1])
            most_ms = SLOW_REPLAY_MS if case.clock == "device" else HOST_REPLAY_MS
            most = case.calls if case.clock == "device" else QUEUED_LAUNCHES
            calls = max(1, min(most, int(most_ms / once_ms)))
            bound: list[Call] = [partial(run, buffers[i % len(buffers)]) for i in range(calls)]
            replay = _replay(ctx, impl, bound, row) if on_gpu else cpu_replay(bound)
        except Exception as error:  # a peer that fails is a row, not the end of the run
            row.error = error_text(error)
            continue
        by_name[impl.name] = row
        (slow if once_ms * calls > SLOW_REPLAY_MS else fast)[impl.name] = replay
    del expected
    device: Literal["cuda", "cpu"] = "cuda" if on_gpu else "cpu"
    clear_cache = flush_l2() if on_gpu and not case.is_warm else ctx.sync

    def before() -> None:
        case.restore()
        clear_cache()

    for replays, rounds in ((fast, ctx.rounds), (slow, 3)):
        timings = time_replays(replays, device=device, rounds=rounds, before=before)
        for name, timing in timings.items():
            fill(by_name[name], timing)
    return rows


def _working_sets(ctx: Context, case: Case) -> list[Any]:
    """Return as many as exceed the cache; one if it is warm, or the time is the host's."""
    touched = case.touched_bytes or case.bytes_moved
    if case.clock == "host" or case.is_warm or not touched:
        return [case.make(0)]
    # `calls` limits them; flush_l2() between replays helps where they are less than twice the L2.
    count = min(case.calls, 2 * cache_bytes_of(ctx.device) // touched + 1)
    return [case.make(i) for i in range(max(2, count))]


def fill(row: Row, timing: Timing) -> None:
    """Write a timing into its row."""
    row.median_us = timing.median_ms * 1e3
    row.iqr_us = timing.iqr_ms * 1e3
    if row.bytes_moved:
        row.gb_s = timing.gb_s(row.bytes_moved)


def _poison(case: Case, buffers: Any) -> None:
    case.restore()
    for tensor in case.outputs(buffers):
        tensor.view(torch.uint8).fill_(POISON)
    if case.prepare is not None:
        case.prepare(buffers)


def _check(
    ctx: Context, case: Case, impl: Impl, run: Run, buffers: Any, expected: Sequence[torch.Tensor]
) -> None:
    """Run one implementation on poisoned outputs; ValueError unless each bit is the reference's."""
    _poison(case, buffers)
    ctx.sync()
    returned = run(buffers)
    ctx.sync()
    if not impl.check:
        return
    got: Any = (returned,) if impl.returns else case.outputs(buffers)
    for tensor, reference in zip(got, expected, strict=True):
        if not torch.equal(tensor.view(torch.uint8), reference.view(torch.uint8)):
            raise ValueError("the result differs from the PyTorch reference; not timed")


def _once_ms(ctx: Context, run: Run, buffers: Any) -> float:
    def call() -> None:
        run(buffers)
        ctx.sync()

    ctx.sync()
    return host_ms(call)


def _replay(ctx: Context, impl: Impl, calls: list[Call], row: Row) -> Replay:
    if not impl.graph:
        return cpu_replay(calls)
    for call in dict.fromkeys(calls):
        call()
    ctx.sync()
    try:
        return cuda_replay(calls)
    except Exception as error:
        ctx.sync()
        row.note = f"timed without a graph: {type(error).__name__}"
        return cpu_replay(calls)
