"""What a call costs the host: store_cache beside its floors, and what else an engine's step calls.

The floors of store_cache of one row: a bare cuLaunchKernel in a C++ loop, and an FFI call with the
same five tensors that does nothing. It should cost hardly more than the two together. All in
inference mode, as a server calls them; one row is not, where jitkern asks PyTorch for gradients and
versions. The guard measures the launcher, a ring, an engine, and a split embedding.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row, error_text
from bench.cases.common import call_case, copy_module, empty_rows, no_op, ours, peer, random_rows
from bench.measure import fill, measure
from bench.timing import Timing
from jitkern.arch import Arch
from jitkern.host import library as host
from jitkern.nn import TPEmbedding
from jitkern.offload import DescriptorRing, OffloadEngine

STORE, CALLS = "store_cache, 1 row of 656 B", 400


def run(ctx: Context) -> Iterator[Row]:
    k_cache = empty_rows(1024, 656, ctx.device)
    v_cache, (k, v) = torch.empty_like(k_cache), random_rows(2, 656, ctx.device).split(1)
    indices = torch.tensor([7], dtype=torch.int32, device=ctx.device)
    indices64 = indices.to(torch.int64)
    tensors = (k_cache, v_cache, indices, k, v)

    def index_put(_: object) -> None:
        k_cache[indices64] = k
        v_cache[indices64] = v

    def cost(*impls: Impl) -> list[Row]:
        return measure(ctx, Case("host_overhead", STORE, list(impls), clock="host"))

    def store(name: str) -> Impl:
        return ours(lambda _: jitkern.store_cache(*tensors), name, check=False)

    yield from cost(store("jitkern, gradients enabled"))
    with torch.inference_mode():
        put = peer("torch cache[idx] = x, twice", index_put, check=False)
        yield from cost(store("jitkern"), put, no_op(tensors, "no-op FFI call, 5 tensors"))
    if ctx.device == "cuda":
        yield _bare_launch(ctx)


def _bare_launch(ctx: Context) -> Row:
    row = Row("host_overhead", STORE, "bare cuLaunchKernel, C++ loop", "floor")
    try:
        image = peers.device().image(Arch(*torch.cuda.get_device_capability()))
        loop = partial(peers.host().launch_loop, image, "empty")
        device = torch.cuda.current_device()
        fill(row, Timing(tuple(loop(device, CALLS) * 1e-6 for _ in range(ctx.rounds))))
    except Exception as error:
        row.error = error_text(error)
    return row


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
        call = partial(copy_module().launch, "copy", dst, src, 256, 256, grid=1)
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
    alone: Any = SimpleNamespace(rank=0, world_size=1, all_reduce=lambda x, op="sum": None)
    embedding = TPEmbedding(1000, 64, comm=alone, device=ctx.device)
    ids = torch.tensor([5, 999, 0], device=ctx.device)

    def look_up() -> None:
        with torch.inference_mode():
            embedding(ids)

    return call_case("TPEmbedding", "3 tokens, one rank", look_up, (ids,))
