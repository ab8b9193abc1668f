"""What each op on tables of rows does, against PyTorch, with every byte around them accounted for.

One body for all such ops; what each has of its own is in its own tests, and `CASES` there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from buffers import DTYPES, INT_DTYPES, ROW_BYTES, Buffer, out_of_range
from contract import Case, views
from stems import STEMS, own_tests

CASES: list[Case] = [case for op in STEMS.values() for case in getattr(own_tests(op), "CASES", ())]


def names(value: Any) -> str:
    if isinstance(value, Case):
        return type(value).__name__
    return re.sub(r"[^\w=-]+", "-", str(value)).strip("-") or "plain"


each_case = pytest.mark.parametrize("case", CASES, ids=names)


def each_way_if(wanted: Callable[[Case], object]) -> pytest.MarkDecorator:
    """Those cases, in all their ways."""
    ways = [(case, how) for case in CASES if wanted(case) for how in case.ways]
    return pytest.mark.parametrize(("case", "how"), ways, ids=names)


each_way = each_way_if(lambda case: True)
each_index = pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@each_way
def test_row_sizes(device: torch.device, case: Case, how: dict[str, Any], row_bytes: int) -> None:
    indices = case.indices(device, INT_DTYPES[row_bytes % 2])
    case.run_and_compare(case.buffers(device, (row_bytes,)), indices, **how)


@pytest.mark.parametrize("num_sms", [1, 2, 3, 16, 10_000])
@pytest.mark.parametrize("row_bytes", [7, 64, 656, 1024, 8192])
@pytest.mark.parametrize("case", [case for case in CASES if case.takes_num_sms], ids=names)
def test_number_of_sms(device: torch.device, case: Case, row_bytes: int, num_sms: int) -> None:
    """The kernel of large calls, with rows of a part of a warp, of a warp and of several."""
    buffers = case.buffers(device, (row_bytes,))
    case.run_and_compare(buffers, case.indices(device), num_sms=num_sms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_index
@each_case
def test_dtypes(
    device: torch.device, case: Case, index_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    case.run_and_compare(case.buffers(device, (3, 4), dtype), case.indices(device, index_dtype))


@pytest.mark.parametrize("gaps", [(0, 0), (0, 3), (1, 0), (16, 32)], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("row_bytes", [1, 40, 656])
@each_case
def test_strides_and_misaligned_bases(
    device: torch.device, case: Case, row_bytes: int, offset: int, gaps: tuple[int, int]
) -> None:
    buffers = case.buffers(device, (row_bytes,), gaps=gaps, offsets=[offset] * len(case.tables))
    case.run_and_compare(buffers, case.indices(device))


@pytest.mark.parametrize(
    ("case", "which"), [(case, i) for case in CASES for i in range(len(case.tables))], ids=names
)
def test_one_misaligned_tensor(device: torch.device, case: Case, which: int) -> None:
    offsets = [int(i == which) for i in range(len(case.tables))]
    case.run_and_compare(case.buffers(device, (64,), offsets=offsets), case.indices(device))


@pytest.mark.parametrize("row_bytes", [16, 128, 144, 656, 1024, 4096])
@each_way_if(lambda case: case.on_host)
def test_host_rows_at_every_place_of_a_line(
    device: torch.device, case: Case, how: dict[str, Any], row_bytes: int
) -> None:
    """On CUDA, lanes start at the 128-byte line below the row."""
    gaps = (case.line_gap, 0) if case.on_host == (0,) else (0, case.line_gap)
    for offset in range(0, 128, 16):
        offsets = [offset if i in case.on_host else 0 for i in range(len(case.tables))]
        buffers = case.buffers(device, (row_bytes,), gaps=gaps, offsets=offsets)
        case.run_and_compare(buffers, case.indices(device), **how)


@pytest.mark.parametrize("shape", [(0,), (1,), (), (2, 3), (6, 1), (3, 0)], ids=str)
@each_way_if(lambda case: len(case.columns) > 1)
def test_shapes_of_pairs(
    device: torch.device, case: Case, how: dict[str, Any], shape: tuple[int, ...]
) -> None:
    indices = case.indices(device)[: torch.Size(shape).numel()].reshape(*shape, len(case.columns))
    case.run_and_compare(case.buffers(device, (40,)), indices, **how)


@each_index
@each_way
def test_only_padding(
    device: torch.device, case: Case, how: dict[str, Any], index_dtype: torch.dtype
) -> None:
    """Negative indices of any size."""
    indices = case.indices(device, index_dtype).fill_(-1)
    indices.view(-1)[::3], indices.view(-1)[1::3] = torch.iinfo(index_dtype).min, -case.rows[0]
    case.run_and_compare(case.buffers(device, (40,)), indices, **how)


@each_case
def test_nothing_to_do(device: torch.device, case: Case) -> None:
    """Tables of no rows, with padding alone and without an index; rows of no bytes."""
    padding = torch.full_like(case.indices(device), -1)
    for empty in range(len(case.rows)):
        rows = [0 if i == empty else number for i, number in enumerate(case.rows)]
        case.run_and_compare(case.buffers(device, (40,), rows=rows), padding)
    case.run_and_compare(case.buffers(device, (0, 8), torch.float32), case.indices(device))


VALUES = ["bound", "bound + 1", 2**31 - 1, 2**32 + 1, 2**62]


@pytest.mark.parametrize("value", VALUES)
@each_index
@pytest.mark.parametrize(
    ("case", "how", "column"),
    [(case, how, c) for case in CASES for how in case.ways for c in range(len(case.columns))],
    ids=names,
)
def test_out_of_range(
    device: torch.device,
    case: Case,
    how: dict[str, Any],
    column: int,
    index_dtype: torch.dtype,
    value: int | str,
) -> None:
    """On the CPU nothing is written; on a GPU only that row or pair is left out."""
    bound = case.rows[case.columns[column]]
    if isinstance(value, str):
        value = bound + value.endswith("1")
    if value > torch.iinfo(index_dtype).max:
        pytest.skip("no such int32")
    buffers = case.buffers(device, (656,))
    twins, indices = [buffer.twin() for buffer in buffers], case.indices(device, index_dtype)
    listed = indices.view(case.count, -1)
    listed[13, column] = value
    part = f"[..., {column}]" if len(case.columns) > 1 else ""
    where = f"index {value} at position 13, expected below {bound}"
    text = f"{case.function.__name__}: {case.argument}{part}: {where}"
    with out_of_range(indices.device, text):
        case.call(views(buffers), indices, **how)
    if indices.is_cuda:
        listed[13] = -1
        case.reference(views(twins), indices)
    assert all(map(Buffer.same, buffers, twins))


@each_case
def test_nan_payloads_survive(device: torch.device, case: Case) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC0DEAD, -1, 0x7FA00001], dtype=torch.int32)
    buffers = case.buffers(device, (8,), torch.float32)
    for i, buffer in enumerate(buffers):
        row, item = torch.arange(len(buffer.view))[:, None], torch.arange(8)
        buffer.view.view(torch.int32).copy_(payloads[(row + item + i) % 4])
    case.run_and_compare(buffers, case.indices(device))


@each_case
def test_under_inference_mode(device: torch.device, case: Case) -> None:
    with torch.inference_mode():
        buffers = case.buffers(device, (8,), torch.float32)
        case.run_and_compare(buffers, case.indices(device))


@each_way_if(lambda case: case.large)
def test_large_calls(device: torch.device, case: Case, how: dict[str, Any]) -> None:
    """Several threads on the CPU, the loop of a persistent kernel on CUDA."""
    assert case.large is not None
    rows, count, row_bytes = case.large
    indices = case.indices(device, torch.int32, rows, count)
    buffers = case.buffers(device, (row_bytes,), rows=rows, count=count)
    case.run_and_compare(buffers, indices, **how)


@pytest.mark.cuda
@each_way_if(lambda case: not case.indices_on_host)
def test_in_a_graph_from_the_first_call(case: Case, how: dict[str, Any]) -> None:
    """A row size of its own, so that kernels are compiled and loaded while it is captured."""
    cuda, place = torch.device("cuda"), CASES.index(case)
    buffers = case.buffers(cuda, (16 * (101 + 2 * place + 20 * case.ways.index(how)),))
    indices = torch.full_like(case.indices(cuda), -1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(views(buffers), indices, **how)
    for turn in range(3):
        indices.copy_(case.indices(cuda).roll(turn, 0))
        twins = [buffer.twin() for buffer in buffers]
        graph.replay()
        torch.cuda.synchronize()
        case.reference(views(twins), indices)
        assert all(map(Buffer.same, buffers, twins))


@pytest.mark.cuda
@each_way_if(lambda case: not case.indices_on_host)
def test_on_the_current_stream(case: Case, how: dict[str, Any]) -> None:
    """Its indices are padding until that stream comes to the call."""
    cuda = torch.device("cuda")
    buffers, indices = case.buffers(cuda, (656,)), case.indices(cuda)
    twins, now = [buffer.twin() for buffer in buffers], torch.full_like(indices, -1)
    case.call(views(buffers), now, **how)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        now.copy_(indices)
        case.call(views(buffers), now, **how)
        now.fill_(-1)
    torch.cuda.synchronize()
    case.reference(views(twins), indices)
    assert all(map(Buffer.same, buffers, twins))
