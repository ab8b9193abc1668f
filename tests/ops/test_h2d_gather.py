"""h2d_gather against PyTorch, with every byte around the destination accounted for."""

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
from mistakes import (
    Mistake,
    bad_indices,
    good_pair_arguments,
    index_text,
    not_tensors,
    overlap_text,
    pair_mistakes,
    way_mistakes,
)
from ref import ref_h2d_gather, same_bits
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import h2d_gather

SRC_ROWS = 43
DST_ROWS = 29
PAIRS = 23


def pairs_of(
    device: torch.device, dtype: torch.dtype = torch.int64, *, padding: bool = True
) -> Tensor:
    """Return pairs with repeated sources and distinct destinations, some of them padding."""
    sources = distinct(PAIRS, SRC_ROWS)
    sources[5] = sources[6] = sources[7]
    rows = [list(pair) for pair in zip(sources, distinct(PAIRS, DST_ROWS, seed=1), strict=True)]
    if padding:
        rows[2] = [-1, 3]
        rows[9] = [4, -1]
        rows[10] = [-5, -(2**31)]
        rows[11] = [SRC_ROWS + 5, -1]  # padding counts before the bound
    return to_index(rows, dtype, device)


def run_and_compare(src: Buffer, dst: Buffer, pairs: Tensor, num_sms: int | None = None) -> None:
    dst_twin, src_twin = dst.twin(), src.twin()
    pairs_before = pairs.clone()
    assert h2d_gather(src.view, dst.view, pairs, num_sms=num_sms) is None
    ref_h2d_gather(src_twin.view, dst_twin.view, pairs)
    assert dst.same(dst_twin)  # waits for the kernel, so src may be freed after this
    assert src.same(src_twin)
    assert torch.equal(pairs, pairs_before)


def buffers_for(device: torch.device, row: tuple[int, ...], dtype: torch.dtype) -> list[Buffer]:
    src = host_buffer((SRC_ROWS, *row), dtype, device)
    return [src, make_buffer((DST_ROWS, *row), dtype, device, seed=1)]


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_row_sizes(device: torch.device, row_bytes: int) -> None:
    pairs = pairs_of(device, INT_DTYPES[row_bytes % 2])
    run_and_compare(*buffers_for(device, (row_bytes,), torch.uint8), pairs)


