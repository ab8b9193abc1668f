"""Triton peers. Rows move as tiles of 4-byte words, which Triton merges to 16-byte accesses."""

# ruff: noqa: N803 - compile-time constants are upper case in Triton kernels

import torch
import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def _store(
    k_cache, v_cache, indices, k, v, num_rows, WORDS: constexpr, BLOCK: constexpr, ROWS: constexpr
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
    output, weights, indices, num_rows, start, count,
    WORDS: constexpr, BLOCK: constexpr, ROWS: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < num_rows)[:, None] & (col < WORDS)[None, :]
    at = tl.load(indices + row, mask=row < num_rows, other=0).to(tl.int64) - start
    inside = ((at >= 0) & (at < count))[:, None] & live
    words = tl.load(weights + at[:, None] * WORDS + col[None, :], mask=inside, other=0)
    tl.store(output + row[:, None] * WORDS + col[None, :], words, mask=live)


@triton.jit
def _pairs(dst, src, pairs, num_rows, WORDS: constexpr, BLOCK: constexpr, ROWS: constexpr):
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
def _merge(out, lse, out_a, lse_a, out_b, lse_b, DIM: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    weight_a = tl.load(lse_a + row)
    weight_b = tl.load(lse_b + row)
    top = tl.maximum(weight_a, weight_b)
    weight_a = tl.exp(weight_a - top)
    weight_b = tl.exp(weight_b - top)
    total = weight_a + weight_b
    tl.store(lse + row, top + tl.log(total))
    col = tl.arange(0, BLOCK)
    live = col < DIM
    a = tl.load(out_a + row * DIM + col, mask=live).to(tl.float32)
    b = tl.load(out_b + row * DIM + col, mask=live).to(tl.float32)
    sum_ = a * (weight_a / total) + b * (weight_b / total)
    tl.store(out + row * DIM + col, sum_.to(out.dtype.element_ty), mask=live)


@triton.jit
def _swap(src_addresses, dst_addresses, sizes, count, CHUNK: constexpr):
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
    grid = (triton.cdiv(num_rows, rows),)
    _store[grid](k_cache, v_cache, indices, k, v, num_rows, words, block, rows)


def index(weights, indices, output, start: int, count: int) -> None:
    """Rows of `weights` outside [start, start + count) of the vocabulary become zeros."""
    num_rows, words = output.shape
    block, rows = _tile(words)
    block = min(block, 2048)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(words, block))
    _index[grid](output, weights, indices, num_rows, start, count, words, block, rows)


def pairs(src, dst, index_pairs: torch.Tensor, num_programs: int) -> None:
    """Row pairs[i][0] of `src` to row pairs[i][1] of `dst`; either may be pinned host memory."""
    num_rows, words = index_pairs.shape[0], src.shape[1]
    block, rows = _tile(words)
    grid = (min(num_programs, triton.cdiv(num_rows, rows)),)
    _pairs[grid](dst, src, index_pairs, num_rows, words, block, rows)


def merge(out, lse, out_a, lse_a, out_b, lse_b) -> None:
    """Merge two, in the usual form: each program works out the weights of its token and head."""
    tokens, heads, dim = out.shape
    block = triton.next_power_of_2(dim)
    _merge[(tokens, heads)](out, lse, out_a, lse_a, out_b, lse_b, dim, block)


def swap(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy between lists of addresses (pinned int64), by 12 programs, as vLLM launches it."""
    lists = [one.to("cuda", non_blocking=True) for one in (src, dst, sizes)]
    chunk = min(triton.next_power_of_2(int(sizes[0])), 8192)
    _swap[(min(12, len(src)),)](*lists, len(src), chunk)
