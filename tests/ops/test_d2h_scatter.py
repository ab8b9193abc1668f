"""d2h_scatter against PyTorch, with every byte around the destination accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from buffers import (
    DTYPES,
    INT_DTYPES,
    ROW_BYTES,
    Buffer,
    distinct,
    host_buffer,
    make_buffer,
    out_of_range,
    to_index,
)
from fuzzer import SIZES, Call, Fuzzer
from mistakes import Mistake, good_pair_arguments, pair_mistakes, way_mistakes
from ref import ref_h2d_gather as ref_copy_pairs
from ref import same_bits
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import d2h_scatter, h2d_gather

SRC_ROWS = 29
DST_ROWS = 43
PAIRS = 23


def pairs_of(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return pairs with repeated sources and distinct destinations, some of them padding."""
    sources = distinct(PAIRS, SRC_ROWS)
    sources[5] = sources[6] = sources[7]
    rows = [list(pair) for pair in zip(sources, distinct(PAIRS, DST_ROWS, seed=1), strict=True)]
    rows[2], rows[9], rows[10], rows[11] = [-1, 3], [4, -1], [-5, -(2**31)], [SRC_ROWS + 5, -1]
    return to_index(rows, dtype, device)


def run_and_compare(src: Buffer, dst: Buffer, pairs: Tensor, num_sms: int | None = None) -> None:
    dst_twin, src_twin = dst.twin(), src.twin()
    assert d2h_scatter(src.view, dst.view, pairs, num_sms=num_sms) is None
    if pairs.is_cuda:
        torch.cuda.synchronize()
    ref_copy_pairs(src_twin.view, dst_twin.view, pairs)
    assert dst.same(dst_twin)
    assert src.same(src_twin)


def buffers_for(device: torch.device, row: tuple[int, ...], dtype: torch.dtype) -> list[Buffer]:
    src = make_buffer((SRC_ROWS, *row), dtype, device, seed=1)
    return [src, host_buffer((DST_ROWS, *row), dtype, device)]


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_row_sizes(device: torch.device, row_bytes: int) -> None:
    pairs = pairs_of(device, INT_DTYPES[row_bytes % 2])
    run_and_compare(*buffers_for(device, (row_bytes,), torch.uint8), pairs)


@pytest.mark.parametrize("num_sms", [1, 3, 10_000])
@pytest.mark.parametrize("row_bytes", [7, 656, 1024])
def test_number_of_sms(device: torch.device, row_bytes: int, num_sms: int) -> None:
    run_and_compare(*buffers_for(device, (row_bytes,), torch.uint8), pairs_of(device), num_sms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    run_and_compare(*buffers_for(device, (3, 4), dtype), pairs_of(device))


@pytest.mark.parametrize("src_gap", [0, 1, 16])
@pytest.mark.parametrize("dst_gap", [0, 3, 32])
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("row_bytes", [1, 40, 656])
def test_strides_and_misaligned_bases(
    device: torch.device, row_bytes: int, offset: int, dst_gap: int, src_gap: int
) -> None:
    src = make_buffer((SRC_ROWS, row_bytes), device=device, seed=1, gap=src_gap, offset=offset)
    dst = host_buffer((DST_ROWS, row_bytes), torch.uint8, device, gap=dst_gap, offset=offset)
    run_and_compare(src, dst, pairs_of(device))


@pytest.mark.parametrize("offset", [0, 16, 48, 112])
@pytest.mark.parametrize("row_bytes", [16, 144, 656, 1024])
def test_rows_at_every_place_of_a_line(device: torch.device, row_bytes: int, offset: int) -> None:
    src = make_buffer((SRC_ROWS, row_bytes), device=device, seed=1)
    dst = host_buffer((DST_ROWS, row_bytes), torch.uint8, device, offset=offset)
    run_and_compare(src, dst, pairs_of(device))


@pytest.mark.parametrize("shape", [(0, 2), (2,), (2, 3, 2), (3, 0, 2)])
def test_shapes_of_pairs(device: torch.device, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() // 2
    pairs = pairs_of(device)[:count].reshape(shape)
    run_and_compare(*buffers_for(device, (40,), torch.uint8), pairs)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("column", [0, 1])
def test_out_of_range(device: torch.device, column: int, index_dtype: torch.dtype) -> None:
    bound = (SRC_ROWS, DST_ROWS)[column]
    src, dst = buffers_for(device, (656,), torch.uint8)
    twin = dst.twin()
    rows = [[s, d] for s, d in zip(distinct(PAIRS, SRC_ROWS), range(PAIRS), strict=True)]
    pairs = to_index(rows, index_dtype, device)
    pairs[13, column] = bound
    text = f"d2h_scatter: pairs[..., {column}]: index {bound} at position 13, expected below"
    with out_of_range(device, text):
        d2h_scatter(src.view, dst.view, pairs)
    if device.type == "cuda":
        pairs[13] = -1
        ref_copy_pairs(src.view, twin.view, pairs)
    assert dst.same(twin)


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


def good_arguments() -> dict[str, Any]:
    return good_pair_arguments()


def mistakes() -> list[Mistake]:
    ways = '"auto", "sm" or "cpu"'
    return [
        *pair_mistakes(good_arguments(), "destination", "source"),
        *way_mistakes(ways),
        ({"method": "both"}, ValueError, f'method: "both", expected {ways}'),
    ]


def fuzz(f: Fuzzer) -> Call:
    row, dtype = f.row()
    num_src, num_dst, count = (f.rng.choice(SIZES) for _ in range(3))
    src = f.tensor([num_src, *row], dtype)
    dst = f.tensor([num_dst, *row], dtype, host=True)
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
        "order": f.rng.choice(["auto", "destination", "given"]),
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
