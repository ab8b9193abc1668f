"""What a call costs the host: store_cache of one row beside its two floors and beside PyTorch.

The floors: a bare cuLaunchKernel in a C++ loop, and an FFI call with the same five tensors that
does nothing. store_cache should cost hardly more than the two together. All in inference mode, as
a server calls them; one row is not, where jitkern asks PyTorch for gradients and versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import jitkern
from bench import peers
from bench.cases.common import empty_rows, ours, peer, random_rows
from jitkern.bench.case import Case, Context, Impl, Row, Run, error_text
from jitkern.bench.measure import fill, measure
from jitkern.bench.timing import Timing

ROW_BYTES, SLOTS, CALLS = 656, 1024, 400
STORE = "store_cache, 1 row of 656 B"
PEERS = (peers.host,)


def run(ctx: Context) -> Iterator[Row]:
    k_cache = empty_rows(SLOTS, ROW_BYTES, ctx.device)
    v_cache = torch.empty_like(k_cache)
    k, v = (random_rows(1, ROW_BYTES, ctx.device) for _ in range(2))
    indices = torch.tensor([7], dtype=torch.int32, device=ctx.device)
    indices64 = indices.to(torch.int64)
    output = torch.empty_like(k)
    tensors = (k_cache, v_cache, indices, k, v)

    def index_put(_: object) -> None:
        k_cache[indices64] = k
        v_cache[indices64] = v

    def no_op() -> Run:
        noop = peers.host().noop
        return lambda _: noop(*tensors)

    def cost(name: str, *impls: Impl) -> list[Row]:
        for impl in impls:
            impl.check = False
        return measure(ctx, Case("host_overhead", name, list(impls), clock="host"))

    store = ours(lambda _: jitkern.store_cache(*tensors))
    select = partial(torch.index_select, k_cache, 0, indices64, out=output)
    embedding = partial(torch.nn.functional.embedding, indices64, k_cache)
    with torch.inference_mode():
        put = peer("torch cache[idx] = x, twice", index_put)
        rows = cost(STORE, store, put, Impl("no-op FFI call, 5 tensors", "floor", no_op))
    (enabled,) = cost(STORE, store)
    enabled.impl = "jitkern, gradients enabled"
    yield from (rows[0], enabled, *rows[1:])
    if ctx.device == "cuda":
        yield _bare_launch(ctx)
    with torch.inference_mode():
        yield from cost(
            "indexing, 1 row of 656 B",
            ours(lambda _: jitkern.indexing(k_cache, indices, output=output)),
            peer("torch index_select(out=)", lambda _: select()),
            peer("torch F.embedding", lambda _: embedding()),
        )
        if ctx.device == "cuda":
            host_rows = random_rows(SLOTS, ROW_BYTES, "cpu", pin=True)
            pairs = torch.tensor([[3, 7]], dtype=torch.int32, device="cuda")
            gather = ours(lambda _: jitkern.h2d_gather(host_rows, k_cache, pairs))
            yield from cost("h2d_gather, 1 row of 656 B", gather)


def _bare_launch(ctx: Context) -> Row:
    row = Row("host_overhead", STORE, "bare cuLaunchKernel, C++ loop", "floor")
    try:
        from jitkern.arch import Arch

        image = peers.empty().image(Arch(*torch.cuda.get_device_capability()))
        loop = partial(peers.host().launch_loop, image, peers.EMPTY_KERNEL)
        device = torch.cuda.current_device()
        fill(row, Timing(tuple(loop(device, CALLS) * 1e-6 for _ in range(ctx.rounds))))
    except Exception as error:
        row.error = error_text(error)
    return row
