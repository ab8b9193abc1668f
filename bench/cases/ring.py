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
# SMs of a server, descriptors and bytes of each; 0 SMs: a call for each push instead.
SERVED = [(0, 1, 4096), (1, 1, 4096), (0, 128, 256), (1, 128, 256), (8, 128, 256)]
SERVED += [(0, 128, 4096), (8, 128, 4096)]


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
    for num_sms, pieces, piece_bytes in SERVED:
        sms = "1 SM" if num_sms == 1 else f"{num_sms} SMs"
        way = f"served by {sms}" if num_sms else "push, call and wait"
        samples = _served(dst, src, num_sms, _descriptors(pieces, piece_bytes))
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
            samples.append(1e3 * (time.perf_counter() - begin))
    return samples[20:]
