"""store_cache: K and V rows to random slots of the caches. Bytes are read once and written once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import (
    call_cases,
    ceiling,
    copy_impl,
    empty_kernel,
    empty_rows,
    ours,
    peer,
    random_rows,
    sizes,
)
from jitkern.bench.case import Case, Context, Impl, Row
from jitkern.bench.measure import measure

PEERS = (peers.rows,)
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


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device == "cpu":
        all_sizes = [(n, 8192) for n in ((656,) if ctx.quick else (256, 656, 1024, 2048, 8192))]
    elif ctx.quick:
        all_sizes = [(656, 1), (656, 1024), (656, 131_072), (1024, 131_072)]
    else:
        counts = (1, 16, 128, 1024, 16_384, 131_072)
        all_sizes = [(n, rows) for n in (256, 656, 1024, 2048) for rows in counts]
    for row_bytes, rows in all_sizes:
        case = case_of(ctx, row_bytes, rows)
        yield from measure(ctx, replace(case, impls=_impls(ctx, row_bytes, rows)))
    for row_bytes, v_row_bytes in ODD_SIZES:
        for rows in (8192,) if ctx.device == "cpu" else (1, 1024, 131_072):
            case = case_of(ctx, row_bytes, rows, v_row_bytes)
            others = [peer("torch cache[idx] = x", _index_put_k)]
            if v_row_bytes:
                others = [peer("jitkern, twice", _one_by_one)]
                others += [peer("torch cache[idx] = x, twice", _index_put)]
            yield from measure(ctx, replace(case, impls=[case.ours(), *others, _copy(ctx)]))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    for rows, row_bytes in sizes(ctx):
        yield case_of(ctx, row_bytes, rows)
    for row_bytes, v_row_bytes in ODD_SIZES:
        yield case_of(ctx, row_bytes, 131_072 if ctx.device == "cuda" else 1024, v_row_bytes)
    caches = torch.zeros(2, 64, 656, dtype=torch.uint8, device=ctx.device)
    kv = torch.ones(2, 1, 656, dtype=torch.uint8, device=ctx.device)
    one = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    empty = (*caches, one[:0], *kv[:, :0])
    yield from call_cases("store", jitkern.store_cache, empty, (*caches, one, *kv))


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
    params = {"row_bytes": row_bytes, "rows": rows}
    if v_row_bytes != row_bytes:
        name += f" and {v_row_bytes} B" if v_row_bytes else ", one cache"
        params["v_row_bytes"] = v_row_bytes
    return Case(
        op="store",
        name=name,
        params=params,
        bytes_moved=2 * rows * both_bytes,
        make=make,
        outputs=lambda b: (b.k_cache, b.v_cache),
        reference=reference,
        impls=[
            ours(_ours if v_row_bytes else _ours_alone),
            copy_impl(ctx, lambda b: (b.copied, b.kv)),
        ],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


def _copy(ctx: Context) -> Impl:
    name = "copy kernel, same bytes" if ctx.device == "cuda" else "copy_ of the same bytes"
    return copy_impl(ctx, lambda b: (b.copied, b.kv), name)


def _ours(b: Buffers) -> None:
    jitkern.store_cache(b.k_cache, b.v_cache, b.indices, b.k, b.v)


def _ours_alone(b: Buffers) -> None:
    jitkern.store_cache(b.k_cache, None, b.indices, b.k)


def _one_by_one(b: Buffers) -> None:
    _ours_alone(b)
    jitkern.store_cache(b.v_cache, None, b.indices, b.v)


def _index_put_k(b: Buffers) -> None:
    b.k_cache[b.indices64] = b.k


def _put_both(k_cache: Any, v_cache: Any, indices: Any, k: Any, v: Any) -> None:
    k_cache[indices] = k
    v_cache[indices] = v


def _index_put(b: Buffers) -> None:
    _put_both(b.k_cache, b.v_cache, b.indices64, b.k, b.v)


def _index_copy(b: Buffers) -> None:
    b.k_cache.index_copy_(0, b.indices64, b.k)
    b.v_cache.index_copy_(0, b.indices64, b.v)


def _impls(ctx: Context, row_bytes: int, rows: int) -> list[Impl]:
    impls = [ours(_ours), peer("torch cache[idx] = x, twice", _index_put)]
    if ctx.device == "cpu":
        return [*impls, peer("torch index_copy_, twice", _index_copy), _copy(ctx)]

    def nvcc(b: Buffers) -> None:
        if row_bytes not in peers.STORE_ROW_BYTES:
            raise LookupError("does not compile for this row size, which is no multiple of 128 B")
        store = getattr(peers.rows(), f"store_{row_bytes}")
        store(b.k_cache, b.v_cache, b.indices, b.k, b.v)

    def triton(b: Buffers) -> None:
        k_cache, v_cache, k, v = (x.view(torch.int32) for x in (b.k_cache, b.v_cache, b.k, b.v))
        peers.triton().store(k_cache, v_cache, b.indices, k, v)

    impls += [peer("nvcc, mini-sglang style", nvcc), peer("triton", triton), _copy(ctx)]
    impls += [ceiling("torch copy_, same bytes", lambda b: b.copied.copy_(b.kv))]
    if rows == 131_072 and not ctx.quick:
        put = torch.compile(_put_both, dynamic=False)
        impls += [peer("torch.compile", lambda b: put(b.k_cache, b.v_cache, b.indices64, b.k, b.v))]
    return [*impls, empty_kernel()] if rows <= 1024 else impls
