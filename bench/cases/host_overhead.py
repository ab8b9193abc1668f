"""What a call costs the host: store_cache of one row beside its two floors and beside PyTorch.

The floors: a bare cuLaunchKernel in a C++ loop, and an FFI call with the same five tensors that
does nothing. store_cache should cost hardly more than the two together. All in inference mode, as
a server calls them; one row is not, where jitkern asks PyTorch for gradients and versions.
"""

from collections.abc import Iterator
from functools import partial

import torch

import jitkern
from bench import peers
from bench.cases.common import empty_rows, no_op, ours, peer, random_rows
from jitkern.bench.case import Case, Context, Impl, Row, error_text
from jitkern.bench.measure import fill, measure
from jitkern.bench.timing import Timing

CALLS = 400


def run(ctx: Context) -> Iterator[Row]:
    k_cache = empty_rows(1024, 656, ctx.device)
    v_cache, (k, v) = torch.empty_like(k_cache), random_rows(2, 656, ctx.device).split(1)
    indices = torch.tensor([7], dtype=torch.int32, device=ctx.device)
    indices64, output = indices.to(torch.int64), torch.empty_like(k)
    tensors = (k_cache, v_cache, indices, k, v)

    def index_put(_: object) -> None:
        k_cache[indices64] = k
        v_cache[indices64] = v

    def cost(name: str, *impls: Impl) -> list[Row]:
        for impl in impls:
            impl.check = False
        return measure(ctx, Case("host_overhead", name, list(impls), clock="host"))

    store = ours(lambda _: jitkern.store_cache(*tensors))
    (enabled,) = cost("store_cache, 1 row of 656 B", store)
    enabled.impl = "jitkern, gradients enabled"
    yield enabled
    with torch.inference_mode():
        put = peer("torch cache[idx] = x, twice", index_put)
        yield from cost(enabled.case, store, put, no_op(tensors, "no-op FFI call, 5 tensors"))
        yield from cost(
            "indexing, 1 row of 656 B",
            ours(lambda _: jitkern.indexing(k_cache, indices, output=output)),
            peer(
                "torch index_select(out=)",
                lambda _: torch.index_select(k_cache, 0, indices64, out=output),
            ),
            peer("torch F.embedding", lambda _: torch.nn.functional.embedding(indices64, k_cache)),
        )
    if ctx.device == "cuda":
        yield _bare_launch(ctx, enabled.case)


def _bare_launch(ctx: Context, case: str) -> Row:
    row = Row("host_overhead", case, "bare cuLaunchKernel, C++ loop", "floor")
    try:
        from jitkern.arch import Arch

        image = peers.device().image(Arch(*torch.cuda.get_device_capability()))
        loop = partial(peers.host().launch_loop, image, "empty")
        device = torch.cuda.current_device()
        fill(row, Timing(tuple(loop(device, CALLS) * 1e-6 for _ in range(ctx.rounds))))
    except Exception as error:
        row.error = error_text(error)
    return row
