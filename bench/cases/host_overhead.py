"""What a call costs the host: store_cache of one row beside its two floors and beside PyTorch.

The floors: a bare cuLaunchKernel in a C++ loop, and an FFI call with the same five tensors that
does nothing. store_cache should cost hardly more than the two together. All in inference mode, as
a server calls them; one row is not, where jitkern asks PyTorch for gradients and versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import jitkern
from bench import peers
from bench.goals import Figures, Goal, at_most
from jitkern.bench.case import Context, Row, error_row
from jitkern.bench.measure import empty_rows, fill, host_us_of, random_rows
from jitkern.bench.timing import Timing

ROW_BYTES, SLOTS, CALLS = 656, 1024, 400
STORE = "store_cache, 1 row of 656 B"

PEERS = (peers.host,)


def run(ctx: Context) -> Iterator[Row]:
    k_cache = empty_rows(SLOTS, ROW_BYTES, ctx.device)
    v_cache = torch.empty_like(k_cache)
    k = random_rows(1, ROW_BYTES, ctx.device)
    v = random_rows(1, ROW_BYTES, ctx.device)
    indices = torch.tensor([7], dtype=torch.int32, device=ctx.device)
    indices64 = indices.to(torch.int64)
    output = torch.empty_like(k)

    def index_put() -> None:
        k_cache[indices64] = k
        v_cache[indices64] = v

    tensors = (k_cache, v_cache, indices, k, v)
    table: list[tuple[str, str, str, Callable[[], Callable[[], object]]]] = [
        (STORE, "jitkern", "ours", lambda: partial(jitkern.store_cache, *tensors)),
        (STORE, "torch cache[idx] = x, twice", "peer", lambda: index_put),
        (STORE, "no-op FFI call, 5 tensors", "floor", lambda: partial(peers.host().noop, *tensors)),
        (
            "indexing, 1 row of 656 B",
            "jitkern",
            "ours",
            lambda: partial(jitkern.indexing, k_cache, indices, output=output),
        ),
        (
            "indexing, 1 row of 656 B",
            "torch index_select(out=)",
            "peer",
            lambda: partial(torch.index_select, k_cache, 0, indices64, out=output),
        ),
        (
            "indexing, 1 row of 656 B",
            "torch F.embedding",
            "peer",
            lambda: partial(torch.nn.functional.embedding, indices64, k_cache),
        ),
    ]
    if ctx.device == "cuda":
        host_rows = random_rows(SLOTS, ROW_BYTES, "cpu", pin=True)
        pairs = torch.tensor([[3, 7]], dtype=torch.int32, device="cuda")
        name = "h2d_gather, 1 row of 656 B"
        table.append(
            (
                name,
                "jitkern",
                "ours",
                lambda: partial(jitkern.h2d_gather, host_rows, k_cache, pairs),
            )
        )
    with torch.inference_mode():
        rows = [_row(ctx, *entry) for entry in table]
    name = "jitkern, gradients enabled"
    rows.insert(1, _row(ctx, STORE, name, "ours", lambda: partial(jitkern.store_cache, *tensors)))
    if ctx.device == "cuda":
        rows.insert(3, _bare_launch(ctx))
    _compare(rows)
    yield from rows


def goals(f: Figures) -> Iterator[Goal]:
    rows = f.all("host_overhead", "store_cache, 1 row of 656 B")
    floors = [r.median_us for r in rows.values() if r.role == "floor" and r.median_us]
    peers = [r.median_us for r in rows.values() if r.role == "peer" and r.median_us]
    ours = rows.get("jitkern")
    if ours and ours.median_us and len(floors) == 2:
        name = "host time of store_cache: of a bare launch + a no-op FFI call"
        yield from at_most(name, ours.median_us / sum(floors), 1.15)
        yield from at_most(
            "host time of store_cache: of torch's two", ours.median_us / min(peers), 0.333
        )


def _row(
    ctx: Context, case: str, name: str, role: str, build: Callable[[], Callable[[], object]]
) -> Row:
    row = Row("host_overhead", case, name, role)
    try:
        timing = host_us_of(build(), calls=CALLS, repeats=ctx.rounds, sync=ctx.sync)
    except Exception as error:  # a peer that fails is a row, not the end of the run
        row.error = error_row("", "", "", "", error).error
        return row
    fill(row, timing)
    row.host_us = row.median_us
    return row


def _bare_launch(ctx: Context) -> Row:
    row = Row("host_overhead", STORE, "bare cuLaunchKernel, C++ loop", "floor")
    try:
        from jitkern.arch import Arch

        arch = Arch(*torch.cuda.get_device_capability())
        image = peers.empty().image(arch)
        loop = partial(peers.host().launch_loop, image, peers.EMPTY_KERNEL)
        device = torch.cuda.current_device()
        samples = tuple(loop(device, CALLS) * 1e-6 for _ in range(ctx.rounds))
    except Exception as error:
        row.error = error_row("", "", "", "", error).error
        return row
    fill(row, Timing(samples))
    row.host_us = row.median_us
    return row


def _compare(rows: list[Row]) -> None:
    for row in rows:
        peers_us = [
            r.median_us for r in rows if r.case == row.case and r.role == "peer" and r.median_us
        ]
        if row.role == "ours" and row.median_us and peers_us:
            row.ratio_to_best_peer = min(peers_us) / row.median_us
    floors = [r.median_us for r in rows if r.case == STORE and r.role == "floor" and r.median_us]
    ours = next(r for r in rows if r.case == STORE and r.role == "ours")
    if ours.median_us and len(floors) == 2:
        ours.note = f"{ours.median_us / sum(floors):.2f} x (bare launch + no-op FFI call)"
