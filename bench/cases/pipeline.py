"""64 blocks of 4 MB through a few slots, with bodies that take as long as the copies.

The ceiling is what the longer side takes alone, and the first copy (for loads), which nothing can
hide. Peers: a double buffer written by hand with torch's streams and events, and copies and bodies
one behind the other. Bodies are torch.cuda._sleep, which leaves the memory alone, or a GEMM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from jitkern.bench.case import Context, Row, error_row
from jitkern.bench.measure import compare, fill
from jitkern.bench.timing import Timing, cuda_timer
from jitkern.offload import OverlapMonitor, SlotPipeline

BLOCKS, BLOCK_BYTES = 64, 4 << 20
DEPTHS = (1, 2, 4, 8)
BEST_DEPTH = 4
LONGER, DOUBLE, IN_TURN = "the longer side alone", "torch, double buffer", "one behind the other"
ENGINES = "both engines at once, no bodies"
HOST = "host, us an iteration"

Copy = Callable[[torch.Tensor, Any], object]
Go = Callable[[], object]


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("pipeline: needs a GPU, skipped")
        return
    blocks = list(torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory())
    for number, block in enumerate(blocks):
        block.fill_(number)
    measure = partial(_measured, ctx)
    copy_ms = _copies_ms(blocks) / BLOCKS
    for name, body in _bodies(copy_ms).items():
        ctx.say(f"pipeline: {name}")
        yield from _loads(measure, blocks, name, body)
    sleep = _bodies(copy_ms)["sleep"]
    ctx.say("pipeline: both directions, the host")
    yield from _updates(measure, blocks, sleep)
    yield from _host(ctx, blocks)


# -- what is timed ---------------------------------------------------------------------------------


def _bring(tensor: torch.Tensor, block: torch.Tensor) -> None:
    tensor.copy_(block, non_blocking=True)


def _take(tensor: torch.Tensor, block: torch.Tensor) -> None:
    block.copy_(tensor, non_blocking=True)


def _pipeline(depth: int, **how: Any) -> SlotPipeline:
    return SlotPipeline(num_slots=depth, slot_shape=[BLOCK_BYTES], dtype=torch.uint8, **how)


def _bodies(copy_ms: float) -> dict[str, Callable[[torch.Tensor], object]]:
    """Return bodies that take as long as a copy of a block."""
    timer = cuda_timer("pipeline")
    cycles = 1_000_000
    torch.cuda._sleep(cycles)
    cycles = int(cycles * copy_ms / timer(lambda: torch.cuda._sleep(cycles)))
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, a, out=out)
    once_ms = statistics.median(timer(lambda: torch.mm(a, a, out=out)) for _ in range(20))
    count = max(1, round(copy_ms / once_ms))

    def gemms(_: torch.Tensor) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return {"sleep": lambda _: torch.cuda._sleep(cycles), f"{count} GEMMs of 2048^3": gemms}


def _copies_ms(blocks: Sequence[torch.Tensor]) -> float:
    slot = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")

    def copies() -> None:
        for block in blocks:
            _bring(slot, block)

    timer = cuda_timer("pipeline")
    copies()
    return statistics.median(timer(copies) for _ in range(5))


def _measured(
    ctx: Context, case: str, name: str, role: str, build: Callable[[], Go], moved: int
) -> Row:
    """Return the row of what `build` returns, which raises unless it computes the right thing."""
    row = Row("pipeline", case, name, role, {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES})
    row.bytes_moved, row.bytes_note = moved, "of blocks"
    try:
        go = build()
        timer = cuda_timer("pipeline")
        samples = []
        for number in range(ctx.rounds + 2):
            torch.cuda.synchronize()
            ms = timer(go)
            if number >= 2:
                samples.append(ms)
        fill(row, Timing(tuple(samples)))
    except Exception as error:  # a peer that fails is a row, not the end of the run
        row.error = error_row("", "", "", "", error).error
    return row


Measure = Callable[[str, str, str, Callable[[], Go], int], Row]


def _checked(pipeline: SlotPipeline, blocks: Sequence[torch.Tensor]) -> SlotPipeline:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, slot in enumerate(pipeline.load(blocks, copy=_bring)):
        wrong += (slot.tensor != number).sum()
    if wrong.item():
        raise ValueError("a body saw another block; not timed")
    return pipeline


def _loads(
    measure: Measure, blocks: list[torch.Tensor], name: str, body: Callable[[torch.Tensor], object]
) -> Iterator[Row]:
    case = f"load, bodies of {name}"
    moved = BLOCKS * BLOCK_BYTES

    def ours(depth: int, **how: Any) -> Go:
        pipeline = _checked(_pipeline(depth, **how), blocks)

        def go() -> None:
            for slot in pipeline.load(blocks, copy=_bring):
                body(slot.tensor)

        return go

    rows = [
        measure(case, f"jitkern, depth {depth}", "ours", partial(ours, depth), moved)
        for depth in DEPTHS
    ]
    streams = partial(ours, BEST_DEPTH, num_streams=BEST_DEPTH)
    rows.append(measure(case, f"jitkern, {BEST_DEPTH} streams", "ours", streams, moved))
    rows.append(measure(case, DOUBLE, "peer", lambda: _double_buffer(blocks, body), moved))
    rows.append(measure(case, IN_TURN, "peer", lambda: _in_turn(blocks, body), moved))
    rows.append(measure(case, LONGER, "ceiling", lambda: _longer(blocks, body), moved))
    compare(rows)
    yield from rows


def _double_buffer(blocks: Sequence[torch.Tensor], body: Callable[[torch.Tensor], object]) -> Go:
    """As it is written by hand: two buffers, a stream, two events for each."""
    slots = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    copies = torch.cuda.Stream()
    ready = [torch.cuda.Event() for _ in slots]
    done = [torch.cuda.Event() for _ in slots]

    def load(number: int) -> None:
        with torch.cuda.stream(copies):
            copies.wait_event(done[number % 2])
            _bring(slots[number % 2], blocks[number])
            ready[number % 2].record(copies)

    def go() -> None:
        compute = torch.cuda.current_stream()
        copies.wait_stream(compute)
        load(0)
        for number in range(len(blocks)):
            if number + 1 < len(blocks):
                load(number + 1)
            compute.wait_event(ready[number % 2])
            body(slots[number % 2])
            done[number % 2].record(compute)

    return go


def _in_turn(blocks: Sequence[torch.Tensor], body: Callable[[torch.Tensor], object]) -> Go:
    slot = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")

    def go() -> None:
        for block in blocks:
            _bring(slot, block)
            body(slot)

    return go


def _longer(blocks: Sequence[torch.Tensor], body: Callable[[torch.Tensor], object]) -> Go:
    """Return the longer of all copies and all bodies, with one more copy: the fill."""
    slot = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")

    def copies() -> None:
        for block in (blocks[0], *blocks):
            _bring(slot, block)

    def bodies() -> None:
        _bring(slot, blocks[0])
        for _ in blocks:
            body(slot)

    timer = cuda_timer("pipeline")
    took = [statistics.median(timer(go) for _ in range(5)) for go in (copies, bodies)]
    return copies if took[0] > took[1] else bodies


def _updates(
    measure: Measure, blocks: list[torch.Tensor], body: Callable[[torch.Tensor], object]
) -> Iterator[Row]:
    """Both engines at once are slower than one alone: that is the ceiling here."""
    case, moved = "update, both directions", 2 * BLOCKS * BLOCK_BYTES
    targets = list(torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory())

    def ours(depth: int) -> Go:
        pipeline = _checked(_pipeline(depth), blocks)
        pairs = list(zip(blocks, targets, strict=True))

        def go() -> None:
            load: Copy = lambda tensor, pair: _bring(tensor, pair[0])  # noqa: E731
            store: Copy = lambda tensor, pair: _take(tensor, pair[1])  # noqa: E731
            for slot in pipeline.update(pairs, load=load, store=store):
                body(slot.tensor)

        return go

    def engines() -> Go:
        slots = torch.empty(2, BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        streams = [torch.cuda.Stream() for _ in range(2)]

        def go() -> None:
            here = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(here)
            for block, target in zip(blocks, targets, strict=True):
                with torch.cuda.stream(streams[0]):
                    _bring(slots[0], block)
                with torch.cuda.stream(streams[1]):
                    _take(slots[1], target)
            for stream in streams:
                here.wait_stream(stream)

        return go

    rows = [
        measure(case, f"jitkern, depth {depth}", "ours", partial(ours, depth), moved)
        for depth in DEPTHS
    ]
    rows.append(measure(case, ENGINES, "ceiling", engines, moved))
    compare(rows)
    yield from rows


def _host(ctx: Context, blocks: list[torch.Tensor]) -> Iterator[Row]:
    """The host's share, of copies and bodies that do nothing: few enough that no queue is full."""
    small = blocks[:BLOCKS]

    def nothing(*_: object) -> None:
        pass

    watched = {"monitor": OverlapMonitor(min_ratio=0)}
    for name, how in (("jitkern", {}), ("jitkern, monitored", watched)):
        pipeline = _pipeline(BEST_DEPTH, **how)
        row = Row("pipeline", HOST, name, "ours", {"blocks": BLOCKS})
        samples = []
        for number in range(10 * ctx.rounds):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in pipeline.load(small, copy=nothing):
                pass
            if number >= 5:
                samples.append((time.perf_counter() - begin) * 1e3 / BLOCKS)
        fill(row, Timing(tuple(samples)))
        row.host_us = row.median_us
        yield row
