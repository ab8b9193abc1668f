"""store_cache: K and V rows to random slots of the caches. Bytes are read once and written once."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import common
from bench.cases.common import ours, peer

MIN_SLOTS = 262_144  # two caches of even 256-byte rows are then larger than twice the L2
# (bytes of a row of K, of V): MLA's one cache, and 4 heads of 192 and of 128 items.
ODD_SIZES = ((656, 0), (1536, 1024))
COPY = "copy kernel, same bytes"
PAGE = 16


def run(ctx: Context) -> Iterator[Row]:
    on_gpu = ctx.device == "cuda"
    for row_bytes in (656,) if ctx.quick else (256, 656, 1024, 2048):
        for rows in (1, 16, 128, 1024, 16_384, 131_072) if on_gpu else (8192,):
            case = case_of(ctx, row_bytes, rows)
            yield from common.beside(ctx, case, _peers(ctx, row_bytes), COPY, rows <= 1024)
    for row_bytes, v_row_bytes in ODD_SIZES:
        for rows in (1, 1024, 131_072) if on_gpu else (8192,):
            others = [peer("torch cache[idx] = x", _put_k)]
            if v_row_bytes:
                others = [peer("jitkern, twice", _one_by_one)]
                others += [peer("torch cache[idx] = x, twice", _put_twice)]
            yield from common.beside(ctx, case_of(ctx, row_bytes, rows, v_row_bytes), others, COPY)
    for rows in (1, 1024, 131_072) if on_gpu else (8192,):
        flat = peer("jitkern, equally spaced rows", _store, check=False)
        yield from common.beside(ctx, paged_case(ctx, 1024, rows), [flat], COPY)


def cases(ctx: Context) -> Iterator[Case]:
    for rows, row_bytes in common.sizes(ctx):
        yield case_of(ctx, row_bytes, rows)
    for row_bytes, v_row_bytes in ODD_SIZES:
        yield case_of(ctx, row_bytes, 131_072 if ctx.device == "cuda" else 1024, v_row_bytes)
    yield paged_case(ctx, 1024, 131_072 if ctx.device == "cuda" else 1024)
    caches = torch.zeros(2, 64, 656, dtype=torch.uint8, device=ctx.device)
    kv = torch.ones(2, 1, 656, dtype=torch.uint8, device=ctx.device)
    one = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    empty = (*caches, one[:0], *kv[:, :0])
    yield from common.call_cases("store", jitkern.store_cache, empty, (*caches, one, *kv))


def case_of(ctx: Context, row_bytes: int, rows: int, v_row_bytes: int | None = None) -> Case:
    """Return the case of one size: jitkern and a copy.

    ``v_row_bytes`` is that of K by default; 0 for a single cache, which is K's.
    """
    v_row_bytes = row_bytes if v_row_bytes is None else v_row_bytes
    name, params = f"{rows} rows of {row_bytes} B", {"row_bytes": row_bytes, "rows": rows}
    if v_row_bytes != row_bytes:
        name += f" and {v_row_bytes} B" if v_row_bytes else ", one cache"
        params["v_row_bytes"] = v_row_bytes
    both_bytes = row_bytes + v_row_bytes
    slots = max(2 * rows, MIN_SLOTS if ctx.device == "cuda" else 0)
    k_cache = common.empty_rows(slots, row_bytes, ctx.device)
    v_cache = common.empty_rows(slots, v_row_bytes, ctx.device) if v_row_bytes else k_cache[:, :0]

    def make(_: int) -> SimpleNamespace:
        slot_numbers = torch.randperm(slots, device=ctx.device)[:rows]  # unique, unsorted
        kv = common.random_rows(1, rows * both_bytes, ctx.device).view(-1)  # K, then V
        k, v = kv.split([rows * cache.shape[1] for cache in (k_cache, v_cache)])
        return SimpleNamespace(
            k_cache=k_cache,
            v_cache=v_cache,
            indices=slot_numbers.to(torch.int32),
            indices64=slot_numbers,
            kv=kv,
            k=k.view(rows, k_cache.shape[1]),
            v=v.view(rows, v_cache.shape[1]),
            copied=torch.empty_like(kv),
        )

    return Case(
        op="store",
        name=name,
        params=params,
        bytes_moved=2 * rows * both_bytes,
        make=make,
        outputs=lambda b: (b.k_cache, b.v_cache),
        reference=lambda b: (
            b.k_cache.clone().index_copy_(0, b.indices64, b.k),
            b.v_cache.clone().index_copy_(0, b.indices64, b.v),
        ),
        impls=[
            ours(_store if v_row_bytes else _store_k),
            common.copy_impl(ctx, lambda b: (b.copied, b.kv)),
        ],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


def paged_case(ctx: Context, row_bytes: int, rows: int) -> Case:
    """Return the case of pages of K and V in turn, [blocks, 2, page, ...]: blocks lie apart."""
    flat = case_of(ctx, row_bytes, rows)
    slots = max(2 * rows, MIN_SLOTS if ctx.device == "cuda" else 16)
    kv = common.empty_rows(2 * slots, row_bytes, ctx.device).view(-1, 2, PAGE, row_bytes // 2)
    k_pages, v_pages = kv.unbind(1)

    def store(b: Any) -> None:
        jitkern.store_cache(k_pages, v_pages, b.indices, b.k, b.v)

    def stored(b: Any, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return pages.flatten(0, 1).index_copy_(0, b.indices64, rows).view(pages.shape)

    return replace(
        flat,
        name=f"{flat.name}, pages apart",
        outputs=lambda _: (k_pages, v_pages),
        reference=lambda b: (stored(b, k_pages, b.k), stored(b, v_pages, b.v)),
        impls=[ours(store), flat.impls[1]],
    )


def _store(b: Any) -> None:
    jitkern.store_cache(b.k_cache, b.v_cache, b.indices, b.k, b.v)


def _store_k(b: Any) -> None:
    jitkern.store_cache(b.k_cache, None, b.indices, b.k)


def _one_by_one(b: Any) -> None:
    _store_k(b)
    jitkern.store_cache(b.v_cache, None, b.indices, b.v)


def _put_k(b: Any) -> None:
    b.k_cache[b.indices64] = b.k


def _put_twice(b: Any) -> None:
    b.k_cache[b.indices64] = b.k
    b.v_cache[b.indices64] = b.v


def _peers(ctx: Context, row_bytes: int) -> list[Impl]:
    put_twice = peer("torch cache[idx] = x, twice", _put_twice)
    if ctx.device == "cpu":
        return [put_twice]

    def nvcc(b: Any) -> None:
        if row_bytes not in peers.STORE_ROW_BYTES:
            raise LookupError("does not compile for this row size, which is no multiple of 128 B")
        store = getattr(peers.rows(), f"store_{row_bytes}")
        store(b.k_cache, b.v_cache, b.indices, b.k, b.v)

    def triton(b: Any) -> None:
        k_cache, v_cache, k, v = (x.view(torch.int32) for x in (b.k_cache, b.v_cache, b.k, b.v))
        peers.triton().store(k_cache, v_cache, b.indices, k, v)

    return [peer("nvcc, mini-sglang style", nvcc), peer("triton", triton), put_twice]
