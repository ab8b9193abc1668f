"""A DescriptorRing consumed by a GPU: 128 packets of 4 KiB by calls in a graph, and by a server.

Pushes are made before each replay of a graph of calls: a ring leaves nothing else to the GPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

import jitkern
from bench import peers
from bench.case import Context, Row
from bench.measure import fill
from bench.timing import Timing, cuda_replay, cuda_timer
from jitkern.offload import DescriptorRing

NEEDS_GPU = True
CALLS, ROUNDS = 64, 30
# Whether a server consumes or a call per push; descriptors; bytes of each.
WAITED = [(False, 1, 4096), (True, 1, 4096), (False, 128, 256), (True, 128, 256)]
WAITED += [(False, 128, 4096), (True, 128, 4096)]


def run(ctx: Context) -> Iterator[Row]:
    src = torch.randint(256, (128 * 4096,), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    descriptors = _descriptors(128, 4096)
    in_graph = "128 x 4096 B, a push each, in a graph"
    with DescriptorRing(CALLS, 2048) as ring:

        def push() -> None:
            ring.push(descriptors)

        def unpack() -> None:
            jitkern.unpack(src, dst, ring)

        yield _row(in_graph, "jitkern, mapped", _replays(unpack, push))
        yield _row("nothing pushed, in a graph", "jitkern, mapped", _replays(unpack))
    if not torch.equal(dst, torch.cat([src[at : at + 4096] for at in descriptors[:, 0].tolist()])):
        raise AssertionError("ring: other bytes than were pushed")
    empty = peers.empty_launch()
    yield _row(in_graph, "empty kernel", _replays(lambda: empty(None)), "floor")
    for is_served, pieces, piece_bytes in WAITED:
        way = "served by 1 SM" if is_served else "push, call and wait"
        samples = _waits(dst, src, is_served, _descriptors(pieces, piece_bytes))
        yield _row(f"{way}, {pieces} x {piece_bytes} B", "jitkern", samples)
    jitkern.check()


def _descriptors(pieces: int, piece_bytes: int) -> torch.Tensor:
    order = torch.randperm(pieces, generator=torch.Generator().manual_seed(1))
    lengths = torch.full((pieces,), piece_bytes)
    return torch.stack([order * piece_bytes, torch.arange(pieces) * piece_bytes, lengths], 1)


def _row(case: str, impl: str, samples_ms: list[float], role: str = "ours") -> Row:
    row = Row("ring", case, impl, role)
    fill(row, Timing(tuple(samples_ms)))
    return row


def _replays(
    call: Callable[[], object], before_each: Callable[[], object] | None = None
) -> list[float]:
    """Return milliseconds of a call, in replays of a graph of CALLS of them."""
    call()
    torch.cuda.synchronize()
    graph, timer, samples = cuda_replay([call] * CALLS), cuda_timer(), []
    for _ in range(ROUNDS):
        for _ in range(CALLS if before_each else 0):
            before_each()
        torch.cuda.synchronize()
        samples.append(timer(graph.run) / CALLS)
    return samples[ROUNDS // 6 :]


def _waits(
    dst: torch.Tensor, src: torch.Tensor, is_served: bool, descriptors: torch.Tensor
) -> list[float]:
    samples = []
    with DescriptorRing() as ring, ExitStack() as stack:
        if is_served:
            stack.enter_context(ring.serve(src, dst))
        for _ in range(500):
            begin = time.perf_counter()
            ticket = ring.push(descriptors)
            if not is_served:
                jitkern.unpack(src, dst, ring)
            ring.wait(ticket)
            samples.append(1e3 * (time.perf_counter() - begin))
    return samples[20:]
