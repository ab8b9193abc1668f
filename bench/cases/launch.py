"""What the guard measures beside the ops: the launcher, a ring, an engine, a split embedding.

Each is called at every step of an engine, so what is counted is the host's part.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench.cases.common import call_case, copy_module
from jitkern.bench.case import Case, Context
from jitkern.host import module as host
from jitkern.nn import TPEmbedding
from jitkern.offload import DescriptorRing, OffloadEngine


def cases(ctx: Context) -> Iterator[Case]:
    # A launcher that is not told of a GPU: it checks sizes, packs, and gives up.
    kernel = ("none", False, ())  # name, has no CPU form, parameters unknown
    launch = host.module()["make_launch"](lambda *_: (b"", ("none",), ()), (kernel,))
    for arguments in ((1, 2.0, 64), (1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, True)):
        name = f"arguments to bytes, {len(arguments)}"
        call = partial(launch, 0, 1, 256, 0, False, False, None, -1, 0, *arguments)
        yield call_case("launch", name, call, arguments)
    src = torch.ones(8192, dtype=torch.uint8, device=ctx.device)
    dst = torch.zeros_like(src)
    if ctx.device == "cuda":
        call = partial(copy_module().launch, "copy", dst, src, 256, grid=1)
        yield call_case("launch", "launch of a user's kernel", call, (dst, src))
    ring = DescriptorRing(num_slots=16, max_descriptors=128, device=ctx.device)
    for count in (1, 128):
        starts = torch.arange(count) * 64
        descriptors = torch.stack([starts, starts, torch.full_like(starts, 64)], 1)

        def push_and_take(descriptors: torch.Tensor = descriptors) -> None:
            ticket = ring.push(descriptors)
            jitkern.unpack(src, dst, ring)
            ring.wait(ticket)

        name = f"push, unpack and wait, {count} descriptor{'s' * (count > 1)}"
        yield call_case("ring", name, push_and_take, (dst, src, descriptors))
    yield _engine(ctx)
    yield _embedding(ctx)


def _engine(ctx: Context) -> Case:
    engine = OffloadEngine(
        num_layers=4,
        num_cpu_blocks=16,
        num_slots=8,
        block_size=4,
        token_shape=(2, 64),
        dtype=torch.bfloat16,
        device=ctx.device,
    )
    arguments = torch.tensor([7, 11, 3]), torch.tensor([0, 5, 1])
    load = partial(engine.load_cpu_blocks_to_gpu_slots_all_layers, *arguments)
    return call_case("engine", "3 blocks of 4 layers to slots", load, arguments)


def _embedding(ctx: Context) -> Case:
    alone: Any = SimpleNamespace(rank=0, size=1, all_reduce=lambda x, op="sum": None)
    embedding = TPEmbedding(1000, 64, comm=alone, device=ctx.device)
    ids = torch.tensor([5, 999, 0], device=ctx.device)

    def look_up() -> None:
        with torch.inference_mode():
            embedding(ids)

    return call_case("TPEmbedding", "3 tokens, one rank", look_up, (ids,))
