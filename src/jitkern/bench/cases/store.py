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
# (bytes of a row of K, of V): MLA's one cache, and 4 heads of 192 and of 128 items.
ODD_SIZES = ((656, 0), (1536, 1024))


@dataclass
class Buffers:
    """One working set."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    indices: torch.Tensor  # int32, unique, unsorted
    indices64: torch.Tensor
    kv: torch.Tensor  # flat: K, then V
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
    for row_bytes, v_row_bytes in ODD_SIZES:
        yield case_of(ctx, row_bytes, 131_072 if ctx.device == "cuda" else 1024, v_row_bytes)
    caches = torch.zeros(2, 64, 656, dtype=torch.uint8, device=ctx.device)
    kv = torch.ones(2, 1, 656, dtype=torch.uint8, device=ctx.device)
    one = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    for name, arguments in (
        ("call, checks only", (*caches, one[:0], *kv[:, :0])),
        ("call, 1 row", (*caches, one, *kv)),
    ):
        yield call_case("store", name, partial(jitkern.store_cache, *arguments), arguments)


def case_of(ctx: Context, row_bytes: int, rows: int, v_row_bytes: int | None = None) -> Case:
    """Return the case of one size: jitkern and a copy.

    ``v_row_bytes`` is that of K by default; 0 for a single cache, which is K's.
    """
    device = ctx.device
    v_row_bytes = row_bytes if v_row_bytes is None else v_row_bytes
    both_bytes = row_bytes + v_row_bytes
    slots = max(2 * rows, MIN_SLOTS if device == "cuda" else 0)
    k_cache = empty_rows(slots, row_bytes, device)
    v_cache = empty_rows(slots, v_row_bytes, device) if v_row_bytes else k_cache[:, :0]

    def make(_: int) -> Buffers:
        indices = torch.randperm(slots, device=device)[:rows]
        kv = random_rows(1, rows * both_bytes, device).view(-1)
        widths = k_cache.shape[1], v_cache.shape[1]
        parts = torch.split(kv, [rows * width for width in widths])
        k, v = (part.view(rows, width) for part, width in zip(parts, widths, strict=True))
        small = indices.to(torch.int32)
        return Buffers(k_cache, v_cache, small, indices, kv, k, v, torch.empty_like(kv))

    def reference(b: Buffers) -> tuple[torch.Tensor, ...]:
        return (
            b.k_cache.clone().index_copy_(0, b.indices64, b.k),
            b.v_cache.clone().index_copy_(0, b.indices64, b.v),
        )

    name = f"{rows} rows of {row_bytes} B"
    params = {"row_bytes": row_bytes, "rows": rows, "slots": slots, "dtype": "bfloat16"}
    if v_row_bytes != row_bytes:
        name += f" and {v_row_bytes} B" if v_row_bytes else ", one cache"
        params["v_row_bytes"] = v_row_bytes
    return Case(
        op="store",
        name=name,
        params=params,
        bytes_moved=2 * rows * both_bytes,
        bytes_note="K and V, each read once and written once",
        make=make,
        outputs=lambda b: (b.k_cache, b.v_cache),
        reference=reference,
        impls=[
            Impl("jitkern", "ours", lambda: ours if v_row_bytes else ours_alone),
            copy_impl(ctx, lambda b: (b.copied, b.kv)),
        ],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


def ours(b: Buffers) -> None:
    """Call the op."""
    jitkern.store_cache(b.k_cache, b.v_cache, b.indices, b.k, b.v)


def ours_alone(b: Buffers) -> None:
    """Call the op for a single cache."""
    jitkern.store_cache(b.k_cache, None, b.indices, b.k)
