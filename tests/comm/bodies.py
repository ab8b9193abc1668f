"""Calls of a communicator, made by all ranks over any transport, and compared with plain PyTorch.

The inputs of all ranks are known to each: small whole numbers, so that sums are exact in any dtype
and order. A rank raises AssertionError for a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import torch

from jitkern.comm import Communicator

MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64)
REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
REDUCED += [torch.int32, torch.int64, torch.uint8, torch.int8]
SHAPES = ((5, 7), (), (1001,))
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "avg": lambda x: x.sum(0) / len(x),
}


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the inputs of all ranks: 1, 2 or 3."""
    generator = torch.Generator().manual_seed(size + len(shape))
    return torch.randint(1, 4, (size, *shape), generator=generator).to(dtype)


def same(result: torch.Tensor, expected: torch.Tensor, *context: object) -> None:
    # An average is 1 / 3 of a sum, or by NCCL a sum of rounded thirds.
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2, msg=str(context))


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    for dtype in dtypes:
        for shape in SHAPES if dtype == torch.float32 else SHAPES[:1]:
            yield dtype, shape


def reductions(
    size: int, *more: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[torch.dtype, str, tuple[int, ...]]]]:
    """Yield the inputs of all ranks, their reduction, and the case."""
    for dtype, shape in cases(REDUCED):
        every = inputs(size, (*more, *shape), dtype)
        for op, reduce in REDUCTIONS.items():
            if op == "prod" and dtype.itemsize == 1 and size > 4:
                continue  # 3 to the power of `size` is no int8
            yield every, reduce(every.double()).to(dtype), (dtype, op, shape)


def all_reduce(comm: Communicator, device: torch.device) -> None:
    for every, expected, (dtype, op, shape) in reductions(comm.world_size):
        x = every[comm.rank].clone().to(device)
        comm.all_reduce(x, op)
        same(x, expected, dtype, op, shape)
    nan = torch.full((5,), float("nan") if comm.rank == 0 else 1.0, device=device)
    comm.all_reduce(nan)
    assert nan.isnan().all()


def all_gather(comm: Communicator, device: torch.device) -> None:
    for dtype, shape in cases(MOVED):
        expected = inputs(comm.world_size, shape, dtype)
        x = expected[comm.rank].clone().to(device)
        output = torch.zeros_like(expected, device=device)
        comm.all_gather(output, x)
        same(output, expected, dtype, shape)
        output.zero_()
        output[comm.rank] = x
        comm.all_gather(output, output[comm.rank])
        same(output, expected, dtype, shape, "in place")


def reduce_scatter(comm: Communicator, device: torch.device) -> None:
    for every, expected, (dtype, op, shape) in reductions(comm.world_size, comm.world_size):
        x = every[comm.rank].clone().to(device)
        output = torch.zeros(shape, dtype=dtype, device=device)
        comm.reduce_scatter(output, x, op)
        same(output, expected[comm.rank], dtype, op, shape)
        same(x, every[comm.rank], "not written to")
        comm.reduce_scatter(x[comm.rank], x, op)
        same(x[comm.rank], expected[comm.rank], dtype, op, shape, "in place")


def broadcast(comm: Communicator, device: torch.device) -> None:
    for dtype, shape in cases(MOVED):
        every = inputs(comm.world_size, shape, dtype)
        for src in range(comm.world_size):
            x = every[comm.rank].clone().to(device)
            comm.broadcast(x, src)
            same(x, every[src], dtype, shape, src)


def send_recv(comm: Communicator, device: torch.device) -> None:
    """Messages of one path come in their order."""
    for src, dst in permutations(range(comm.world_size), 2):
        for dtype, shape in cases(MOVED):
            message = inputs(comm.world_size, shape, dtype)[src]
            if comm.rank == src:
                comm.send(message.to(device), dst)
            elif comm.rank == dst:
                x = torch.zeros(shape, dtype=dtype, device=device)
                comm.recv(x, src)
                same(x, message, dtype, src, dst)


def empty(comm: Communicator, device: torch.device) -> None:
    """Without items nothing is done, and later calls still work."""
    none = torch.zeros(0, 3, device=device)
    comm.all_reduce(none)
    comm.all_gather(torch.zeros(0, device=device), none)
    comm.reduce_scatter(torch.zeros(0, device=device), none)
    comm.broadcast(none, comm.world_size - 1)
    if comm.world_size > 1 and comm.rank == 0:
        comm.send(none, 1)
    elif comm.rank == 1:
        comm.recv(none, 0)
    x = torch.ones(2, device=device)
    comm.all_reduce(x)
    assert x.tolist() == [comm.world_size] * 2


def large(comm: Communicator, device: torch.device) -> None:
    x = torch.full((1 << 21,), float(comm.rank + 1), device=device)
    comm.all_reduce(x)
    assert (x == sum(range(1, comm.world_size + 1))).all()


CALLS = (all_reduce, all_gather, reduce_scatter, broadcast, send_recv, empty, large)
BODIES = {body.__name__: body for body in CALLS}
