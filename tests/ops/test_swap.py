"""swap_rows against PyTorch, with every byte around both tables accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, Buffer, distinct, out_of_range, to_index
from contract import Case, store_bits, views
from mistakes import ROWS, SLOTS, Mistake, zeros
from ref import ref_h2d_gather as ref_copy_pairs
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import swap_rows

HOST_ROWS = 61
GPU_SLOTS = 29
TRIPLES = 23
ORDERS = ["given", "host"]


def ref_swap(host: Tensor, gpu: Tensor, before: Tensor, triples: Tensor) -> None:
    """Fetch, then write back what slots held; `before` is a copy of `gpu`."""
    flat = triples.reshape(-1, 3)
    ref_copy_pairs(host, gpu, flat[:, :2])
    ref_copy_pairs(before, host, flat[:, 1:])


def triples_of(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return triples of all kinds: halves, exchanges, rows fetched twice, and padding."""
    rows, slots = distinct(HOST_ROWS, HOST_ROWS), distinct(TRIPLES, GPU_SLOTS, seed=1)
    backs = rows[TRIPLES : 2 * TRIPLES]
    triples = [list(triple) for triple in zip(rows[:TRIPLES], slots, backs, strict=True)]
    for i in (3, 17):
        triples[i][2] = -1
    for i in (4, 18, 19):
        triples[i][0] = -(2**31)
    for i in (5, 6, 20):
        triples[i][2] = triples[i][0]
    triples[7][0] = triples[8][0] = triples[9][0]
    triples[10] = [-1, slots[10], -2]
    triples[11][1] = -1
    triples[12] = [HOST_ROWS + 5, -3, HOST_ROWS]
    return to_index(triples, dtype, device)


OTHERS = "expected rows that no other triple writes"
REPEATS = {
    "slot": ([[0, 7, 1], [2, 5, 3], [-1, 6, -1], [4, 5, -1], [8, 7, 9]],
        "triples[..., 1]: 5 at positions 1 and 3, expected distinct slots"),
    "slot of nothing": ([[0, 7, 1], [-1, 7, -1]],
        "triples[..., 1]: 7 at positions 0 and 1, expected distinct slots"),
    "write back": ([[0, 4, 9], [1, 3, 9], [-1, 5, 9]],
        "triples[..., 2]: 9 at positions 0 and 1, expected distinct rows to write back to"),
    "fetch": ([[7, 0, -1], [9, 1, 7], [8, 2, 8]],
        f"triples[..., 0]: 7 at position 0, written back to at position 1, {OTHERS}"),
    "fetch of an exchange": ([[8, 0, 8], [8, 1, -1]],
        f"triples[..., 0]: 8 at position 1, written back to at position 0, {OTHERS}"),
}  # fmt: skip


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", REPEATS)
def test_what_would_depend_on_the_order_is_refused(kind: str, index_dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    buffers = CASES[0].buffers(cpu, (656,))
    twins = [buffer.twin() for buffer in buffers]
    triples, text = REPEATS[kind]
    expected = re.escape(f"swap_rows: {text}; nothing was written")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        swap_rows(*views(buffers), to_index(triples, index_dtype, cpu))
    assert all(map(Buffer.same, buffers, twins))


@pytest.mark.cuda
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", REPEATS)
def test_what_depends_on_the_order_stays_inside(kind: str, order: Any) -> None:
    """Undefined are the rows that the triples name, and nothing else."""
    cuda = torch.device("cuda")
    host, gpu = CASES[0].buffers(cuda, (656,))
    host_twin, gpu_twin = host.twin(), gpu.twin()
    triples = torch.tensor(REPEATS[kind][0])
    swap_rows(host.view, gpu.view, triples.cuda(), num_sms=2, order=order)
    torch.cuda.synchronize()
    back = triples[:, 2][triples[:, 2] >= 0]
    host.view[back] = host_twin.view[back]
    gpu.view[triples[:, 1].cuda()] = gpu_twin.view[triples[:, 1].cuda()]
    assert host.same(host_twin) and gpu.same(gpu_twin)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [None, 3, -2], ids=str)
