"""store_cache: K and V rows to random slots of the caches, beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context, Impl
from jitkern.bench.cases.common import call_case, copy_impl, sizes
from jitkern.bench.measure import empty_rows, random_rows

MIN_SLOTS = 262_144  # two caches of even 256-byte rows are then larger than twice the L2


@dataclass
class Buffers:
    """One working set."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    indices: torch.Tensor  # int32, unique, unsorted
    indices64: torch.Tensor
    kv: torch.Tensor  # [2, rows, row_bytes / 2]: K, then V
    k: torch.Tensor
    v: torch.Tensor
    copied: torch.Tensor  # where the ceiling copies kv to

    def words(self) -> tuple[torch.Tensor, ...]:
        """Return caches and rows as 32-bit words."""
        return tuple(t.view(torch.int32) for t in (self.k_cache, self.v_cache, self.k, self.v))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for rows, row_bytes in sizes(ctx):
        yield case_of(ctx, row_bytes, rows)
    caches = torch.zeros(2, 64, 656, dtype=torch.uint8, device=ctx.device)
    kv = torch.ones(2, 1, 656, dtype=torch.uint8, device=ctx.device)
    one = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    for name, arguments in (
        ("call, checks only", (*caches, one[:0], *kv[:, :0])),
        ("call, 1 row", (*caches, one, *kv)),
    ):
        yield call_case("store", name, partial(jitkern.store_cache, *arguments), arguments)


def case_of(ctx: Context, row_bytes: int, rows: int) -> Case:
    """Return the case of one size: jitkern and a copy."""
    device = ctx.device
    slots = max(2 * rows, MIN_SLOTS if device == "cuda" else 0)
    k_cache = empty_rows(slots, row_bytes, device)
    v_cache = empty_rows(slots, row_bytes, device)

    def make(_: int) -> Buffers:
        indices = torch.randperm(slots, device=device)[:rows]
        kv = random_rows(2 * rows, row_bytes, device).view(2, rows, -1)
        small = indices.to(torch.int32)
        return Buffers(k_cache, v_cache, small, indices, kv, kv[0], kv[1], torch.empty_like(kv))

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (
            b.k_cache.clone().index_copy_(0, b.indices64, b.k),
            b.v_cache.clone().index_copy_(0, b.indices64, b.v),
        )

    return Case(
        op="store",
        name=f"{rows} rows of {row_bytes} B",
        params={"row_bytes": row_bytes, "rows": rows, "slots": slots, "dtype": "bfloat16"},
        bytes_moved=4 * rows * row_bytes,
        bytes_note="K and V, each read once and written once",
        make=make,
        outputs=lambda b: (b.k_cache, b.v_cache),
        reference=reference,
        impls=[
            Impl("jitkern", "ours", lambda: ours),
            copy_impl(ctx, lambda b: (b.copied, b.kv)),
        ],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


def ours(b: Buffers) -> None:
    """Call the op."""
    jitkern.store_cache(b.k_cache, b.v_cache, b.indices, b.k, b.v)
