"""d2h_scatter against PyTorch, with every byte around the destination accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from buffers import (
    INT_DTYPES,
    host_buffer,
)
from contract import Case
from fuzzer import SIZES, Call, Fuzzer
from mistakes import Mistake, good_pair_arguments, pair_mistakes, way_mistakes
from ref import ref_h2d_gather as ref_copy_pairs
from ref import same_bits
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import d2h_scatter, h2d_gather

SRC_ROWS = 29
DST_ROWS = 43


def test_there_and_back(device: torch.device) -> None:
    """13 MB: several threads on the CPU, the persistent kernels on CUDA."""
    src = host_buffer((20_011, 656), torch.uint8, device).view
    dst = torch.zeros(20_000, 656, dtype=torch.uint8, device=device)
    back = host_buffer((20_011, 656), torch.uint8, device, seed=1).view
    generator = torch.Generator().manual_seed(2)
    pairs = torch.stack(
        [torch.randperm(n, generator=generator)[:20_000] for n in (20_011, 20_000)], dim=1
    )
    h2d_gather(src, dst, pairs.to(device))
    d2h_scatter(dst, back, pairs.flip(1).contiguous().to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back[pairs[:, 0]], src[pairs[:, 0]])


@pytest.mark.cuda
def test_a_pageable_destination_is_refused_with_the_cure() -> None:
    dst = torch.zeros(DST_ROWS, 8)
    with pytest.raises(ValueError, match="d2h_scatter: dst: pageable host memory") as caught:
        d2h_scatter(
            torch.ones(SRC_ROWS, 8, device="cuda"), dst, torch.tensor([[0, 0]], device="cuda")
        )
    assert "pin_memory" in str(caught.value)
    assert dst.eq(0).all()


# -- for the tests that go over all ops ------------------------------------------------------------


class Scatter(Case):
    function, argument = staticmethod(d2h_scatter), "pairs"
    rows, tables, columns, distinct_columns = (SRC_ROWS, DST_ROWS), (0, 1), (0, 1), (1,)
    on_host = (1,)
    ways = ({}, {"order": "host"})
    takes_num_sms = True
    large = (20_011, 20_000), 19_999, 656

    def call(self, tables: Sequence[Tensor], indices: Tensor, **how: Any) -> None:
        assert d2h_scatter(*tables, indices, **how) is None

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        ref_copy_pairs(*tables, indices)


class ScatterOfHostPairs(Scatter):
    indices_on_host = True
    ways = tuple({"method": method} for method in ("auto", "sm", "cpu"))
    takes_num_sms = False


CASES = [Scatter(), ScatterOfHostPairs()]


def good_arguments() -> dict[str, Any]:
    return good_pair_arguments()


def mistakes() -> list[Mistake]:
    ways = '"auto", "sm" or "cpu"'
    return [
        *pair_mistakes(good_arguments(), "dst"),
        *way_mistakes(ways),
        ({"method": "both"}, ValueError, f'method: "both", expected {ways}'),
    ]


def fuzz(f: Fuzzer) -> Call:
    row, dtype = f.row()
    num_src, num_dst, count = (f.rng.choice(SIZES) for _ in range(3))
    src = f.rows([num_src, *row], dtype)
    dst = f.rows([num_dst, *row], dtype, host=True)
    index_dtype = f.rng.choice(INT_DTYPES)
    sources = f.distinct(count, num_src, index_dtype)
    pairs = torch.stack([sources, f.distinct(count, num_dst, index_dtype)], dim=1)
    pairs = f.maybe_on_host(pairs)
    way = f.way(pairs, ["auto", "sm", "cpu"])
    if way["method"] == "cpu" and f.rng.random() < 0.5:
        dst = dst.clone()  # pageable
    expected = dst.clone()
    ref_copy_pairs(src, expected, pairs)

    def prove(result: Any) -> None:
        assert result is None
        assert same_bits(dst, expected)

    how = {
        "num_sms": f.rng.choice([None, 3]),
        "order": f.rng.choice(["auto", "given", "host"]),
        **way,
    }
    arguments = {"src": src, "dst": dst, "pairs": pairs, **how}
    return Call(d2h_scatter, arguments, prove)


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    # opcheck clones all arguments, and the clone of a pinned one is pageable: on a GPU it sees only
    # what goes through the CPU.
    pairs = torch.stack([where, where.flip(0)], dim=1).cpu()
    arguments = (rows(slots), rows(slots).cpu(), pairs)
    yield "default", arguments, {}
    yield "default", arguments, {"method": "cpu", "num_threads": 1}
