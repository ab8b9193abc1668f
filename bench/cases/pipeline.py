"""64 blocks of 4 MB through a few slots, with bodies that take as long as the copies.

The ceiling is what the longer side takes alone, and the first copy (for loads), which nothing can
hide. Peers: a double buffer written by hand with torch's streams and events, and copies and bodies
one after the other. Bodies are torch.cuda._sleep, which leaves the memory alone, or a GEMM.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.case import Case, Context, Impl, Row, Run
from bench.measure import measure
from bench.timing import cuda_timer
from jitkern.offload import SlotPipeline

NEEDS_GPU = True
BLOCKS, BLOCK_BYTES = 64, 4 << 20
DEPTHS = (1, 2, 4, 8)
BEST_DEPTH = 4

Blocks = list[torch.Tensor]
Body = Callable[[torch.Tensor], object]


def run(ctx: Context) -> Iterator[Row]:
    blocks = list(torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory())
    for number, block in enumerate(blocks):
        block.fill_(number)
    bodies = _bodies(blocks)
    for name, body in bodies.items():
        impls = {f"jitkern, depth {n}": ("ours", partial(_load, blocks, body, n)) for n in DEPTHS}
        impls["torch, double buffer"] = ("peer", partial(_double_buffer, blocks, body))
        impls["one behind the other"] = ("peer", partial(_in_turn, blocks, body))
        impls["the longer side alone"] = ("ceiling", partial(_longer, blocks, body))
        yield from _measured(ctx, f"load, bodies of {name}", impls, 1)
    impls = {
        f"jitkern, depth {BEST_DEPTH}": ("ours", partial(_update, blocks, bodies["sleep"])),
        "both engines at once, no bodies": ("ceiling", partial(_both_engines, blocks)),
    }
    yield from _measured(ctx, "update, both directions", impls, 2)
    host = [Impl("jitkern", "ours", _empty_loads)]
    yield from measure(ctx, Case("pipeline", f"host, {BLOCKS} iterations", host, clock="host"))


def _measured(ctx: Context, name: str, impls: dict[str, Any], ways: int) -> list[Row]:
    made = [Impl(impl, *how, graph=False, check=False) for impl, how in impls.items()]
    return measure(ctx, Case("pipeline", name, made, bytes_moved=ways * BLOCKS * BLOCK_BYTES))


def _bodies(blocks: Blocks) -> dict[str, Body]:
    """Return bodies that take as long as a copy of a block."""
    timer, cycles = cuda_timer(), 1_000_000
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def ms(call: Callable[[], object]) -> float:
        return statistics.median(timer(call) for _ in range(30))

    copy_ms = ms(partial(_copy, _slot(), blocks[0]))
    cycles = int(cycles * copy_ms / ms(partial(torch.cuda._sleep, cycles)))
    count = max(1, round(copy_ms / ms(partial(torch.mm, a, a, out=out))))

    def gemms(_: torch.Tensor) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return {"sleep": lambda _: torch.cuda._sleep(cycles), f"{count} GEMMs of 2048^3": gemms}


def _slot() -> torch.Tensor:
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src, non_blocking=True)


def _pipeline(depth: int = BEST_DEPTH) -> SlotPipeline:
    return SlotPipeline(num_slots=depth, slot_shape=[BLOCK_BYTES], dtype=torch.uint8)


def _load(blocks: Blocks, body: Body, depth: int) -> Run:
    """Return loads through a pipeline; ValueError if a body sees another block."""
    pipeline = _pipeline(depth)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, slot in enumerate(pipeline.load(blocks, copy=_copy)):
        wrong += (slot.tensor != number).sum()
    if wrong.item():
        raise ValueError("a body saw another block; not timed")

    def go(_: object) -> None:
        for slot in pipeline.load(blocks, copy=_copy):
            body(slot.tensor)

    return go


def _empty_loads() -> Run:
    """Return loads without copies and bodies: what iterations cost the host."""
    pipeline, blocks = _pipeline(), range(BLOCKS)

    def go(_: object) -> None:
        for _ in pipeline.load(blocks, copy=lambda tensor, block: None):
            pass

    return go


def _double_buffer(blocks: Blocks, body: Body) -> Run:
    """As it is written by hand: two buffers, a stream, two events for each."""
    slots, copies = [_slot(), _slot()], torch.cuda.Stream()
    ready, done = ([torch.cuda.Event() for _ in slots] for _ in range(2))

    def load(number: int) -> None:
        with torch.cuda.stream(copies):
            copies.wait_event(done[number % 2])
            _copy(slots[number % 2], blocks[number])
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
            _copy(slot, block)
            body(slot)

    return go


def _longer(blocks: Blocks, body: Body) -> Run:
    """Return the longer of all copies and all bodies, with one more copy: the fill."""
    slot, timer = _slot(), cuda_timer()

    def copies(_: object = None) -> None:
        for block in (blocks[0], *blocks):
            _copy(slot, block)

    def bodies(_: object = None) -> None:
        _copy(slot, blocks[0])
        for _ in blocks:
            body(slot)

    return max(copies, bodies, key=lambda go: statistics.median(timer(go) for _ in range(5)))


def _update(blocks: Blocks, body: Body) -> Run:
    """Return loads and stores through a pipeline; ValueError if a block comes back as another."""
    targets = torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory()
    pipeline, pairs = _pipeline(), list(zip(blocks, targets, strict=True))

    def go(_: object) -> None:
        for slot in pipeline.update(
            pairs,
            load=lambda tensor, pair: _copy(tensor, pair[0]),
            store=lambda tensor, pair: _copy(pair[1], tensor),
        ):
            body(slot.tensor)

    go(None)
    torch.cuda.synchronize()
    if not all(torch.equal(block, target) for block, target in pairs):
        raise ValueError("a block came back as another; not timed")
    return go


def _both_engines(blocks: Blocks) -> Run:
    """Return copies both ways at once, which is slower than one way."""
    loaded, stored, side = _slot(), _slot(), torch.cuda.Stream()
    targets = torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8).pin_memory()

    def go(_: object) -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for block in blocks:
                _copy(loaded, block)
        for target in targets:
            _copy(target, stored)
        here.wait_stream(side)

    return go
