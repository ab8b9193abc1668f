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
        from jitkern.arch import Arch

        image = peers.device().image(Arch(*torch.cuda.get_device_capability()))
        loop = partial(peers.host().launch_loop, image, "empty")
        device = torch.cuda.current_device()
        fill(row, Timing(tuple(loop(device, CALLS) * 1e-6 for _ in range(ctx.rounds))))
    except Exception as error:
        row.error = error_text(error)
    return row
