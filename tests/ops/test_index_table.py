"""indexing of a table in pinned host memory by indices on a GPU; on the CPU, of any table."""

from __future__ import annotations

import pytest
import torch
from buffers import INT_DTYPES, host_buffer, make_buffer, out_of_range, to_index
from ref import ref_indexing, same_bits
from torch import Tensor

import jitkern
from jitkern import indexing

ROWS = 500
# A call of few bytes, which one kernel serves; and large ones, which fetch each row once.
COUNTS = [1, 65, 70_000]


def indices_of(count: int, dtype: torch.dtype, device: torch.device, rows: int = ROWS) -> Tensor:
    """Return random indices with repeats, some of them negative."""
    generator = torch.Generator().manual_seed(count)
    indices = torch.randint(0, rows, (count,), generator=generator)
    indices[3::7] = -1
    indices[5::11] = -(2**31)
    return indices.to(dtype).to(device)


def compare(weights: Tensor, indices: Tensor, vocab_range: tuple[int, int] | None = None) -> None:
    wanted = ref_indexing(weights, indices.cpu(), vocab_range)
    found = indexing(weights, indices, vocab_range=vocab_range)
    assert found.device == indices.device
    assert same_bits(found, wanted)
    output = make_buffer(tuple(wanted.shape), wanted.dtype, indices.device, seed=3)
    assert indexing(weights, indices, output=output.view, vocab_range=vocab_range) is output.view
    assert same_bits(output.view, wanted)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("start", [0, 7, 2**31 - 250, 2**62])
def test_a_part_of_a_table(device: torch.device, start: int, count: int) -> None:
    weights = host_buffer((ROWS, 40), torch.uint8, device, gap=24, offset=8).view
    indices = indices_of(count, torch.int64, device, ROWS + 40) + start
    indices[::5] -= 2 * ROWS
    for length in (0, 300, ROWS):
        compare(weights, indices, (start, length))


@pytest.mark.parametrize("rows", [0, 1])
def test_tables_of_few_rows(device: torch.device, rows: int) -> None:
    weights = host_buffer((rows, 40), torch.uint8, device).view
    compare(weights, torch.full((9,), -1, device=device))
    compare(weights, torch.full((60_000,), rows - 1, device=device))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
def test_out_of_range(device: torch.device, index_dtype: torch.dtype, count: int) -> None:
    weights = host_buffer((ROWS, 40), torch.uint8, device).view
    indices = indices_of(count, index_dtype, device)
    indices[0] = ROWS + 3
    output = make_buffer((count, 40), device=device, seed=3)
    twin = output.twin()
    text = f"indexing: indices: index {ROWS + 3} at position 0, expected below {ROWS}"
    with out_of_range(device, text):
        indexing(weights, indices, output=output.view)
    if device.type == "cuda":
        indices[0] = -1
        twin.view.copy_(ref_indexing(weights, indices.cpu()))
    assert output.same(twin)


@pytest.mark.parametrize("count", [65, 70_000])
def test_gradient(device: torch.device, count: int) -> None:
    """It lies where the table does."""
    weights = host_buffer((ROWS, 4), torch.float64, device).view.nan_to_num_(0.0, 0.0, 0.0)
    weights.requires_grad_()
    indices = indices_of(count, torch.int64, device)
    factor = torch.arange(count, device=device).unsqueeze(1)
    (indexing(weights, indices) * factor).sum().backward()
    kept = indices >= 0
    wanted = torch.zeros(ROWS, 4, dtype=torch.float64)
    wanted.index_add_(0, indices[kept].cpu(), factor[kept].expand(-1, 4).cpu().double())
    assert weights.grad is not None
    assert torch.equal(weights.grad, wanted)


@pytest.mark.cuda
def test_a_table_larger_than_the_translation_reaches() -> None:
    """1.1 GiB: 10,000 calls of few bytes in the order of the table."""
    weights = torch.empty(9 << 24, 8, dtype=torch.uint8, pin_memory=True)
    numbers = weights.view(torch.int64).squeeze(1)
    torch.arange(9 << 24, out=numbers)
    indices = torch.randint(0, 9 << 24, (100_000,), device="cuda")
    indices[::9] = -1
    found = indexing(weights, indices).view(torch.int64).squeeze(1)
    assert torch.equal(found, indices.where(indices >= 0, 0))


@pytest.mark.cuda
def test_wrong_memory() -> None:
    table, indices = torch.zeros(5, 4), torch.tensor([1], device="cuda")
    with pytest.raises(ValueError, match=r"^indexing: weights: pageable host memory, expected pin"):
        indexing(table, indices)
    pinned, output = table.pin_memory(), torch.zeros(1, 4)
    text = r"^indexing: output: device cpu, expected cuda:0 as in indices$"
    with pytest.raises(ValueError, match=text):
        indexing(pinned, indices, output=output)
    text = r"^indexing: indices: device cpu, expected cuda:0 as in weights$"
    with pytest.raises(ValueError, match=text):
        indexing(table.cuda(), indices.cpu())
    jitkern.check()


@pytest.mark.multigpu
def test_tables_for_a_gpu_that_is_not_the_current_one() -> None:
    weights = torch.randn(ROWS, 8).pin_memory()
    for count in COUNTS:
        indices = to_index(indices_of(count, torch.int64, torch.device("cpu")).tolist(),
                           torch.int64, torch.device("cuda:1"))  # fmt: skip
        assert same_bits(indexing(weights, indices), ref_indexing(weights, indices.cpu()))