@pytest.mark.parametrize("num_sms", [1, 2, 3, 16, 10_000])
@pytest.mark.parametrize("row_bytes", [7, 656, 1024])
def test_number_of_sms(device: torch.device, row_bytes: int, num_sms: int) -> None:
    run_and_compare(*buffers_for(device, (row_bytes,), torch.uint8), pairs_of(device), num_sms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
def test_dtypes(device: torch.device, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    run_and_compare(*buffers_for(device, (3, 4), dtype), pairs_of(device, index_dtype))


@pytest.mark.parametrize("src_gap", [0, 1, 16])
@pytest.mark.parametrize("dst_gap", [0, 3, 32])
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("row_bytes", [1, 40, 656])
def test_strides_and_misaligned_bases(
    device: torch.device, row_bytes: int, offset: int, dst_gap: int, src_gap: int
) -> None:
    src = host_buffer((SRC_ROWS, row_bytes), torch.uint8, device, gap=src_gap, offset=offset)
    dst = make_buffer((DST_ROWS, row_bytes), device=device, seed=1, gap=dst_gap, offset=offset)
    run_and_compare(src, dst, pairs_of(device))


@pytest.mark.parametrize("offset", [0, 16, 32, 48, 64, 80, 96, 112])
@pytest.mark.parametrize("row_bytes", [16, 128, 144, 656, 1024])
def test_rows_at_every_place_of_a_line(device: torch.device, row_bytes: int, offset: int) -> None:
    """On CUDA, lanes start at the 128-byte line below the row."""
    src = host_buffer((SRC_ROWS, row_bytes), torch.uint8, device, offset=offset)
    dst = make_buffer((DST_ROWS, row_bytes), device=device, seed=1)
    run_and_compare(src, dst, pairs_of(device))


@pytest.mark.parametrize("misaligned", ["src", "dst"])
def test_one_misaligned_tensor_of_two(device: torch.device, misaligned: str) -> None:
    src = host_buffer((SRC_ROWS, 64), torch.uint8, device, offset=int(misaligned == "src"))
    dst = make_buffer((DST_ROWS, 64), device=device, seed=1, offset=int(misaligned == "dst"))
    run_and_compare(src, dst, pairs_of(device))


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("map_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("row_bytes", [5, 656])
def test_slot_map(
    device: torch.device, row_bytes: int, map_dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    src, dst = buffers_for(device, (row_bytes,), torch.uint8)
    sources = distinct(PAIRS, SRC_ROWS)
    pairs = torch.tensor([sources, distinct(PAIRS, DST_ROWS, seed=1)], dtype=index_dtype).t()
    pairs[3, 0] = pairs[4, 1] = -1
    pairs = pairs.contiguous().to(device)
    slot_map = make_buffer((SRC_ROWS,), map_dtype, device, seed=2)
    dst_twin, map_twin = dst.twin(), slot_map.twin()
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map.view)
    ref_h2d_gather(src.view, dst_twin.view, pairs, map_twin.view)
    assert dst.same(dst_twin)
    assert slot_map.same(map_twin)


@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (2,), (2, 3, 2), (6, 1, 2), (3, 0, 2)])
def test_shapes_of_pairs(device: torch.device, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() // 2
    pairs = pairs_of(device)[:count].reshape(shape)
    run_and_compare(*buffers_for(device, (40,), torch.uint8), pairs)


def test_only_padding(device: torch.device) -> None:
    src, dst = buffers_for(device, (40,), torch.uint8)
    before = dst.twin()
    run_and_compare(src, dst, torch.full((9, 2), -1, device=device))
    assert dst.same(before)


def test_rows_of_no_bytes(device: torch.device) -> None:
    src = host_buffer((SRC_ROWS, 0), torch.float32, device).view
    h2d_gather(src, torch.empty(DST_ROWS, 0, device=device), pairs_of(device))


def test_a_source_of_no_rows(device: torch.device) -> None:
    src = torch.empty(0, 8)
    dst = torch.zeros(DST_ROWS, 8, device=device)
    h2d_gather(src, dst, torch.full((4, 2), -1, device=device))
    assert dst.eq(0).all()


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("value", ["bound", "bound + 1", 2**31 - 1, 2**32 + 1, 2**62])
def test_out_of_range(
    device: torch.device, column: int, value: int | str, index_dtype: torch.dtype
) -> None:
    bound = (SRC_ROWS, DST_ROWS)[column]
    if isinstance(value, str):
        value = bound + value.endswith("1")
    if value > torch.iinfo(index_dtype).max:
        pytest.skip("no such int32")
    src, dst = buffers_for(device, (656,), torch.uint8)
    slot_map = make_buffer((SRC_ROWS,), torch.int64, device, seed=2)
    dst_twin, map_twin = dst.twin(), slot_map.twin()
    rows = [[s, d] for s, d in zip(distinct(PAIRS, SRC_ROWS), range(PAIRS), strict=True)]
    pairs = to_index(rows, index_dtype, device)
    pairs[13, column] = value
    text = f"h2d_gather: pairs[..., {column}]: index {value} at position 13, expected below {bound}"
    with out_of_range(device, text):
        h2d_gather(src.view, dst.view, pairs, slot_map=slot_map.view)
    if device.type == "cuda":  # only that pair is left out
        pairs[13] = -1
        ref_h2d_gather(src.view, dst_twin.view, pairs, map_twin.view)
    assert dst.same(dst_twin)
    assert slot_map.same(map_twin)


def test_columns_of_wider_rows(device: torch.device) -> None:
    """Heads 3 to 6 of 8 on both sides: rows contiguous, far apart, not at the start."""
    src = host_buffer((SRC_ROWS, 8, 16), torch.bfloat16, device)
    dst = make_buffer((DST_ROWS, 8, 16), torch.bfloat16, device, seed=1)
    run_and_compare(src.part(src.view[:, 3:7]), dst.part(dst.view[:, 1:5]), pairs_of(device))


def test_trailing_shapes_may_differ(device: torch.device) -> None:
    src = host_buffer((SRC_ROWS, 24), torch.float32, device)
    dst = make_buffer((DST_ROWS, 2, 3, 4), torch.float32, device, seed=1)
    twin = dst.twin()
    h2d_gather(src.view, dst.view, pairs_of(device))
    ref_h2d_gather(src.view.view(SRC_ROWS, 2, 3, 4), twin.view, pairs_of(device))
    assert dst.same(twin)


def test_large_calls(device: torch.device) -> None:
    """13 MB: several threads on the CPU, the persistent kernel's loop on CUDA."""
    src = host_buffer((20_011, 656), torch.uint8, device)
    dst = make_buffer((20_000, 656), device=device, seed=1)
    generator = torch.Generator().manual_seed(2)
    sources = torch.randint(0, 20_011, (19_999,), generator=generator)
    pairs = torch.stack([sources, torch.randperm(20_000, generator=generator)[:19_999]], dim=1)
    pairs[::11, 0] = -1
    run_and_compare(src, dst, pairs.to(device))


def test_a_slot_map_that_points_outside_of_the_destination(device: torch.device) -> None:
    src, dst = buffers_for(device, (656,), torch.uint8)
    twin = dst.twin()
    slot_map = torch.full((SRC_ROWS,), -1, device=device)
    slot_map[9] = DST_ROWS
    pairs = torch.tensor([[3, 4], [9, 5]], device=device)
    text = f"h2d_gather: slot_map: index {DST_ROWS} at position 9, expected below {DST_ROWS}"
    with out_of_range(device, text):
        h2d_gather(src.view, dst.view, pairs, slot_map=slot_map, reuse_resident=True)
    if device.type == "cuda":
        ref_h2d_gather(src.view, twin.view, pairs[:1])
    assert dst.same(twin)


# -- for the tests that go over all ops ------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    flags = {"dedup": True, "reuse_resident": False}
    return {**good_pair_arguments(), "slot_map": torch.arange(3), **flags}


# 1024 threads leave 64 registers each: two 8-byte values do not fit, and the bound is the bus.
ALLOWED_SPILL_BYTES = 16
UNCHECKED = {"dedup"}  # only its truth counts


def mistakes() -> list[Mistake]:
    good = good_arguments()
    of_map = "expected shape [3], one entry for each row of src"
    without = "expected a slot_map that says which rows are resident, or False"
    memory = torch.zeros(50, 4, dtype=torch.int64)
    return [
        *pair_mistakes(good, "source", "destination"),
        *way_mistakes('"auto", "sm", "cpu" or "both"'),
        *[({"method": method, "reuse_resident": True}, ValueError,
           f'method: "{method}" with reuse_resident, expected "sm": the slot map is on the GPU')
          for method in ("cpu", "both")],
        *not_tensors(good, "slot_map", optional="slot_map"),
        *bad_indices("slot_map", good["slot_map"]),
        ({"slot_map": torch.arange(4)}, ValueError, f"slot_map: shape [4], {of_map}"),
        ({"slot_map": torch.zeros(3, 1, dtype=torch.int32)}, ValueError,
         f"slot_map: shape [3, 1], {of_map}"),
        ({"dst": memory.view(torch.float32), "slot_map": memory[7, :3]}, ValueError,
         overlap_text("slot_map", "dst")),
        ({"pairs": memory[7].view(2, 2), "slot_map": memory[7, :3]}, ValueError,
         overlap_text("pairs", "slot_map")),
        ({"reuse_resident": True, "slot_map": None}, ValueError,
         f"reuse_resident: True without a slot_map, {without}"),
        ({"reuse_resident": True, "slot_map": torch.tensor([-1, -1, 50])}, IndexError,
         index_text("slot_map", 50, 2, 50)),
        ({"reuse_resident": "yes"}, TypeError, "reuse_resident: str, expected a bool"),
        ({"reuse_resident": None}, TypeError, "reuse_resident: None, expected a bool"),
        ({"reuse_resident": 1}, TypeError, "reuse_resident: int, expected a bool"),
    ]  # fmt: skip


MIXED_DEVICES = [("slot_map", "cuda:0 as in dst")]


@pytest.mark.cuda
def test_a_source_on_the_gpu() -> None:
    arguments = good_arguments()
    arguments["src"] = arguments["src"].cuda()
    with pytest.raises(ValueError, match=r"^h2d_gather: src: device cuda:0, expected cpu$"):
        h2d_gather(**arguments)


def fuzz(f: Fuzzer) -> Call:
    row, dtype = f.row()
    num_src, num_dst, count = (f.rng.choice(SIZES) for _ in range(3))
    src = f.tensor([num_src, *row], dtype, host=True)
    dst = f.tensor([num_dst, *row], dtype)
    index_dtype = f.rng.choice(INT_DTYPES)
    sources = f.distinct(count, num_src, index_dtype)
    pairs = torch.stack([sources, f.distinct(count, num_dst, index_dtype)], dim=1)
    pairs = f.maybe_on_host(pairs)
    slot_map, reuse_resident = None, False
    if f.rng.random() < 0.5:
        reuse_resident = f.rng.random() < 0.5
        highest = 0 if reuse_resident else 9  # nothing is resident
        slot_map = f.integers([num_src], -9, highest, f.rng.choice(INT_DTYPES))
    methods = ["auto", "sm"] if reuse_resident else ["auto", "sm", "cpu", "both"]
    way = f.way(pairs, methods)
    if way["method"] == "cpu" and f.rng.random() < 0.5:
        src = src.clone()  # pageable
    expected, expected_map = dst.clone(), None if slot_map is None else slot_map.clone()
    if 0 not in row:  # rows of no bytes: nothing to do
        ref_h2d_gather(src, expected, pairs, expected_map)

    def prove(result: Any) -> None:
        assert result is None
        assert same_bits(dst, expected)
        assert slot_map is None or torch.equal(slot_map, expected_map)

    return Call(
        h2d_gather,
        {"src": src, "dst": dst, "pairs": pairs, "slot_map": slot_map,
         "num_sms": f.rng.choice([None, 1, 2, 7]), "dedup": f.rng.random() < 0.5,
         "reuse_resident": reuse_resident, "order": f.rng.choice(["auto", "source", "given"]),
         **way},
        prove,
    )  # fmt: skip


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    # opcheck clones all arguments, and the clone of a pinned one is pageable: on a GPU it sees only
    # what goes through the CPU.
    pairs = torch.stack([where, where.flip(0)], dim=1).cpu()
    slot_map = torch.full((slots,), -1, dtype=where.dtype, device=where.device)
    arguments = (rows(slots).cpu(), rows(slots), pairs)
    yield "default", arguments, {}
    yield "default", arguments, {"slot_map": slot_map, "num_sms": 1}
    yield "default", arguments, {"method": "cpu", "num_threads": 1}
