"""store_cache: K and V rows to random slots of the caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import jitkern
from bench import peers
from bench.goals import NVCC, Figures, Goal, at_least, at_most, cpu_goals
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.cases.common import copy_kernel
from jitkern.bench.cases.store import ODD_SIZES, Buffers, ours
from jitkern.bench.cases.store import case_of as guarded
from jitkern.bench.measure import measure

PEERS = (peers.rows,)
PLOTS = ("of a copy",)


def run(ctx: Context) -> Iterator[Row]:
    for row_bytes, rows in _sizes(ctx):
        yield from measure(ctx, case_of(ctx, row_bytes, rows))
    for row_bytes, v_row_bytes in ODD_SIZES:
        for rows in (8192,) if ctx.device == "cpu" else (1, 1024, 131_072):
            case = guarded(ctx, row_bytes, rows, v_row_bytes)
            impls = [case.ours(), *_odd_impls(ctx, bool(v_row_bytes))]
            yield from measure(ctx, replace(case, impls=impls))


def goals(f: Figures) -> Iterator[Goal]:
    for row_bytes, share in ((256, 0.97), (1024, 0.97), (2048, 0.97), (656, 0.93)):
        case = f"131072 rows of {row_bytes} B"
        name = f"store, {case}"
        for other, wanted in (
            ("copy kernel, same bytes", share),
            (NVCC, 1.0),
            ("torch cache[idx] = x, twice", 4.0),
        ):
            yield from at_least(
                f"{name}: of {other}", f.speed("store", case, "jitkern", other), wanted
            )
    for case in ("131072 rows of 656 B, one cache", "131072 rows of 1536 B and 1024 B"):
        for other, wanted in (("copy kernel, same bytes", 0.93), ("jitkern, twice", 1.0)):
            got = f.speed("store", case, "jitkern", other)
            yield from at_least(f"store, {case}: of {other}", got, wanted)
    for case in f.cases("store"):
        ours, floor = f.us("store", case, "jitkern"), f.us("store", case, "empty kernel")
        if ours is None or floor is None:
            continue  # the empty kernel runs beside small calls only
        yield from at_most(f"store, {case}: above the empty kernel", ours - floor, 0.3, "us")
        yield from at_least(
            f"store, {case}: of {NVCC}", f.speed("store", case, "jitkern", NVCC), 1.0
        )
    yield from cpu_goals(f, "store", "torch cache[idx] = x, twice", 8.0)


def _sizes(ctx: Context) -> list[tuple[int, int]]:
    if ctx.device == "cpu":
        return [(656, 8192)] if ctx.quick else [(n, 8192) for n in (256, 656, 1024, 2048, 8192)]
    if ctx.quick:
        return [(656, 1), (656, 1024), (656, 131_072), (1024, 131_072)]
    counts = (1, 16, 128, 1024, 16_384, 131_072)
    return [(n, rows) for n in (256, 656, 1024, 2048) for rows in counts]


def case_of(ctx: Context, row_bytes: int, rows: int) -> Case:
    """Return the guard's case with every peer in it."""
    return replace(guarded(ctx, row_bytes, rows), impls=list(_impls(ctx, row_bytes, rows)))


def _torch_index_put(b: Buffers) -> None:
    b.k_cache[b.indices64] = b.k
    b.v_cache[b.indices64] = b.v


def _torch_index_copy(b: Buffers) -> None:
    b.k_cache.index_copy_(0, b.indices64, b.k)
    b.v_cache.index_copy_(0, b.indices64, b.v)


def _copy_(b: Buffers) -> None:
    b.copied.copy_(b.kv)


