"""What copies cost a model: a decode step beside each mover, and the mover beside the step.

The step is that of 8 layers of a Llama-8B in a CUDA graph on a high-priority stream: weights are
read once, then the keys and values of 4,096 tokens a sequence. Copies run on a low-priority stream,
queued by a thread of their own, from before the first timed step until after the last.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import jitkern
from bench import peers
from bench.case import Context, Row, error_text
from bench.peers import host_pool

NEEDS_GPU = True

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 8, 4096, 32, 8, 128, 14336, 128256
TOKENS = 4096
BATCHES = (1, 32, 128)
WINDOW_MS = 400  # timed steps
KV_LAYERS, BLOCKS, PIECE = 32, 128, 16 << 10  # one call moves 64 MiB
CALL_BYTES = KV_LAYERS * BLOCKS * PIECE
ROWS, ROW_BYTES = 65_536, 656
SETS = 8  # sets of pairs, used in turn
QUEUED = 4  # calls under way: the next one is always there

Call = Callable[[], object]


class Decode:
    """The step of one batch size, captured."""

    def __init__(self, weights: list[list[torch.Tensor]], head: torch.Tensor, batch: int) -> None:
        self.stream = torch.cuda.Stream(priority=-1)
        x = torch.randn(batch, HIDDEN, device="cuda", dtype=torch.bfloat16) / 8
        keys = torch.randn(2, batch, KV_HEADS, TOKENS, HEAD_DIM, device="cuda", dtype=x.dtype)
        width = HEADS * HEAD_DIM

        def step() -> None:
            # One cache for all layers: 128 sequences of 8 would fill the GPU. It is larger than L2.
            h = x
            for qkv, out, up, down in weights:
                q = (functional.rms_norm(h, (HIDDEN,)) @ qkv)[:, :width]
                # Query heads of one KV head as its queries: keys are read once.
                q = q.view(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
                attended = functional.scaled_dot_product_attention(q, keys[0], keys[1])
                h = h + attended.reshape(batch, width) @ out
                gate, value = (functional.rms_norm(h, (HIDDEN,)) @ up).chunk(2, 1)
                h = h + (functional.silu(gate) * value) @ down
            h @ head

        with torch.cuda.stream(self.stream):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            step()

    def step_ms(self, count: int) -> tuple[list[float], torch.cuda.Event]:
        """Replay `count` steps; return the ms of each, and an event where the first began."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            events[0].record()
            for event in events[1:]:
                self.graph.replay()
                event.record()
        events[-1].synchronize()
        pairs = itertools.pairwise(events)
        return [a.elapsed_time(b) for a, b in pairs], events[0]


def make_weights() -> tuple[list[list[torch.Tensor]], torch.Tensor]:

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / rows**0.5

    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = ((HIDDEN, width), (HEADS * HEAD_DIM, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))
    return [[weight(*shape) for shape in shapes] for _ in range(LAYERS)], weight(HIDDEN, VOCAB)


@dataclass(frozen=True)
class Way:
    """A mover: calls of `num_bytes`, each on a stream of its own."""

    name: str
    num_bytes: int
    calls: list[Call]
    role: str = "ours"


@contextmanager
def queued(way: Way) -> Iterator[list[list[torch.cuda.Event]]]:
    """Keep a way's calls queued; give the events after each of them, by stream."""
    ended: list[list[torch.cuda.Event]] = [[] for _ in way.calls]
    stop = threading.Event()

    def run(call: Call, events: list[torch.cuda.Event]) -> None:
        with torch.cuda.stream(torch.cuda.Stream(priority=0)):
            while not stop.is_set():
                call()
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()
                if len(events) > QUEUED:
                    events[-1 - QUEUED].synchronize()

    with ThreadPoolExecutor() as threads:
        running = [threads.submit(run, *pair) for pair in zip(way.calls, ended, strict=True)]
        try:
            while any(len(events) <= 2 * QUEUED for events in ended):
                for one in running:
                    if one.done():
                        one.result()  # raises what its call did
                time.sleep(0.001)
            yield ended
        finally:
            stop.set()
    torch.cuda.synchronize()


def gb_s(
    way: Way,
    ended: list[list[torch.cuda.Event]],
    begin: torch.cuda.Event | None = None,
    ms: float = math.inf,
) -> float:
    """Return the rate of the calls that ended within `ms` of an event; by default of all."""
    total = 0.0
    for events in ended:
        at = [(begin or events[QUEUED]).elapsed_time(event) for event in events[QUEUED:]]
        inside = [t for t in at if 0 <= t <= ms]
        if len(inside) > 1:
            total += (len(inside) - 1) * way.num_bytes / (inside[-1] - inside[0]) / 1e6
    return total


def run(ctx: Context) -> Iterator[Row]:
    ways = [Way("nothing", 0, [], "floor"), *movers(ctx.quick)]
    alone = {}
    for way in ways[1:]:
        with queued(way) as ended:
            time.sleep(0.1)
        alone[way.name] = gb_s(way, ended)
    weights = make_weights()
    for batch in BATCHES[1:2] if ctx.quick else BATCHES:
        decode = Decode(*weights, batch)
        count = max(20, int(WINDOW_MS / statistics.median(decode.step_ms(20)[0])))
        base = (0.0, 0.0)  # median and p99 of the step alone
        for way in ways:
            ctx.say(f"beside: batch {batch}, {way.name}")
            row = Row("beside", f"decode step, batch {batch}", way.name, way.role)
            try:
                with queued(way) as ended:
                    times, begin = decode.step_ms(count)
                step, p99 = statistics.median(times), sorted(times)[int(0.99 * len(times))]
                base = base if way.calls else (step, p99)
                row.median_us = step * 1e3
                row.gb_s = gb_s(way, ended, begin, sum(times)) or None
                row.params = {
                    "batch": batch,
                    "slowdown": step / base[0],
                    "p99_slowdown": p99 / base[1],
                    "gb_s_alone": alone.get(way.name, 0.0),
                    "lost_ms_per_gb": (step - base[0]) / (row.gb_s * step / 1e3) if row.gb_s else 0,
                }
                row.note = ", ".join(f"{k} {v:.2f}" for k, v in list(row.params.items())[1:])
            except Exception as error:  # a way that fails is a row, not the end of the run
                row.error = error_text(error)
            yield row
        del decode
        torch.cuda.empty_cache()