def test_more_triples_than_a_part_holds(bad: int | None) -> None:
    """19 million rows of a byte, whose lists take more than the 512 MiB that a call may."""
    count, cuda = 19_000_000, torch.device("cuda")
    host = torch.randint(0, 256, (2 * count, 1), dtype=torch.uint8).pin_memory()
    gpu = torch.randint(0, 256, (count, 1), dtype=torch.uint8, device=cuda)
    torch.manual_seed(3)
    rows, slots = torch.randperm(2 * count, device=cuda), torch.randperm(count, device=cuda)
    triples = torch.stack([rows[:count], slots, rows[count:]], dim=1).int()
    triples[::3, 2] = triples[::3, 0]
    kept = triples.long()
    expected_host, expected_gpu = host.cuda(), gpu.clone()
    if bad is not None:
        triples[bad, 1] = count
        kept = torch.cat([kept[:bad], kept[bad % count + 1 :]])
    expected_gpu[kept[:, 1]] = expected_host[kept[:, 0]]
    expected_host[kept[:, 2]] = gpu[kept[:, 1]]
    text = f"swap_rows: triples[..., 1]: index {count} at position {(bad or 0) % count}, expected"
    with out_of_range(cuda, text) if bad is not None else nullcontext():
        swap_rows(host, gpu, triples, order="host")
    torch.cuda.synchronize()
    assert torch.equal(gpu, expected_gpu)
    assert torch.equal(host.cuda(), expected_host)


class Swap(Case):
    function, argument = staticmethod(swap_rows), "triples"
    rows, tables, columns = (HOST_ROWS, GPU_SLOTS), (0, 1), (0, 1, 0)
    on_host = (0,)
    count = TRIPLES
    ways = tuple({"order": order, "num_sms": sms} for order in ORDERS for sms in (None, 2))
    takes_num_sms = True
    line_gap = 48  # so that the two host rows of a triple begin at different places, too

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        host, gpu = tables
        before = torch.empty_like(gpu)
        store_bits(before, gpu)
        ref_swap(host, gpu, before, indices)

    def indices(
        self, device: torch.device, dtype: torch.dtype = torch.int64, *_: Any, **__: Any
    ) -> Tensor:
        return triples_of(device, dtype)


CASES = [Swap()]


def good_arguments() -> dict[str, Any]:
    triples = torch.tensor([[0, 1, 2], [1, 3, 1]])
    tensors = {"host": zeros(ROWS, 8), "device": torch.ones(SLOTS, 8), "triples": triples}
    return {**tensors, "num_sms": 2, "order": "auto"}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    wanted = "expected shape [..., 3] of (host row to fetch, slot, host row to write back to)"
    memory = torch.zeros(SLOTS, 4, dtype=torch.int64)
    table = memory.view(torch.float32)
    inside = memory[7:9].view(-1)[:6].view(2, 3)
    return [
        *common.not_tensors(good, "host", "device", "triples"),
        *common.bad_indices("triples", good["triples"]),
        *common.read_only(good, "host", "device", "triples"),
        *common.not_num_sms(),
        *common.not_rows("host", [ROWS, 8], written=True, like="device"),
        *common.not_rows("device", [SLOTS, 8], written=True),
        ({"host": zeros(ROWS, 7)}, ValueError, common.bytes_text("host", 28, [3, 7], "device")),
        ({"triples": torch.tensor(3)}, ValueError, f"triples: shape [], {wanted}"),
        ({"triples": torch.arange(4)}, ValueError, f"triples: shape [4], {wanted}"),
        ({"triples": torch.zeros(4, 2, dtype=torch.int32)}, ValueError,
         f"triples: shape [4, 2], {wanted}"),
        ({"host": table[:ROWS], "device": table[ROWS - 1 :]}, ValueError,
         common.overlap_text("host", "device")),
        ({"host": table, "triples": inside}, ValueError, common.overlap_text("triples", "host")),
        ({"device": table, "triples": inside}, ValueError,
         common.overlap_text("triples", "device")),
        ({"host": common.on_cuda(good["host"])}, ValueError,
         "host: device cuda:0, expected cpu, in the order (host, device, triples)"),
        *common.not_words("order", '"auto", "given" or "host"', "source", optional=True),
        ({"triples": torch.tensor([[0, 1, -1], [3, 3, -1]])}, IndexError,
         common.index_text("triples[..., 0]", 3, 1, 3)),
        ({"triples": torch.tensor([[[0, 50, -1]], [[0, 1, -1]]])}, IndexError,
         common.index_text("triples[..., 1]", 50, 0, 50)),
        ({"triples": torch.tensor([[0, 1, -1], [-1, 0, 7]])}, IndexError,
         common.index_text("triples[..., 2]", 7, 1, 3)),
    ]  # fmt: skip


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    if where.is_cuda:
        return  # opcheck clones all arguments, and the clone of a pinned one is pageable
    exchange = torch.stack([where, where, where], dim=1)
    yield "default", (rows(slots), rows(slots), exchange), {}
    yield "default", (rows(slots), rows(slots), exchange), {"num_sms": 1, "order": "host"}
