"""A Triton peer of the merge of two, in the usual form: a program a token and head.

Tensors are contiguous, [tokens, heads, dim] and [tokens, heads].
"""

# ruff: noqa: N803 - compile-time constants are upper case in Triton kernels

import triton
import triton.language as tl


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


def one_kernel(out, lse, out_a, lse_a, out_b, lse_b) -> None:
    """Every program works out the weights of its own row."""
    tokens, heads, dim = out.shape
    block = triton.next_power_of_2(dim)
    _merge[(tokens, heads)](out, lse, out_a, lse_a, out_b, lse_b, DIM=dim, BLOCK=block)
