"""64 blocks of 4 MB through a few slots, with bodies that take as long as the copies.

The ceiling is what the longer side takes alone, and the first copy (for loads), which nothing can
hide. Peers: a double buffer written by hand with torch's streams and events, and copies and bodies
one after the other. Bodies are torch.cuda._sleep, which leaves the memory alone, or a GEMM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.cases.common import lacks_gpu
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure
from jitkern.bench.timing import cuda_timer
from jitkern.offload import OverlapMonitor, SlotPipeline

BLOCKS, BLOCK_BYTES = 64, 4 << 20
DEPTHS = (1, 2, 4, 8)
BEST_DEPTH = 4

Blocks = list[torch.Tensor]
Body = Callable[[torch.Tensor], object]


def run(ctx: Context) -> Iterator[Row]:
    if lacks_gpu(ctx, "pipeline"):
        return
    blocks = list(torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory())
    for number, block in enumerate(blocks):
        block.fill_(number)
    bodies = _bodies(blocks)
    for name, body in bodies.items():
        yield from measure(ctx, _case(f"load, bodies of {name}", _loads(blocks, body)))
    yield from measure(ctx, _case("update, both directions", _updates(blocks, bodies["sleep"]), 2))
    watched = OverlapMonitor(min_ratio=0)
    impls = [
        Impl("jitkern", "ours", lambda: _load(blocks, None, _nothing)),
        Impl("jitkern, monitored", "ours", lambda: _load(blocks, None, _nothing, monitor=watched)),
    ]
    name = f"host, {BLOCKS} iterations"
    yield from measure(ctx, Case("pipeline", name, impls, clock="host"))


def _case(name: str, impls: dict[str, tuple[str, Callable[[], Run]]], ways: int = 1) -> Case:
    return Case(
        "pipeline",
        name,
        [
            Impl(impl, role, build, graph=False, check=False)
            for impl, (role, build) in impls.items()
        ],
        params={"blocks": BLOCKS, "block_bytes": BLOCK_BYTES},
        bytes_moved=ways * BLOCKS * BLOCK_BYTES,
        bytes_note="of blocks",
    )


def _bodies(blocks: Blocks) -> dict[str, Body]:
    """Return bodies that take as long as a copy of a block."""
    timer = cuda_timer("pipeline")
    slot = _slot()
    _bring(slot, blocks[0])
    copy_ms = statistics.median(timer(partial(_bring, slot, block)) for block in blocks)
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


def _slot() -> torch.Tensor:
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")


def _bring(tensor: torch.Tensor, block: torch.Tensor) -> None:
    tensor.copy_(block, non_blocking=True)


def _take(tensor: torch.Tensor, block: torch.Tensor) -> None:
    block.copy_(tensor, non_blocking=True)


def _nothing(*_: object) -> None:
    pass


# -- loads -----------------------------------------------------------------------------------------


def _loads(blocks: Blocks, body: Body) -> dict[str, tuple[str, Callable[[], Run]]]:
    ours = {
        f"jitkern, depth {depth}": ("ours", partial(_load, blocks, _bring, body, depth))
        for depth in DEPTHS
    }
    return {
        **ours,
        "torch, double buffer": ("peer", partial(_double_buffer, blocks, body)),
        "one behind the other": ("peer", partial(_in_turn, blocks, body)),
        "the longer side alone": ("ceiling", partial(_longer, blocks, body)),
    }


def _load(
    blocks: Blocks,
    copy: Callable[..., object] | None,
    body: Body,
    depth: int = BEST_DEPTH,
    **how: Any,
) -> Run:
    """Return loads through a pipeline; ValueError where a body sees another block."""
    pipeline = SlotPipeline(num_slots=depth, slot_shape=[BLOCK_BYTES], dtype=torch.uint8, **how)
    if copy is not None:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number, slot in enumerate(pipeline.load(blocks, copy=copy)):
            wrong += (slot.tensor != number).sum()
        if wrong.item():
            raise ValueError("a body saw another block; not timed")

    def go(_: object) -> None:
        for slot in pipeline.load(blocks, copy=copy or _nothing):
            body(slot.tensor)

    return go


def _double_buffer(blocks: Blocks, body: Body) -> Run:
    """As it is written by hand: two buffers, a stream, two events for each."""
    slots = [_slot() for _ in range(2)]
    copies = torch.cuda.Stream()
    ready, done = ([torch.cuda.Event() for _ in slots] for _ in range(2))

    def load(number: int) -> None:
        with torch.cuda.stream(copies):
            copies.wait_event(done[number % 2])
            _bring(slots[number % 2], blocks[number])
            ready[number % 2].record(copies)

    def go(_: object) -> None:
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


def _in_turn(blocks: Blocks, body: Body) -> Run:
    slot = _slot()

    def go(_: object) -> None:
        for block in blocks:
            _bring(slot, block)
            body(slot)

    return go


def _longer(blocks: Blocks, body: Body) -> Run:
    """Return the longer of all copies and all bodies, with one more copy: the fill."""
    slot = _slot()

    def copies(_: object = None) -> None:
        for block in (blocks[0], *blocks):
            _bring(slot, block)

    def bodies(_: object = None) -> None:
        _bring(slot, blocks[0])
        for _ in blocks:
            body(slot)

    timer = cuda_timer("pipeline")
    took = [statistics.median(timer(go) for _ in range(5)) for go in (copies, bodies)]
    return copies if took[0] > took[1] else bodies


# -- both directions -------------------------------------------------------------------------------


def _updates(blocks: Blocks, body: Body) -> dict[str, tuple[str, Callable[[], Run]]]:
    """Both engines at once are slower than one alone: that is the ceiling here."""
    targets = list(torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory())
    pairs = list(zip(blocks, targets, strict=True))

    def ours(depth: int) -> Run:
        pipeline = SlotPipeline(num_slots=depth, slot_shape=[BLOCK_BYTES], dtype=torch.uint8)

        def load(tensor: torch.Tensor, pair: Any) -> None:
            _bring(tensor, pair[0])

        def store(tensor: torch.Tensor, pair: Any) -> None:
            _take(tensor, pair[1])

        def go(_: object) -> None:
            for slot in pipeline.update(pairs, load=load, store=store):
                body(slot.tensor)

        go(None)
        torch.cuda.synchronize()
        if not all(torch.equal(block, target) for block, target in pairs):
            raise ValueError("a block came back as another; not timed")
        return go

    def engines() -> Run:
        slots = [_slot() for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]

        def go(_: object) -> None:
            here = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(here)
            for block, target in pairs:
                with torch.cuda.stream(streams[0]):
                    _bring(slots[0], block)
                with torch.cuda.stream(streams[1]):
                    _take(slots[1], target)
            for stream in streams:
                here.wait_stream(stream)

        return go

    depths = {f"jitkern, depth {depth}": ("ours", partial(ours, depth)) for depth in DEPTHS}
    return {**depths, "both engines at once, no bodies": ("ceiling", engines)}
