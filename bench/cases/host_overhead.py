"""What a call costs the host: store_cache of one row beside its two floors and beside PyTorch.

The floors: a bare cuLaunchKernel in a C++ loop, and an FFI call with the same five tensors that
does nothing. store_cache should cost hardly more than the two together. All in inference mode, as
a server calls them; one row is not, where jitkern asks PyTorch for gradients and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch

import jitkern
from bench import peers
from bench.cases.common import empty_rows, random_rows
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
    store = partial(jitkern.store_cache, *tensors)

    def index_put() -> None:
        k_cache[indices64] = k
        v_cache[indices64] = v

    select = partial(torch.index_select, k_cache, 0, indices64, out=output)
    embedding = partial(torch.nn.functional.embedding, indices64, k_cache)
    index = partial(jitkern.indexing, k_cache, indices, output=output)
    with torch.inference_mode():
        rows = measure(
            ctx, _case(STORE, store, {"torch cache[idx] = x, twice": index_put}, tensors)
        )
        peers_of_index = {"torch index_select(out=)": select, "torch F.embedding": embedding}
        others = measure(ctx, _case("indexing, 1 row of 656 B", index, peers_of_index))
        if ctx.device == "cuda":
            host_rows = random_rows(SLOTS, ROW_BYTES, "cpu", pin=True)
            pairs = torch.tensor([[3, 7]], dtype=torch.int32, device="cuda")
            gather = partial(jitkern.h2d_gather, host_rows, k_cache, pairs)
            others += measure(ctx, _case("h2d_gather, 1 row of 656 B", gather))
    (enabled,) = measure(ctx, _case(STORE, store))
    enabled.impl = "jitkern, gradients enabled"
    rows.insert(1, enabled)
    if ctx.device == "cuda":
        rows.append(_bare_launch(ctx))
    yield from rows + others


def _case(
    name: str,
    ours: Callable[[], object],
    others: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    tensors: tuple[torch.Tensor, ...] = (),
) -> Case:
    """Return the case of a call; with `tensors` also beside one that does nothing with them."""

    def no_op() -> Run:
        noop = peers.host().noop
        return lambda _: noop(*tensors)

    impls = [Impl("jitkern", "ours", lambda: lambda _: ours(), check=False)]
    for peer, call in others.items():
        impls.append(Impl(peer, "peer", lambda call=call: lambda _: call(), check=False))
    if tensors:
        impls.append(Impl("no-op FFI call, 5 tensors", "floor", no_op, check=False))
    return Case("host_overhead", name, impls, clock="host")


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
