"""h2d_gather against PyTorch, with every byte around the destination accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, host_buffer, make_buffer
from contract import Case
from mistakes import Mistake
from ref import ref_h2d_gather
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import h2d_gather

SRC_ROWS = 43
DST_ROWS = 29
METHODS = ("auto", "sm")
# If a method is set, the pairs are on the CPU.
WAYS = ({}, {"order": "sorted"}, *({"method": method} for method in METHODS))


@pytest.mark.cuda
def test_a_source_that_is_not_pinned_or_only_partly_is_refused() -> None:
    whole = torch.randint(0, 256, (64 << 10,), dtype=torch.uint8)
    pages = whole[-whole.data_ptr() % 4096 :][:16384]
    begin = pages.data_ptr()
    text = (
        f"h2d_gather: src: rows at [{begin:#x}, {begin + 16384:#x}), of which [{begin:#x}, "
        f"{begin + 8192:#x}) is pinned, expected pinned host memory for all of them"
    )
    dst, pairs = torch.zeros(16, 1024, dtype=torch.uint8), torch.tensor([[0, 0]], device="cuda")
    with pytest.raises(ValueError, match=r"^h2d_gather: src: pageable host memory, .*pin_memory"):
        h2d_gather(pages.view(16, 1024), dst.cuda(), pairs)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(begin, 8192, 0)) == 0
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        h2d_gather(pages.view(16, 1024), dst.cuda(), pairs)
    assert int(cudart.cudaHostUnregister(begin)) == 0


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("map_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("count", [23, 700_000])
def test_slot_map(
    device: torch.device, count: int, map_dtype: torch.dtype, how: dict[str, Any]
) -> None:
    """Rows are distinct, so that there is one answer; entries of the others keep their value.

    700,000 pairs of int64 are uploaded in several blocks.
    """
    num_rows = count + 20
    src = host_buffer((num_rows, 5), torch.uint8, device)
    dst = make_buffer((num_rows, 5), device=device, seed=1, gap=2)
    generator = torch.Generator().manual_seed(count)
    columns = [torch.randperm(num_rows, generator=generator)[:count] for _ in range(2)]
    pairs = torch.stack(columns, dim=1)
    pairs[3::7, 0] = pairs[4::11, 1] = -1
    pairs = pairs if "method" in how else pairs.to(device)
    slot_map = make_buffer((num_rows,), map_dtype, device, seed=2)
    dst_twin, map_twin = dst.twin(), slot_map.twin()
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map.view, **how)
    ref_h2d_gather(src.view, dst_twin.view, pairs, map_twin.view)
    assert dst.same(dst_twin)
    assert slot_map.same(map_twin)


@pytest.mark.parametrize(
    "how", [*WAYS, {"dedup": False}, {"dedup": False, "order": "sorted"}], ids=str
)
@pytest.mark.parametrize("row_bytes", [5, 656])
@pytest.mark.parametrize("distinct_rows", [1, 7, 20_000])
def test_large_calls_with_repeated_sources(
    device: torch.device, distinct_rows: int, row_bytes: int, how: dict[str, Any]
) -> None:
    """40,000 pairs: on CUDA each source row is fetched once and copied on the GPU."""
    count = 40_000
    generator = torch.Generator().manual_seed(distinct_rows)
    src = host_buffer((20_000, row_bytes), torch.uint8, device, gap=1000)  # regions far apart
    dst = make_buffer((count + 9, row_bytes), device=device, seed=1)
    sources = torch.randint(0, distinct_rows, (count,), generator=generator)
    sources[::97] = -1
    pairs = torch.stack([sources, torch.randperm(count + 9, generator=generator)[:count]], dim=1)
    pairs = pairs.to(INT_DTYPES[row_bytes % 2])
    pairs = pairs if "method" in how else pairs.to(device)
    twin = dst.twin()
    slot_map = torch.full((20_000,), -1, dtype=torch.int32, device=device)
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map, **how)
    ref_h2d_gather(src.view, twin.view, pairs)
    assert dst.same(twin)
    resident = (slot_map >= 0).nonzero().flatten()
    assert torch.equal(resident.cpu(), sources[sources >= 0].unique())
    assert torch.equal(dst.view[slot_map[resident].long()].cpu(), src.view[resident.cpu()])


class Gather(Case):
    function, argument = staticmethod(h2d_gather), "pairs"
    rows, tables, columns, distinct_columns = (SRC_ROWS, DST_ROWS), (0, 1), (0, 1), (1,)
    on_host = (0,)
    ways = ({}, {"order": "sorted"})
    takes_num_sms = True
    large = (20_011, 20_000), 19_999, 656

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        ref_h2d_gather(*tables, indices)


class GatherOfHostPairs(Gather):
    """Pairs on the CPU, whatever the device of the rows."""

    indices_on_host = True
    ways = tuple({"method": method} for method in METHODS)
    takes_num_sms = False


CASES = [Gather(), GatherOfHostPairs()]


def good_arguments() -> dict[str, Any]:
    return {**common.good_pair_arguments(), "slot_map": torch.arange(3), "dedup": True}


# 1024 threads leave 64 registers each: two 8-byte values do not fit, and the bound is the bus.
ALLOWED_SPILL_BYTES = 16


def mistakes() -> list[Mistake]:
    good = good_arguments()
    of_map = "expected shape [3], one entry for each row of src"
    memory = torch.zeros(50, 4, dtype=torch.int64)
    return [
        *common.pair_mistakes(good, "src"),
        *common.not_words("method", "'auto' or 'sm'", "cpu", "both", optional=True),
        *common.not_tensors(good, "slot_map", optional="slot_map"),
        *common.bad_indices("slot_map", good["slot_map"], cure=""),
        ({"slot_map": torch.arange(4)}, ValueError, f"slot_map: shape [4], {of_map}"),
        ({"slot_map": torch.zeros(3, 1, dtype=torch.int32)}, ValueError,
         f"slot_map: shape [3, 1], {of_map}"),
        ({"dst": memory.view(torch.float32), "slot_map": memory[7, :3]}, ValueError,
         common.overlap_text("slot_map", "dst")),
        ({"pairs": memory[7].view(2, 2), "slot_map": memory[7, :3]}, ValueError,
         common.overlap_text("pairs", "slot_map")),
        ({"src": memory.view(torch.float32)[:3], "slot_map": memory[1, :3]}, ValueError,
         common.overlap_text("slot_map", "src")),
        *(({"dedup": value}, TypeError, f"dedup: {came}, expected a bool")
          for value, came in (
              ("yes", "str"), (None, "None"), (1, "int"),
              (torch.ones(2).numpy(), "Tensor"),
          )),
    ]  # fmt: skip


MIXED_DEVICES = [("slot_map", "cuda:0 as in dst")]


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    if where.is_cuda:
        return  # opcheck clones all arguments, and the clone of a pinned one is pageable
    pairs = torch.stack([where, where.flip(0)], dim=1)
    slot_map = torch.full((slots,), -1, dtype=where.dtype)
    arguments = (rows(slots), rows(slots), pairs)
    yield "default", arguments, {}
    yield "default", arguments, {"slot_map": slot_map, "num_sms": 1}
    yield "default", arguments, {"method": "sm", "order": "sorted"}


def test_too_many_pairs(tmp_path: Path) -> None:
    pairs = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32, dtype=torch.int32)
    text = "h2d_gather: pairs: 2147483648 pairs, expected less than 2^31"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        h2d_gather(torch.zeros(2, 4), torch.zeros(2, 4), pairs.view(-1, 2))