def movers(quick: bool = False) -> Iterator[Way]:
    """Yield the ways of jitkern by their defaults and by number of SMs, and the copy engine."""
    pool = host_pool.allocated(4)
    cache = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    memcpy = peers.host().copy_bytes
    engine = [partial(memcpy, cache, pool, CALL_BYTES), partial(memcpy, pool, cache, CALL_BYTES)]
    # Blocks to the GPU and to the host, by whether layers come first in the pool and in the cache.
    layer_first, page_first, pages = (
        [partial(_copy_blocks, pool, cache, *dims, back) for back in (False, True)]
        for dims in ((1, 1), (0, 1), (0, 0))
    )
    for name, call in zip(("h2d", "d2h"), engine, strict=True):
        yield Way(f"engine, contiguous, {name}", CALL_BYTES, [call], "ceiling")
    yield Way("engine, contiguous, both", CALL_BYTES, engine, "ceiling")
    for at, way in enumerate(("h2d", "d2h")):
        named = {f"copy_blocks {way}": layer_first[at]()}
        for sms in () if quick else (1, 2, 3, 4, 8):
            named[f"copy_blocks {way}, {sms} SMs"] = layer_first[at](on_gpu=True, num_sms=sms)
        named[f"copy_blocks {way}, engine"] = layer_first[at](method="engine")
        named[f"host page first, {way}"] = page_first[at]()
        named[f"pages, {way}"] = pages[at]()
        named[f"pages, {way}, engine"] = pages[at](method="engine")
        for name, call in named.items():
            yield Way(name, CALL_BYTES, [call])
    yield Way("copy_blocks both", CALL_BYTES, [make() for make in layer_first])
    yield Way("host page first, both", CALL_BYTES, [make() for make in page_first])
    yield from _rows(pool, cache)
    yield _swap_in(pool, cache)


def _copy_blocks(
    pool: torch.Tensor,
    cache: torch.Tensor,
    host_dim: int,
    cache_dim: int,
    back: bool,
    on_gpu: bool = False,
    **how: Any,
) -> Call:
    """Return a call that copies 128 random blocks, others each time, to the GPU or back."""
    count = cache.numel() // (KV_LAYERS * PIECE)
    sides = []
    for memory, dim in ((pool, host_dim), (cache, cache_dim)):
        shape = (KV_LAYERS, count, PIECE) if dim == 1 else (count, KV_LAYERS, PIECE)
        sides.append((memory[: count * KV_LAYERS * PIECE].view(shape), dim))
    (src, src_dim), (dst, dst_dim) = reversed(sides) if back else sides
    sets = [torch.stack([torch.randperm(count)[:BLOCKS] for _ in range(2)], 1) for _ in range(SETS)]
    if on_gpu:
        sets = [pairs.cuda() for pairs in sets]
    turn = itertools.cycle(sets)
    how |= {"dst_block_dim": dst_dim, "src_block_dim": src_dim}
    return lambda: jitkern.copy_blocks(src, dst, next(turn), **how)


def _rows(pool: torch.Tensor, cache: torch.Tensor) -> Iterator[Way]:
    """Yield ways of rows of 656 bytes scattered over the pool of the host."""
    host, gpu = (
        memory[: memory.numel() // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES)
        for memory in (pool, cache)
    )
    for op, sides in ((jitkern.h2d_gather, (host, gpu)), (jitkern.d2h_scatter, (gpu, host))):
        sets = [
            torch.stack([torch.randperm(len(side))[:ROWS] for side in sides], 1).cuda()
            for _ in range(SETS)
        ]
        turn = itertools.cycle(sets)
        call = partial(lambda op, sides, turn: op(*sides, next(turn)), op, sides, turn)
        yield Way(op.__name__, ROWS * ROW_BYTES, [call])


def _swap_in(pool: torch.Tensor, cache: torch.Tensor) -> Way:
    """Return lists of 2,048 rows for 32 states, of which 5 % are missing in 8,192 slots."""
    states, slots, length, missing = 32, 8192, 2048, 0.05
    rows_each = round(slots / (1 - missing))  # asked for at random, so 95 % of them are held
    residency = jitkern.offload.ResidencyMap(states, slots, states * rows_each)
    host = pool[: states * rows_each * ROW_BYTES].view(-1, ROW_BYTES)
    gpu = cache[: states * slots * ROW_BYTES].view(-1, ROW_BYTES)
    first = torch.arange(states, device="cuda").unsqueeze(1) * rows_each
    sets = [
        (torch.rand(states, rows_each, device="cuda").argsort(1)[:, :length] + first).contiguous()
        for _ in range(SETS * SETS)
    ]
    out = torch.empty_like(sets[0])
    for rows in sets:  # until the slots are full
        residency.swap_in(host, gpu, rows, out)
    turn = itertools.cycle(sets)
    num_bytes = round(states * length * missing) * ROW_BYTES

    def call() -> None:
        residency.swap_in(host, gpu, next(turn), out)

    return Way("swap_in, 32 lists, 5 % missing", num_bytes, [call])
