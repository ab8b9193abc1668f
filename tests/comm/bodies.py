"""Bodies of tests of a communicator: every rank calls them, over any transport.

They use the protocol only. The inputs of all ranks are known, so each rank computes the expected
result, and raises AssertionError if it got another one. Values are small whole numbers, so that
sums are exact in any dtype and order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from jitkern.comm import Communicator

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64, torch.uint8, torch.int8)
MOVED = (*FLOATS, *INTS, torch.int16, torch.bool, torch.complex64)
SHAPES = ((1,), (3,), (1001,), (5, 7), ())
A_SHAPE = ((5, 7),)  # one shape is enough for the other dtypes
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "avg": lambda x: x.sum(0) / len(x),
}


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return the input of a rank: 1, 2 or 3, and for signed dtypes negative as well."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randint(1, 4, shape, generator=generator)
    if dtype not in (torch.uint8, torch.bool):
        x *= 1 - 2 * torch.randint(0, 2, shape, generator=generator)
    return x.to(dtype)


def reduced(
    size: int, shape: tuple[int, ...], dtype: torch.dtype, op: str, seed: int
) -> torch.Tensor:
    every = torch.stack([values_of(r, shape, dtype, seed).double() for r in range(size)])
    return REDUCTIONS[op](every).to(dtype)  # whole numbers are cut


def same(result: torch.Tensor, expected: torch.Tensor, *context: object) -> None:
    result = result.cpu()
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype, *context)
    assert result.shape == expected.shape, (result.shape, expected.shape, *context)
    if result.dtype.is_floating_point:  # 1 / 3 of a sum, or by NCCL a sum of rounded thirds
        atol = max(1e-3, torch.finfo(result.dtype).eps)
        assert torch.allclose(result, expected, rtol=1e-2, atol=atol), (result, expected, *context)
    else:
        assert torch.equal(result, expected), (result, expected, *context)


def is_possible(dtype: torch.dtype, op: str, size: int) -> bool:
    """3 to the power of `size` is no int8, and averages of negative whole numbers differ."""
    small = dtype in (torch.int8, torch.uint8)
    signed_int = not dtype.is_floating_point and dtype != torch.uint8
    return not (op == "prod" and small and size > 4) and not (op == "avg" and signed_int)


def moved() -> Iterator[tuple[int, torch.dtype, tuple[int, ...]]]:
    for seed, dtype in enumerate(MOVED):
        for shape in SHAPES if dtype == torch.float32 else A_SHAPE:
            yield seed, dtype, shape


def reductions(size: int) -> Iterator[tuple[int, torch.dtype, tuple[int, ...], str]]:
    seed = 0
    for dtype in (*FLOATS, *INTS):
        for op in REDUCTIONS:
            for shape in SHAPES if dtype == torch.float32 else A_SHAPE:
                seed += 1
                if is_possible(dtype, op, size):
                    yield seed, dtype, shape, op


def all_reduce(comm: Communicator, device: torch.device) -> None:
    for seed, dtype, shape, op in reductions(comm.size):
        x = values_of(comm.rank, shape, dtype, seed).to(device)
        comm.all_reduce(x, op)
        same(x, reduced(comm.size, shape, dtype, op, seed), dtype, op, shape)


def all_reduce_of_reals(comm: Communicator, device: torch.device) -> None:
    generators = [torch.Generator().manual_seed(rank) for rank in range(comm.size)]
    every = [torch.randn(4099, generator=generator) for generator in generators]
    x = every[comm.rank].clone().to(device)
    comm.all_reduce(x)
    expected = torch.stack(every).sum(0)
    assert torch.allclose(x.cpu(), expected, rtol=1e-5, atol=1e-5)
    nan = torch.full((5,), float("nan") if comm.rank == 0 else 1.0, device=device)
    comm.all_reduce(nan)
    assert nan.isnan().all()


def all_gather(comm: Communicator, device: torch.device) -> None:
    for seed, dtype, shape in moved():
        expected = torch.stack([values_of(r, shape, dtype, seed) for r in range(comm.size)])
        x = values_of(comm.rank, shape, dtype, seed).to(device)
        output = torch.zeros_like(expected, device=device)
        comm.all_gather(output, x)
        same(output, expected, dtype, shape)
        output.zero_()
        output[comm.rank] = x
        comm.all_gather(output, output[comm.rank])
        same(output, expected, dtype, shape, "in place")


def reduce_scatter(comm: Communicator, device: torch.device) -> None:
    for seed, dtype, part, op in reductions(comm.size):
        shape = (comm.size, *part)
        expected = reduced(comm.size, shape, dtype, op, seed)[comm.rank]
        x = values_of(comm.rank, shape, dtype, seed).to(device)
        output = torch.zeros(part, dtype=dtype, device=device)
        comm.reduce_scatter(output, x, op)
        same(output, expected, dtype, op, part)
        same(x, values_of(comm.rank, shape, dtype, seed), "not written to")
        comm.reduce_scatter(x[comm.rank], x, op)
        same(x[comm.rank], expected, dtype, op, part, "in place")


def broadcast(comm: Communicator, device: torch.device) -> None:
    for seed, dtype, shape in moved():
        for src in range(comm.size):
            x = values_of(comm.rank, shape, dtype, seed).to(device)
            comm.broadcast(x, src)
            same(x, values_of(src, shape, dtype, seed), dtype, shape, src)


def send_recv(comm: Communicator, device: torch.device) -> None:
    for seed, dtype in enumerate(MOVED):
        for src in range(comm.size):
            for dst in range(comm.size):
                shape = SHAPES[(src + dst) % len(SHAPES)]
                if comm.rank == src != dst:
                    comm.send(values_of(src, shape, dtype, seed).to(device), dst)
                elif comm.rank == dst != src:
                    x = torch.zeros(shape, dtype=dtype, device=device)
                    comm.recv(x, src)
                    same(x, values_of(src, shape, dtype, seed), dtype, src, dst)
    # Messages of one path come in their order.
    for number in range(20 if comm.rank < 2 <= comm.size else 0):
        x = torch.full((number + 1,), number, dtype=torch.int32, device=device)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            x.zero_()
            comm.recv(x, 0)
            assert x.tolist() == [number] * (number + 1)


def empty(comm: Communicator, device: torch.device) -> None:
    """Without items nothing is done, and later calls still work."""
    none = torch.zeros(0, 3, device=device)
    comm.all_reduce(none)
    comm.all_reduce(none, "avg")
    comm.all_gather(torch.zeros(0, device=device), none)
    comm.reduce_scatter(torch.zeros(0, device=device), none, "max")
    comm.broadcast(none, comm.size - 1)
    if comm.size > 1 and comm.rank == 0:
        comm.send(none, 1)
    elif comm.rank == 1:
        comm.recv(none, 0)
    x = torch.ones(2, device=device)
    comm.all_reduce(x)
    assert x.tolist() == [comm.size] * 2


def large(comm: Communicator, device: torch.device) -> None:
    x = torch.full((1 << 21,), float(comm.rank + 1), device=device)
    comm.all_reduce(x)
    assert (x == sum(range(1, comm.size + 1))).all()
    output = torch.zeros(comm.size, 1 << 20, device=device)
    comm.all_gather(output, torch.full((1 << 20,), float(comm.rank), device=device))
    assert all((output[r] == r).all() for r in range(comm.size))


BODIES = {
    body.__name__: body
    for body in (
        *(all_reduce, all_reduce_of_reals, all_gather, reduce_scatter, broadcast, send_recv),
        *(empty, large),
    )
}
