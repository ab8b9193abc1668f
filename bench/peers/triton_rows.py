"""Triton peers: tiles of whole rows, 4-byte words that Triton merges into 16-byte accesses."""

# ruff: noqa: N803 - compile-time constants are upper case in Triton kernels

import torch
import triton
import triton.language as tl


@triton.jit
def _store(
    k_cache,
    v_cache,
    indices,
    k,
    v,
    num_rows,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    live = (row < num_rows)[:, None] & (col < WORDS)[None, :]
    slot = tl.load(indices + row, mask=row < num_rows, other=0).to(tl.int64)
    here = row[:, None] * WORDS + col[None, :]
    there = slot[:, None] * WORDS + col[None, :]
    k_words = tl.load(k + here, mask=live)
    v_words = tl.load(v + here, mask=live)
    tl.store(k_cache + there, k_words, mask=live)
    tl.store(v_cache + there, v_words, mask=live)


@triton.jit
def _index(
    output,
    weights,
    indices,
    num_rows,
    start,
    count,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < num_rows)[:, None] & (col < WORDS)[None, :]
    at = tl.load(indices + row, mask=row < num_rows, other=0).to(tl.int64) - start
    inside = ((at >= 0) & (at < count))[:, None] & live
    words = tl.load(weights + at[:, None] * WORDS + col[None, :], mask=inside, other=0)
    tl.store(output + row[:, None] * WORDS + col[None, :], words, mask=live)


@triton.jit
def _pairs(
    dst,
    src,
    pairs,
    num_rows,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    col = tl.arange(0, BLOCK)
    tile = tl.program_id(0)
    while tile * ROWS < num_rows:
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        known = row < num_rows
        here = tl.load(pairs + 2 * row, mask=known, other=0).to(tl.int64)
        there = tl.load(pairs + 2 * row + 1, mask=known, other=0).to(tl.int64)
        live = known[:, None] & (col < WORDS)[None, :]
        words = tl.load(src + here[:, None] * WORDS + col[None, :], mask=live)
        tl.store(dst + there[:, None] * WORDS + col[None, :], words, mask=live)
        tile += tl.num_programs(0)


@triton.jit
def _swap(src_addresses, dst_addresses, sizes, count, CHUNK: tl.constexpr):
    at = tl.arange(0, CHUNK // 8)
    copy = tl.program_id(0)
    while copy < count:
        src = tl.load(src_addresses + copy).to(tl.pointer_type(tl.int64))
        dst = tl.load(dst_addresses + copy).to(tl.pointer_type(tl.int64))
        words = tl.load(sizes + copy) // 8
        for begin in range(0, words, CHUNK // 8):
            live = begin + at < words
            tl.store(dst + begin + at, tl.load(src + begin + at, mask=live), mask=live)
        copy += tl.num_programs(0)


def _tile(words: int) -> tuple[int, int]:
    block = triton.next_power_of_2(words)
    return block, max(1, 1024 // block)


def store(k_cache, v_cache, indices, k, v) -> None:
    """Arguments as store_cache's, as int32 words [rows, row_bytes / 4]."""
    num_rows, words = k.shape
    block, rows = _tile(words)
    _store[(triton.cdiv(num_rows, rows),)](
        k_cache, v_cache, indices, k, v, num_rows, WORDS=words, BLOCK=block, ROWS=rows
    )


def index(weights, indices, output, start: int, count: int) -> None:
    """Rows of `weights` outside [start, start + count) of the vocabulary become zeros."""
    num_rows, words = output.shape
    block, rows = _tile(words)
    block = min(block, 2048)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(words, block))
    _index[grid](
        output, weights, indices, num_rows, start, count, WORDS=words, BLOCK=block, ROWS=rows
    )


def pairs(src, dst, index_pairs: torch.Tensor, num_programs: int) -> None:
    """Row pairs[i][0] of `src` to row pairs[i][1] of `dst`; either may be pinned host memory."""
    num_rows, words = index_pairs.shape[0], src.shape[1]
    block, rows = _tile(words)
    grid = (min(num_programs, triton.cdiv(num_rows, rows)),)
    _pairs[grid](dst, src, index_pairs, num_rows, WORDS=words, BLOCK=block, ROWS=rows)


def swap(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy between lists of addresses (pinned int64), by 12 programs, as vLLM launches it."""
    lists = [one.to("cuda", non_blocking=True) for one in (src, dst, sizes)]
    chunk = min(triton.next_power_of_2(int(sizes[0])), 8192)
    _swap[(min(12, len(src)),)](*lists, len(src), CHUNK=chunk)
