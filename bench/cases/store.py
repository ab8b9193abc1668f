"""store_cache: K and V rows to random slots of the caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import jitkern
from bench import peers
from bench.cases.common import call_case, copy_impl, empty_rows, random_rows, sizes
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure

PEERS = (peers.rows,)
PLOTS = ("of a copy",)
MIN_SLOTS = 262_144  # two caches of even 256-byte rows are then larger than twice the L2
# (bytes of a row of K, of V): MLA's one cache, and 4 heads of 192 and of 128 items.
ODD_SIZES = ((656, 0), (1536, 1024))
COPY = "copy kernel, same bytes"


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
        yield from measure(ctx, replace(case, impls=list(_impls(ctx, row_bytes, rows))))
    for row_bytes, v_row_bytes in ODD_SIZES:
        for rows in (8192,) if ctx.device == "cpu" else (1, 1024, 131_072):
            case = case_of(ctx, row_bytes, rows, v_row_bytes)
            impls = [case.ours(), *_odd_impls(ctx, bool(v_row_bytes))]
            yield from measure(ctx, replace(case, impls=impls))


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
            Impl("jitkern", "ours", lambda: _ours if v_row_bytes else _ours_alone),
            copy_impl(ctx, lambda b: (b.copied, b.kv)),
        ],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


def _ours(b: Buffers) -> None:
    jitkern.store_cache(b.k_cache, b.v_cache, b.indices, b.k, b.v)


def _ours_alone(b: Buffers) -> None:
    jitkern.store_cache(b.k_cache, None, b.indices, b.k)


def _one_by_one(b: Buffers) -> None:
    _ours_alone(b)
    jitkern.store_cache(b.v_cache, None, b.indices, b.v)


def _index_put(b: Buffers) -> None:
    _index_put_k(b)
    b.v_cache[b.indices64] = b.v


def _index_put_k(b: Buffers) -> None:
    b.k_cache[b.indices64] = b.k


def _index_copy(b: Buffers) -> None:
    b.k_cache.index_copy_(0, b.indices64, b.k)
    b.v_cache.index_copy_(0, b.indices64, b.v)


def _copy_(b: Buffers) -> None:
    b.copied.copy_(b.kv)


def _impls(ctx: Context, row_bytes: int, rows: int) -> Iterator[Impl]:
    yield Impl("jitkern", "ours", lambda: _ours)
    yield Impl("torch cache[idx] = x, twice", "peer", lambda: _index_put)
    if ctx.device == "cpu":
        yield Impl("torch index_copy_, twice", "peer", lambda: _index_copy)
        yield Impl("copy_ of the same bytes", "ceiling", lambda: _copy_, check=False)
        return
    yield Impl("nvcc, mini-sglang style", "peer", lambda: _nvcc(row_bytes))
    yield Impl("triton", "peer", _triton)
    if not ctx.quick and rows == 131_072:
        yield Impl("torch.compile", "peer", _compiled)
    if peers.installed("vllm") and row_bytes % 256 == 0:
        yield Impl("vllm reshape_and_cache_flash", "peer", _vllm)
    if peers.installed("flashinfer") and row_bytes % 256 == 0:
        yield Impl("flashinfer append_paged_kv_cache", "peer", _flashinfer)
    yield copy_impl(ctx, lambda b: (b.copied, b.kv), COPY)
    yield Impl("torch copy_, same bytes", "ceiling", lambda: _copy_, check=False)
    if rows <= 1024:
        yield Impl("empty kernel", "floor", peers.empty_launch, check=False, bytes_moved=0)


def _odd_impls(ctx: Context, two_caches: bool) -> Iterator[Impl]:
    """Yield what K and V of two sizes, or one cache, are timed beside."""
    if two_caches:
        yield Impl("jitkern, twice", "peer", lambda: _one_by_one)
        yield Impl("torch cache[idx] = x, twice", "peer", lambda: _index_put)
    else:
        yield Impl("torch cache[idx] = x", "peer", lambda: _index_put_k)
    name = COPY if ctx.device == "cuda" else "copy_ of the same bytes"
    yield copy_impl(ctx, lambda b: (b.copied, b.kv), name)


def _nvcc(row_bytes: int) -> Run:
    if row_bytes not in peers.STORE_ROW_BYTES:
        raise LookupError("does not compile for this row size, which is no multiple of 128 B")
    store = getattr(peers.rows(), f"store_{row_bytes}")
    return lambda b: store(b.k_cache, b.v_cache, b.indices, b.k, b.v)


def _triton() -> Run:
    store = peers.triton().store

    def run_words(b: Buffers) -> None:
        words = (t.view(torch.int32) for t in (b.k_cache, b.v_cache, b.k, b.v))
        k_cache, v_cache, k, v = words
        store(k_cache, v_cache, b.indices, k, v)

    return run_words


def _compiled() -> Run:
    def put_both(k_cache: Any, v_cache: Any, indices: Any, k: Any, v: Any) -> None:
        k_cache[indices] = k
        v_cache[indices] = v

    compiled: Any = torch.compile(put_both, dynamic=False)
    return lambda b: compiled(b.k_cache, b.v_cache, b.indices64, b.k, b.v)


def _heads(t: torch.Tensor) -> torch.Tensor:
    return t.view(t.shape[0], -1, 128)


def _vllm() -> Run:
    from vllm import _custom_ops as ops

    one = torch.ones((), device="cuda")

    def run_flash(b: Buffers) -> None:
        # Pages of one slot.
        caches = (_heads(b.k_cache).unsqueeze(1), _heads(b.v_cache).unsqueeze(1))
        ops.reshape_and_cache_flash(
            _heads(b.k), _heads(b.v), *caches, b.indices64, "auto", one, one
        )

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
        caches = (_heads(b.k_cache).unsqueeze(1), _heads(b.v_cache).unsqueeze(1))
        flashinfer.append_paged_kv_cache(
            _heads(b.k), _heads(b.v), batch, positions, caches, b.indices, indptr, last
        )

    return run_append
