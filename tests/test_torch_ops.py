"""The ops under ``torch.compile``: registered as PyTorch asks, one graph, the values of eager."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch._inductor.config
from needs import needs_cxx
from proved import unproved
from ref import ref_indexing, ref_store, same_bits
from stems import own_tests
from torch import Tensor
from torch.library import opcheck

import jitkern
import jitkern.torch_ops
from jitkern.ops._ops import OPS as TABLE
from jitkern.ops.register import OVERLOADS

OPS = torch.ops.jitkern
SLOTS = 40

of_these_sources = unproved("inductor", "src/jitkern/ops/*.py", "tests/test_torch_ops.py")


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    torch.compiler.reset()
    torch._inductor.config.cpp_cache_precompile_headers = False  # twenty seconds, on a new machine


def rows(count: int, row_shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(count, *row_shape, device=device)


def slots(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Distinct slots, in no order, the second one skipped."""
    chosen = torch.randperm(SLOTS, device=device)[:count].to(dtype)
    if count > 1:
        chosen[1] = -1
    return chosen


@pytest.mark.parametrize(
    ("row_shape", "count", "index_dtype"),
    [((3, 5), 6, torch.int32), ((1,), 0, torch.int64)],
    ids=str,
)
def test_opcheck(
    row_shape: tuple[int, ...], count: int, index_dtype: torch.dtype, device: torch.device
) -> None:
    """Every op that is one for PyTorch, with the calls that its own tests name."""
    for op in TABLE:
        import_module(f"jitkern.ops.{op.stem}")
        if op.function not in OVERLOADS:
            continue
        where = slots(count, index_dtype, device)
        calls = own_tests(op).opchecks(lambda n: rows(n, row_shape, device), SLOTS, where)
        for overload, args, kwargs in calls:
            opcheck(getattr(getattr(OPS, op.function), overload), args, kwargs)


def test_every_op_with_kernels_is_one_for_pytorch() -> None:
    assert [op.function for op in TABLE if op.has_kernels] == [
        op.function for op in TABLE if hasattr(OPS, op.function)
    ]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_cxx, of_these_sources])]
)
def test_dynamic_shapes_compile_once(backend: str, device: torch.device) -> None:
    def step(k_cache: Tensor, v_cache: Tensor, where: Tensor, k: Tensor, v: Tensor) -> Tensor:
        jitkern.store_cache(k_cache, v_cache, where, k, v)
        return jitkern.indexing(k_cache, where, vocab_range=(0, where.shape[0])) * 1

    run = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for count in (5, 9, 17):
        k_cache, v_cache = rows(SLOTS, (8,), device), rows(SLOTS, (8,), device)
        k, v = rows(count, (8,), device), rows(count, (8,), device)
        where = slots(count, torch.int64, device)
        expected = (k_cache.clone(), v_cache.clone())
        ref_store(*expected, where, k, v)
        with torch.compiler.set_stance("default" if count == 5 else "fail_on_recompile"):
            result = run(k_cache, v_cache, where, k, v)
        assert same_bits(k_cache, expected[0])
        assert same_bits(v_cache, expected[1])
        assert same_bits(result, ref_indexing(expected[0], where, (0, count)))


MISTAKES: dict[str, dict[str, Any]] = {
    "index": {"where": torch.tensor([0, SLOTS])},
    "dtype": {"where": torch.tensor([0.0, 1.0])},
    "rows": {"k": torch.zeros(3, 8)},
    "row bytes": {"k": torch.zeros(2, 4)},
    "missing": {"k": None},
    "vocab_range": {"vocab_range": (0, SLOTS + 1)},
    "vocab_range length": {"vocab_range": (1,)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_that_of_eager(mistake: str) -> None:
    def step(where: Tensor, k: Tensor, vocab_range: tuple[int, int] | None) -> Tensor:
        jitkern.store_cache(cache, cache.clone(), where, k, torch.zeros(2, 8))
        return jitkern.indexing(cache, where, vocab_range=vocab_range)

    cache = torch.zeros(SLOTS, 8)
    good = {"where": torch.tensor([0, 1]), "k": torch.zeros(2, 8), "vocab_range": None}
    arguments = {**good, **MISTAKES[mistake]}
    with pytest.raises((TypeError, ValueError, IndexError)) as eager:
        step(**arguments)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
        torch.compile(step, fullgraph=True, backend="aot_eager")(**arguments)


def test_a_plain_call_registers_nothing(
    forked_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = """
import sys, torch, jitkern
jitkern.store_cache(*torch.zeros(2, 4, 8), torch.tensor([1]), *torch.ones(2, 1, 8))
assert "jitkern.torch_ops" not in sys.modules and "torch._dynamo" not in sys.modules
import jitkern.torch_ops
assert "torch._dynamo" not in sys.modules  # a second of import
"""
    forked_python(code)


def test_importing_an_op_does_not_import_torch(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """`jitkern warm` compiles kernels, and PyTorch takes a second to import."""
    fresh_python("import sys, jitkern.ops.store; assert 'torch' not in sys.modules")


@of_these_sources
def test_the_first_call_may_be_a_compiled_one_of_a_module(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The op is imported before PyTorch is, so that nothing is bound yet."""
    code = """
from jitkern.ops.index import indexing
import torch
weights = torch.randn(9, 4)
lookup = torch.compile(lambda i: indexing(weights, i), fullgraph=True, backend="eager")
assert torch.equal(lookup(torch.tensor([2, 1])), weights[[2, 1]])
"""
    fresh_python(code)