def _impls(ctx: Context, row_bytes: int, rows: int) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: ours)
    if ctx.device == "cpu":
        yield Impl("torch cache[idx] = x, twice", "peer", lambda: _torch_index_put)
        yield Impl("torch index_copy_, twice", "peer", lambda: _torch_index_copy)
        yield Impl("copy_ of the same bytes", "ceiling", lambda: _copy_, check=False)
        return
    if row_bytes in peers.STORE_ROW_BYTES:
        yield Impl("nvcc, mini-sglang style", "peer", lambda: _nvcc(row_bytes))
    else:
        yield Impl("nvcc, mini-sglang style", "peer", _no_such_row_size)
    yield Impl("triton", "peer", _triton)
    yield Impl("torch cache[idx] = x, twice", "peer", lambda: _torch_index_put)
    if not ctx.quick and rows == 131_072:
        yield Impl("torch.compile", "peer", _compiled)
    if peers.installed("vllm") and row_bytes % 256 == 0:
        yield Impl("vllm reshape_and_cache_flash", "peer", _vllm)
    if peers.installed("flashinfer") and row_bytes % 256 == 0:
        yield Impl("flashinfer append_paged_kv_cache", "peer", _flashinfer)
    yield Impl("copy kernel, same bytes", "ceiling", _copy_kernel, check=False)
    yield Impl("torch copy_, same bytes", "ceiling", lambda: _copy_, check=False)
    if rows <= 1024:
        yield Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0)


def _odd_impls(ctx: Context, two_caches: bool) -> Iterator[Impl]:
    """Return what K and V of two sizes, or one cache, are timed beside."""
    if two_caches:
        yield Impl("jitkern, twice", "peer", lambda: _one_by_one)
        yield Impl("torch cache[idx] = x, twice", "peer", lambda: _torch_index_put)
    else:
        yield Impl("torch cache[idx] = x", "peer", lambda: _torch_index_put_k)
    if ctx.device == "cpu":
        yield Impl("copy_ of the same bytes", "ceiling", lambda: _copy_, check=False)
    else:
        yield Impl("copy kernel, same bytes", "ceiling", _copy_kernel, check=False)


def _one_by_one(b: Buffers) -> None:
    jitkern.store_cache(b.k_cache, None, b.indices, b.k)
    jitkern.store_cache(b.v_cache, None, b.indices, b.v)


def _torch_index_put_k(b: Buffers) -> None:
    b.k_cache[b.indices64] = b.k


def _no_such_row_size() -> Run:
    raise LookupError("does not compile for this row size, which is no multiple of 128 B")


def _nvcc(row_bytes: int) -> Run:
    store = getattr(peers.rows(), f"store_{row_bytes}")
    return lambda b: store(b.k_cache, b.v_cache, b.indices, b.k, b.v)


def _triton() -> Run:
    store = peers.triton().store

    def run_words(b: Buffers) -> None:
        k_cache, v_cache, k, v = b.words()
        store(k_cache, v_cache, b.indices, k, v)

    return run_words


def _compiled() -> Run:
    compiled: Any = torch.compile(_put_both, dynamic=False)
    return lambda b: compiled(b.k_cache, b.v_cache, b.indices64, b.k, b.v)


def _put_both(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    k_cache[indices] = k
    v_cache[indices] = v


def _vllm() -> Run:
    from vllm import _custom_ops as ops

    one = torch.ones((), device="cuda")

    def run_flash(b: Buffers) -> None:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(t.shape[0], -1, 128)

        caches = (heads(b.k_cache).unsqueeze(1), heads(b.v_cache).unsqueeze(1))  # pages of 1 slot
        ops.reshape_and_cache_flash(heads(b.k), heads(b.v), *caches, b.indices64, "auto", one, one)

    return run_flash


def _flashinfer() -> Run:
    import flashinfer

    plans: dict[int, tuple[torch.Tensor, ...]] = {}  # each token its own request, pages of 1 slot

    def run_append(b: Buffers) -> None:
        rows = b.k.shape[0]
        if rows not in plans:
            counts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
            ones = torch.ones(rows, dtype=torch.int32, device="cuda")
            plans[rows] = (counts[:rows].contiguous(), ones - 1, counts, ones)
        batch, positions, indptr, last = plans[rows]

        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(t.shape[0], -1, 128)

        caches = (heads(b.k_cache).unsqueeze(1), heads(b.v_cache).unsqueeze(1))
        flashinfer.append_paged_kv_cache(
            heads(b.k), heads(b.v), batch, positions, caches, b.indices, indptr, last
        )

    return run_append


def _copy_kernel() -> Run:
    copy = copy_kernel()
    return lambda b: copy(b.copied, b.kv)
