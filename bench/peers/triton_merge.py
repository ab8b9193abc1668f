"""Triton peers of the merge of two: in two kernels, and in one; a program a token and head, both.

That is the usual form. Tensors are contiguous, [tokens, heads, dim] and [tokens, heads].
"""

# ruff: noqa: N803 - compile-time constants are upper case in Triton kernels

import torch
import triton
import triton.language as tl

WEIGH_BLOCK = 256


@triton.jit
def _weigh(lse, weight_a, weight_b, lse_a, lse_b, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    a = tl.load(lse_a + at, mask=live, other=0.0)
    b = tl.load(lse_b + at, mask=live, other=0.0)
    top = tl.maximum(a, b)
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    tl.store(weight_a + at, a / (a + b), mask=live)
    tl.store(weight_b + at, b / (a + b), mask=live)
    tl.store(lse + at, top + tl.log(a + b), mask=live)


@triton.jit
def _add(out, out_a, out_b, weight_a, weight_b, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    col = tl.arange(0, BLOCK)
    live = col < DIM
    a = tl.load(out_a + row * DIM + col, mask=live).to(tl.float32)
    b = tl.load(out_b + row * DIM + col, mask=live).to(tl.float32)
    sum_ = a * tl.load(weight_a + row) + b * tl.load(weight_b + row)
    tl.store(out + row * DIM + col, sum_.to(out.dtype.element_ty), mask=live)


@triton.jit
def _merge(out, lse, out_a, lse_a, out_b, lse_b, DIM: tl.constexpr, BLOCK: tl.constexpr):
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


def two_kernels(out, lse, out_a, lse_a, out_b, lse_b, weights: torch.Tensor) -> None:
    """`weights`: float32 [2, tokens, heads], what the first kernel leaves to the second."""
    tokens, heads, dim = out.shape
    count = tokens * heads
    grid = (triton.cdiv(count, WEIGH_BLOCK),)
    _weigh[grid](lse, weights[0], weights[1], lse_a, lse_b, count, BLOCK=WEIGH_BLOCK)
    block = triton.next_power_of_2(dim)
    _add[(tokens, heads)](out, out_a, out_b, weights[0], weights[1], DIM=dim, BLOCK=block)


def one_kernel(out, lse, out_a, lse_a, out_b, lse_b) -> None:
    """Every program works out the weights of its own row."""
    tokens, heads, dim = out.shape
    block = triton.next_power_of_2(dim)
    _merge[(tokens, heads)](out, lse, out_a, lse_a, out_b, lse_b, DIM=dim, BLOCK=block)
