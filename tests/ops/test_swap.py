"""swap_rows against PyTorch, with every byte around both tables accounted for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from buffers import (
    INT_DTYPES,
    Buffer,
    distinct,
    host_buffer,
    make_buffer,
    out_of_range,
    to_index,
)
from contract import Case, store_bits
from fuzzer import SIZES, Call, Fuzzer
from mistakes import (
    ROWS,
    SLOTS,
    Mistake,
    apart_text,
    bad_indices,
    bytes_text,
    index_text,
    not_ints,
    not_tensors,
    on_cuda,
    overlap_text,
    read_only,
    stride_text,
    zeros,
)
from ref import ref_h2d_gather as ref_copy_pairs
from ref import same_bits
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


def buffers_for(
    device: torch.device, row: tuple[int, ...], dtype: torch.dtype = torch.uint8
) -> list[Buffer]:
    host = host_buffer((HOST_ROWS, *row), dtype, device)
    return [host, make_buffer((GPU_SLOTS, *row), dtype, device, seed=1)]


REPEATS = {
    "slot": (
        [[0, 7, 1], [2, 5, 3], [-1, 6, -1], [4, 5, -1], [8, 7, 9]],
        "triples[..., 1]: 5 at positions 1 and 3, expected distinct slots",
    ),
    "slot of nothing": (
        [[0, 7, 1], [-1, 7, -1]],
        "triples[..., 1]: 7 at positions 0 and 1, expected distinct slots",
    ),
    "write back": (
        [[0, 4, 9], [1, 3, 9], [-1, 5, 9]],
        "triples[..., 2]: 9 at positions 0 and 1, expected distinct rows to write back to",
    ),
    "fetch": (
        [[7, 0, -1], [9, 1, 7], [8, 2, 8]],
        "triples[..., 0]: 7 at position 0, written back to at position 1, expected rows that no "
        "other triple writes",
    ),
    "fetch of an exchange": (
        [[8, 0, 8], [8, 1, -1]],
        "triples[..., 0]: 8 at position 1, written back to at position 0, expected rows that no "
        "other triple writes",
    ),
}


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", REPEATS)
def test_what_would_depend_on_the_order_is_refused(kind: str, index_dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    host, gpu = buffers_for(cpu, (656,))
    host_twin, gpu_twin = host.twin(), gpu.twin()
    triples, text = REPEATS[kind]
    expected = re.escape(f"swap_rows: {text}; nothing was written")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        swap_rows(host.view, gpu.view, to_index(triples, index_dtype, cpu))
    assert host.same(host_twin)
    assert gpu.same(gpu_twin)


@pytest.mark.cuda
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", REPEATS)
def test_what_depends_on_the_order_stays_inside(kind: str, order: Any) -> None:
    """Undefined are the rows that the triples name, and nothing else."""
    cuda = torch.device("cuda")
    host, gpu = buffers_for(cuda, (656,))
    host_twin, gpu_twin = host.twin(), gpu.twin()
    triples = torch.tensor(REPEATS[kind][0])
    swap_rows(host.view, gpu.view, triples.cuda(), num_sms=2, order=order)
    torch.cuda.synchronize()
    back = triples[:, 2][triples[:, 2] >= 0]
    host.view[back] = host_twin.view[back]
    gpu.view[triples[:, 1].cuda()] = gpu_twin.view[triples[:, 1].cuda()]
    assert host.same(host_twin)
    assert gpu.same(gpu_twin)


@pytest.mark.parametrize("order", ORDERS)
def test_padding_may_name_anything(device: torch.device, order: str) -> None:
    host, gpu = buffers_for(device, (24,))
    triples = [[5, 3, 6], [6, -1, 6], [HOST_ROWS, -1, 5], [1, -2, 5]]
    CASES[0].run_and_compare([host, gpu], to_index(triples, torch.int32, device), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_there_and_back(device: torch.device, order: str) -> None:
    """13 MB each way: several threads on the CPU, the persistent kernel on CUDA."""
    rows, slots, count = 60_000, 20_011, 20_000
    host = host_buffer((rows, 656), torch.uint8, device)
    gpu = make_buffer((slots, 656), torch.uint8, device, seed=1)
    generator = torch.Generator().manual_seed(2)
    which = torch.randperm(rows, generator=generator)
    fetch, back = which[:count], which[count : 2 * count].clone()
    back[::3] = fetch[::3]
    slot = torch.randperm(slots, generator=generator)[:count]
    triples = torch.stack([fetch, slot, back], dim=1)
    host_twin, gpu_twin = host.twin(), gpu.twin()
    CASES[0].run_and_compare([host, gpu], triples.to(device), order=order)
    CASES[0].run_and_compare([host, gpu], triples.flip(1).contiguous().to(device), order=order)
    assert gpu.same(gpu_twin)
    back_again = fetch[::3]
    assert torch.equal(host.view[back_again], host_twin.view[back_again])


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


@pytest.mark.cuda
def test_where_memory_has_to_be() -> None:
    good = good_arguments()
    on_gpu = {name: good[name].cuda() for name in ("device", "triples")}
    pinned = good["host"].pin_memory()
    for change, text in (
        ({"host": good["host"]}, "host: pageable host memory, expected pinned host memory"),
        ({"host": pinned.cuda()}, "host: device cuda:0, expected cpu"),
        ({"triples": good["triples"]}, "triples: device cpu, expected cuda:0 as in device"),
    ):
        arguments = {**good, **on_gpu, "host": pinned, **change}
        with pytest.raises(ValueError, match=f"^swap_rows: {re.escape(text)}"):
            swap_rows(**arguments)
    assert good["host"].eq(0).all()


# -- graphs of PyTorch, and what it is told --------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph_of_pytorch(backend: str) -> None:
    """Later reads see both of what is written."""

    def step(host: Tensor, gpu: Tensor, triples: Tensor) -> Tensor:
        swap_rows(host, gpu, triples, num_sms=1, order="host")
        return host.sum() + 2 * gpu.sum()

    torch.compiler.reset()
    host, gpu = torch.randn(HOST_ROWS, 8), torch.randn(GPU_SLOTS, 8)
    expected = [host.clone(), gpu.clone()]
    triples = triples_of(torch.device("cpu"))
    ref_swap(*expected, gpu.clone(), triples)
    found = torch.compile(step, fullgraph=True, backend=backend)(host, gpu, triples)
    assert same_bits(host, expected[0])
    assert same_bits(gpu, expected[1])
    assert torch.equal(found, expected[0].sum() + 2 * expected[1].sum())


@pytest.mark.parametrize("argument", ["host", "device"])
def test_both_count_as_changed(argument: str) -> None:
    """A backward pass that has kept the old content raises; a gradient is refused."""
    good = good_arguments()
    with pytest.raises(RuntimeError, match=f"^swap_rows: {argument}: requires a gradient"):
        swap_rows(**{**good, argument: good[argument].requires_grad_()})
    good = good_arguments()
    weight = torch.ones_like(good[argument], requires_grad=True)
    result = (weight * good[argument]).sum()
    swap_rows(**good)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


# -- for the tests that go over all ops ------------------------------------------------------------


class Swap(Case):
    function, argument = staticmethod(swap_rows), "triples"
    rows, tables, columns = (HOST_ROWS, GPU_SLOTS), (0, 1), (0, 1, 0)
    on_host = (0,)
    count = TRIPLES
    ways = tuple({"order": order, "num_sms": sms} for order in ORDERS for sms in (None, 2))
    takes_num_sms = True
    line_gap = 48  # so that the two host rows of a triple begin at different places, too

    def call(self, tables: Sequence[Tensor], indices: Tensor, **how: Any) -> None:
        assert swap_rows(*tables, indices, **how) is None

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
        *not_tensors(good, "host", "device", "triples"),
        *bad_indices("triples", good["triples"]),
        *read_only(good, "host", "device", "triples"),
        *not_ints("num_sms", optional=True),
        ({"host": zeros(ROWS, 8, dtype=torch.float16)}, TypeError,
         "host: dtype float16, expected float32 as in device"),
        ({"host": zeros(ROWS, 7)}, ValueError, bytes_text("host", 28, [3, 7], "device")),
        ({"host": torch.tensor(1.0)}, ValueError,
         "host: shape [], expected at least 1 dimension"),
        ({"host": zeros(8, ROWS).t()}, ValueError, stride_text("host", 3, 1, [3, 8], 1)),
        ({"device": torch.tensor(1.0)}, ValueError,
         "device: shape [], expected at least 1 dimension"),
        ({"device": zeros(8, SLOTS).t()}, ValueError, stride_text("device", 50, 1, [50, 8], 1)),
        ({"triples": torch.tensor(3)}, ValueError, f"triples: shape [], {wanted}"),
        ({"triples": torch.arange(4)}, ValueError, f"triples: shape [4], {wanted}"),
        ({"triples": torch.zeros(4, 2, dtype=torch.int32)}, ValueError,
         f"triples: shape [4, 2], {wanted}"),
        ({"host": zeros(1, 8).expand(ROWS, 8)}, ValueError, apart_text("host", 0, [3, 8])),
        ({"device": zeros(1, 8).expand(SLOTS, 8)}, ValueError, apart_text("device", 0, [50, 8])),
        ({"host": table[:ROWS], "device": table[ROWS - 1 :]}, ValueError,
         overlap_text("host", "device")),
        ({"host": table, "triples": inside}, ValueError, overlap_text("triples", "host")),
        ({"device": table, "triples": inside}, ValueError, overlap_text("triples", "device")),
        ({"host": on_cuda(good["host"])}, ValueError,
         "host: device cuda:0, expected cpu, in the order (host, device, triples)"),
        ({"order": "source"}, ValueError,
         'order: "source", expected "auto", "given" or "host"'),
        ({"order": 3}, TypeError, 'order: int, expected "auto", "given" or "host"'),
        ({"num_sms": 0}, ValueError, "num_sms: 0, expected at least 1"),
        *(({"triples": torch.tensor(triples)}, ValueError, f"{text}; nothing was written")
          for triples, text in (
              ([[0, 1, 2], [1, 1, -1]],
               "triples[..., 1]: 1 at positions 0 and 1, expected distinct slots"),
              ([[0, 1, 2], [-1, 2, 2]],
               "triples[..., 2]: 2 at positions 0 and 1, expected distinct rows to write back to"),
          )),
        ({"triples": torch.tensor([[0, 1, -1], [3, 3, -1]])}, IndexError,
         index_text("triples[..., 0]", 3, 1, 3)),
        ({"triples": torch.tensor([[[0, 50, -1]], [[0, 1, -1]]])}, IndexError,
         index_text("triples[..., 1]", 50, 0, 50)),
        ({"triples": torch.tensor([[0, 1, -1], [-1, 0, 7]])}, IndexError,
         index_text("triples[..., 2]", 7, 1, 3)),
    ]  # fmt: skip


def fuzz(f: Fuzzer) -> Call:
    row, dtype = f.row()
    num_host, num_slots, count = (f.rng.choice(SIZES) for _ in range(3))
    host = f.rows([num_host, *row], dtype, host=True)
    gpu = f.rows([num_slots, *row], dtype)
    index_dtype = f.rng.choice(INT_DTYPES)
    slots = f.distinct(count, num_slots, index_dtype)
    back = f.distinct(count, num_host, index_dtype)
    # What no triple writes back to, or its own row.
    free = sorted({-1, *range(num_host)} - {int(row) for row in back if row >= 0})
    fetch = torch.tensor([f.rng.choice([*free, int(row)]) for row in back]).to(back)
    triples = torch.stack([fetch, slots, back], dim=1)
    expected = host.clone(), gpu.clone()
    if 0 not in row:  # rows of no bytes: nothing to do
        ref_swap(*expected, gpu.clone(), triples)

    def prove(result: Any) -> None:
        assert result is None
        assert same_bits(host, expected[0])
        assert same_bits(gpu, expected[1])

    arguments = {"host": host, "device": gpu, "triples": triples}
    arguments |= {"num_sms": f.rng.choice([None, 3]), "order": f.rng.choice(["auto", *ORDERS])}
    return Call(swap_rows, arguments, prove)


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    if where.is_cuda:
        return  # opcheck clones all arguments, and the clone of a pinned one is pageable
    exchange = torch.stack([where, where, where], dim=1)
    yield "default", (rows(slots), rows(slots), exchange), {}
    yield "default", (rows(slots), rows(slots), exchange), {"num_sms": 1, "order": "host"}
