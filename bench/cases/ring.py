"""A DescriptorRing consumed by a GPU: 128 packets of 4 KiB, what a push and a call take, a server.

In a graph a call is timed together with what a push leaves to the GPU: of a ring in device memory
the copy of its slot, of a mapped one nothing. Pushes themselves are made in front of each replay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

import jitkern
from bench import peers
from jitkern.bench.case import Context, Row
from jitkern.offload import DescriptorRing

PEERS = ()
PLOTS = ()

CALLS, ROUNDS = 64, 30
EMPTY = "empty kernel"
IN_GRAPH = "128 x 4096 B, a push each, in a graph"
NOTHING = "nothing pushed, in a graph"
HOST = "host time, 128 descriptors"
PUSH, CALL, BOTH = "push", "unpack", "push and unpack"
# SMs of a server, descriptors and bytes of each; 0 SMs: a call for each push instead.
SERVED = [(0, 1, 4096), (1, 1, 4096), (0, 128, 256), (1, 128, 256), (8, 128, 256)]
SERVED += [(0, 128, 4096), (8, 128, 4096)]


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("ring: needs a GPU, skipped")
        return
    src = torch.randint(256, (128 * 4096,), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    descriptors = _descriptors(128, 4096)
    wanted = torch.cat([src[at : at + 4096] for at in descriptors[:, 0].tolist()])
    for memory in ("mapped",):
        name = f"jitkern, {memory}"
        ctx.say(f"ring: {memory}")
        for case, samples in _in_graph(memory, dst, src, descriptors).items():
            yield _row(case, name, "ours", samples)
        if not torch.equal(dst, wanted):
            raise AssertionError("ring: other bytes than were pushed")
        dst.zero_()
        for what, samples in _host(memory, dst, src, descriptors).items():
            yield _row(HOST, f"{what}, {memory}", "ours", samples)
    empty = peers.empty_launch()
    yield _row(IN_GRAPH, EMPTY, "floor", _replays(lambda: empty(None), lambda: None))
    ctx.say("ring: served")
    for num_sms, pieces, piece_bytes in SERVED:
        samples = _served(dst, src, num_sms, _descriptors(pieces, piece_bytes))
        yield _row(_served_name(num_sms, pieces, piece_bytes), "jitkern", "ours", samples)
    jitkern.check()


def _descriptors(pieces: int, piece_bytes: int) -> torch.Tensor:
    order = torch.randperm(pieces, generator=torch.Generator().manual_seed(1))
    lengths = torch.full((pieces,), piece_bytes)
    return torch.stack([order * piece_bytes, torch.arange(pieces) * piece_bytes, lengths], 1)


def _served_name(num_sms: int, pieces: int, piece_bytes: int) -> str:
    if num_sms == 0:
        return f"push, call and wait, {pieces} x {piece_bytes} B"
    sms = "1 SM" if num_sms == 1 else f"{num_sms} SMs"
    return f"served by {sms}, {pieces} x {piece_bytes} B"


def _row(case: str, impl: str, role: str, samples: list[float]) -> Row:
    quarters = statistics.quantiles(samples, n=4)
    return Row(
        "ring", case, impl, role, median_us=statistics.median(samples),
        iqr_us=quarters[2] - quarters[0], min_us=min(samples), bytes_note="",
    )  # fmt: skip


def _replays(call: Callable[[], object], prepare: Callable[[], object]) -> list[float]:
    """Return microseconds of a call, in replays of a graph of them, each prepared before."""
    call()
    torch.cuda.synchronize()
    graph, samples = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(ROUNDS):
        prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(1e3 * begin.elapsed_time(end) / CALLS)
    return samples[ROUNDS // 6 :]


def _in_graph(
    memory: str, dst: torch.Tensor, src: torch.Tensor, descriptors: torch.Tensor
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with DescriptorRing(CALLS, 2048) as ring:

        def push_all() -> None:
            for _ in range(CALLS):
                ring.push(descriptors)

        def call() -> None:
            jitkern.unpack(src, dst, ring)

        def prepare() -> None:
            if ring.num_pushed == CALLS and not ring.done(0):
                return  # those of the capture
            push_all()

        found[IN_GRAPH] = _replays(call, prepare)
        if memory == "mapped":
            found[NOTHING] = _replays(call, lambda: None)
    return found


def _host(
    memory: str, dst: torch.Tensor, src: torch.Tensor, descriptors: torch.Tensor
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {PUSH: [], CALL: [], BOTH: []}
    with DescriptorRing(16, 2048) as ring:

        def push() -> None:
            ring.push(descriptors)

        def call() -> None:
            jitkern.unpack(src, dst, ring)

        def both() -> None:
            push()
            call()

        for _ in range(200):
            for name, one in ((PUSH, push), (CALL, call), (BOTH, both)):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(8):
                    one()
                found[name].append((time.perf_counter() - begin) / 8 * 1e6)
    return {name: samples[20:] for name, samples in found.items()}


def _served(
    dst: torch.Tensor, src: torch.Tensor, num_sms: int, descriptors: torch.Tensor
) -> list[float]:
    samples = []
    with DescriptorRing() as ring, ExitStack() as stack:
        if num_sms > 0:
            stack.enter_context(ring.serve(src, dst, num_sms=num_sms))
        for _ in range(500):
            begin = time.perf_counter()
            ticket = ring.push(descriptors)
            if num_sms == 0:
                jitkern.unpack(src, dst, ring)
            ring.wait(ticket)
            samples.append(1e6 * (time.perf_counter() - begin))
    return samples[20:]
