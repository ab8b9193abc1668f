"""Calls on several tensors that PyTorch takes one by one: all are made, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jitkern
from jitkern.ops import dispatch


def told(*errors: Exception | None) -> tuple[list[int], Callable[[int], Callable[[], int]]]:
    """What was called, and a call of a number: each takes the next of the errors, or none."""
    called: list[int] = []
    left: Iterator[Exception | None] = iter(errors)

    def call_of(number: int) -> Callable[[], int]:
        def call() -> int:
            called.append(number)
            if (error := next(left, None)) is not None:
                raise error
            return number

        return call

    return called, call_of


def test_all_results() -> None:
    called, call_of = told()
    assert dispatch.call_each([call_of(1), call_of(2)]) == (1, 2)
    assert dispatch.call_each([]) == ()
    assert called == [1, 2]


def test_an_index_error_in_front_of_the_first_is_the_call_s() -> None:
    called, call_of = told(IndexError("first"))
    with pytest.raises(IndexError, match="first"):
        dispatch.call_each([call_of(1), call_of(2)])
    assert called == [1]


LATE = "indexing: indices: index 10 {} (found by an earlier call on cuda:0; that row is zero)"


@pytest.mark.parametrize("kind", [IndexError, ValueError])
def test_a_late_one_is_raised_behind_the_last(kind: type[Exception]) -> None:
    """The first of several; the type is what the earlier op raises."""
    late = [kind(LATE.format(which)) for which in ("first", "second")]
    called, call_of = told(None, late[0], None, late[1])
    with pytest.raises(kind, match="first"):
        dispatch.call_each([call_of(number) for number in range(3)])
    assert called == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, IndexError])
def test_others_are_raised_at_once(kind: type[Exception]) -> None:
    """On the CPU the call's own IndexError is one."""
    called, call_of = told(None, kind("wrong"))
    with pytest.raises(kind, match="wrong"):
        dispatch.call_each([call_of(number) for number in range(3)])
    assert called == [0, 1]


class Waiting(TorchDispatchMode):
    """What a kernel finds is there by the next call."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        return result


@pytest.mark.cuda
def test_tables_with_a_bad_index() -> None:
    tables = tuple(torch.randn(10, n, device="cuda") for n in (4, 8, 16))
    outputs = tuple(torch.full((3, n), 7.0, device="cuda") for n in (4, 8, 16))
    indices = torch.tensor([1, 10, 3], device="cuda")
    with Waiting(), pytest.raises(IndexError, match="indexing: indices: index 10 at position 1"):
        jitkern.indexing(tables, indices, output=outputs)
    for table, output in zip(tables, outputs, strict=True):
        assert torch.equal(output[[0, 2]], table[[1, 3]]) and not output[1].any()
    with pytest.raises(IndexError):  # of the last table
        jitkern.check()
    jitkern.check()


@pytest.mark.cuda
def test_tables_with_a_bad_index_in_one_call() -> None:
    """It is heard of once, whenever the GPU comes to it."""
    tables = tuple(torch.randn(10, n, device="cuda") for n in (4, 8, 16))
    outputs = tuple(torch.full((3, n), 7.0, device="cuda") for n in (4, 8, 16))
    indices = torch.tensor([1, 10, 3], device="cuda")
    for _ in range(50):
        jitkern.indexing(tables, indices, output=outputs)
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match="indexing: indices: index 10 at position 1"):
            jitkern.check()
        jitkern.check()
    for table, output in zip(tables, outputs, strict=True):
        assert torch.equal(output[[0, 2]], table[[1, 3]]) and not output[1].any()
