"""store_cache against PyTorch, with every byte around the caches accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, make_buffer
from contract import Case, views
from mistakes import Mistake, zeros
from ref import ref_store
from stems import OpCheck, Rows
from tiny import SM_90
from torch import Tensor

import jitkern.ops.store
from jitkern import freeze, store_cache
from jitkern.errors import FrozenError

SLOTS = 37
ROWS = 19


# Slots have two heads of 320: a layer among others, of which only the first part of each head is
# used; and one head with K of 192 and V of 128 side by side.
SIDES = {"layers": lambda at: (at[:, 0, :24], at[:, 1, :24]),
         "K and V": lambda at: (at[:, 1, :192], at[:, 1, 192:])}  # fmt: skip


@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_both_caches_in_one_tensor(device: torch.device, sides: Any) -> None:
    cache = make_buffer((SLOTS, 2, 320), torch.bfloat16, device)
    new = make_buffer((ROWS, 2, 320), torch.bfloat16, device, seed=1).view
    twin, indices = cache.twin(), CASES[0].indices(device)
    store_cache(*sides(cache.view), indices, *sides(new))
    ref_store(*sides(twin.view), indices, *sides(new))
    assert cache.same(twin)


@pytest.mark.parametrize("seed", range(3))
def test_a_slot_named_twice_holds_bytes_of_one_of_its_rows(device: torch.device, seed: int) -> None:
    k_cache, v_cache, k, v = views(CASES[0].buffers(device, (48,)))
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 5, (ROWS,), generator=generator)
    store_cache(k_cache, v_cache, indices.to(device), k, v)
    for cache, new in ((k_cache, k), (v_cache, v)):
        for slot in indices.unique().tolist():
            candidates = new[(indices == slot).to(device)]
            assert (candidates == cache[slot]).any(dim=0).all()


def test_one_row_of_any_stride(device: torch.device) -> None:
    """The stride of a dimension of size 1 means nothing."""
    *caches, k, v = CASES[0].buffers(device, (16,))
    odd = [
        new.part(new.view.as_strided((1, 16), (3, 1), new.view.storage_offset())) for new in (k, v)
    ]
    CASES[0].run_and_compare([*caches, *odd], torch.tensor([9], device=device))


# K and V: MLA's with and without a common vector, heads of 192 and 128, one of a few bytes, and of
# shapes of warps that differ: rows in parts, several rows to a group.
PAIRS = [(1536, 1024), (384, 256), (1024, 128), (656, 576), (657, 16), (8192, 3), (2, 1), (48, 40)]


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("v_is_longer", [False, True])
@pytest.mark.parametrize("row_bytes", PAIRS, ids=str)
def test_rows_of_two_sizes(
    device: torch.device, row_bytes: tuple[int, int], v_is_longer: bool, index_dtype: torch.dtype
) -> None:
    k_bytes, v_bytes = row_bytes[::-1] if v_is_longer else row_bytes
    buffers = [
        make_buffer((rows, row_bytes), device=device, seed=seed, gap=gap)
        for seed, rows in enumerate((SLOTS, ROWS))
        for row_bytes, gap in ((k_bytes, 0), (v_bytes, 5))
    ]
    CASES[0].run_and_compare(buffers, CASES[0].indices(device, index_dtype))


def test_one_kernel_serves_both_caches_and_one() -> None:
    store = jitkern.ops.store
    assert store.kernels(656) == [store.kernel(656, 16, index_bytes) for index_bytes in (4, 8)]
    for spec in ((656, 16, 4), (656, 16, 8)):
        requested = store.kernel(*spec, first_row_bytes=656)  # C++ requests it
        assert requested.key(SM_90) == store.kernel(*spec).key(SM_90)
        assert requested.key(SM_90) != store.kernel(*spec, first_row_bytes=128).key(SM_90)


def test_a_frozen_miss_of_two_sizes_names_the_way_to_build_it() -> None:
    missing = jitkern.ops.store.kernel(4288, 16, 4, first_row_bytes=48)
    freeze()
    with pytest.raises(FrozenError, match=r"jitkern warm --replay FILE --arch 9\.0$"):
        missing.image(SM_90)


class Store(Case):
    function, argument = staticmethod(store_cache), "indices"
    rows, tables, columns, distinct_columns = (SLOTS,), (0, 0, None, None), (0,), (0,)
    count = ROWS
    large = (9000,), 4601, 657

    def call(self, tables: Sequence[Tensor], indices: Tensor, **_: Any) -> None:
        k_cache, v_cache, k, v = tables
        assert store_cache(k_cache, v_cache, indices, k, v) is None

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        k_cache, v_cache, k, v = tables
        ref_store(k_cache, v_cache, indices, k, v)


class StoreOfOneCache(Store):
    tables = (0, None)

    def call(self, tables: Sequence[Tensor], indices: Tensor, **_: Any) -> None:
        cache, rows = tables
        assert store_cache(cache, None, indices, rows) is None

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        cache, rows = tables
        ref_store(cache, cache, indices, rows, rows)


CASES = [Store(), StoreOfOneCache()]


ORDER = ", in the order (k_cache, v_cache, indices, k, v)"


def good_arguments() -> dict[str, Any]:
    caches = {"k_cache": zeros(50, 8), "v_cache": zeros(50, 8)}
    return {**caches, "indices": torch.arange(3), "k": zeros(3, 8), "v": zeros(3, 8)}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = common.not_tensors(good, "k_cache", "indices", "k")
    table += common.read_only(good, *good)
    for argument in ("v_cache", "v"):
        table += common.not_tensors(good, argument, optional=argument)
    for change, kind, text in common.bad_indices("indices", good["indices"]):
        is_order = kind is TypeError and "int16" not in text
        table.append((change, kind, text + ORDER if is_order else text))
    cache, memory = zeros(50, 8), torch.zeros(50, 4, dtype=torch.int64)
    for argument in ("k_cache", "v_cache"):
        table += [
            *common.not_rows(argument, [50, 8], written=True),
            ({argument: zeros(300).as_strided((50, 8), (4, 1))}, ValueError,
             common.apart_text(argument, 16, [50, 8])),
            ({argument: memory.view(torch.float32), "indices": memory[7, :3]}, ValueError,
             common.overlap_text("indices", argument)),
        ]  # fmt: skip
    for argument in ("k", "v"):
        table += [
            *common.not_rows(argument, [3, 8], like="k_cache"),
            ({argument: zeros(3, 7)}, ValueError,
             common.bytes_text(argument, 28, [3, 7], f"{argument}_cache")),
            *(({argument: zeros(n, 8)}, ValueError, common.count_text(argument, n, [n, 8], 3))
              for n in (0, 4)),
            ({argument: zeros(3, 1).expand(3, 8)}, ValueError,
             common.stride_text(argument, 0, 1, [3, 8], 1)),
            ({argument: zeros(3, 4, 3)[:, :, :2]}, ValueError,
             common.stride_text(argument, 3, 1, [3, 4, 2], 2)),
            *(({written: cache, argument: cache[4:7]}, ValueError,
               common.overlap_text(argument, written))
              for written in ("k_cache", "v_cache")),
        ]  # fmt: skip
    for argument, other in (("v", "v_cache"), ("v_cache", "v")):
        came = f"{argument}: None, expected a tensor along with {other}"
        table.append(({argument: None}, TypeError, f"{came}, or None as both for a single cache"))
    table += [
        ({"v_cache": zeros(50, 8, dtype=torch.bfloat16)}, TypeError,
         "v_cache: dtype bfloat16, expected float32 as in k_cache"),
        ({"v_cache": zeros(50, 9)}, ValueError,
         "v: rows of 32 bytes (shape [3, 8]), expected 36 bytes as in v_cache (shape [50, 9])"),
        ({"k_cache": cache, "v_cache": cache}, ValueError,
         common.overlap_text("v_cache", "k_cache")
         + "; for a single cache give None as v_cache and v"),
        ({"v_cache": zeros(49, 8)}, ValueError,
         "v_cache: 49 rows (shape [49, 8]), expected 50 rows as in k_cache"),
        ({"k_cache": zeros(3, 8), "v_cache": zeros(3, 8), "indices": zeros(50, 8),
          "k": zeros(50, 8), "v": torch.arange(3)}, TypeError,
         f"indices: dtype float32, expected int32 or int64{ORDER}"),  # sglang's order
        ({"k_cache": zeros(5, 10, 2, 4), "v_cache": zeros(5, 10, 2, 4)}, ValueError,
         "k_cache: rows of 320 bytes (shape [5, 10, 2, 4]), expected 32 bytes as in k "
         "(shape [3, 8]); of pages of 10 slots give k_cache.view(-1, 2, 4)"),
        ({"k_cache": zeros(5, 2, 10, 2, 4)[:, 0], "v_cache": zeros(50, 8)}, ValueError,
         "k_cache: rows of 320 bytes (shape [5, 10, 2, 4]), expected 32 bytes as in k "
         "(shape [3, 8]); of pages of 10 slots give the tensor that holds all pages as "
         ".view(-1, 2, 4), and count its slots: these pages are apart, and no view of k_cache has "
         "their slots as rows"),
        ({"v_cache": zeros(50, 4, 8)}, ValueError,
         "v_cache: rows of 128 bytes (shape [50, 4, 8]), expected 32 bytes as in v "
         "(shape [3, 8]); of pages of 4 slots give v_cache.view(-1, 8)"),
        *(({"indices": torch.zeros(shape, dtype=torch.int64)}, ValueError,
           f"indices: shape {shape}, expected 1 dimension") for shape in ([3, 1], [])),
        ({"indices": torch.arange(4)}, ValueError, common.count_text("k", 3, [3, 8], 4)),
        ({"indices": torch.tensor([4, 50, 51])}, IndexError,
         common.index_text("indices", 50, 1, 50)),
        ({"indices": torch.tensor([-4, -50, 2**40])}, IndexError,
         common.index_text("indices", 1099511627776, 2, 50)),
    ]  # fmt: skip
    return table


MIXED_DEVICES = [(name, "cuda:0 as in k_cache") for name in ("v_cache", "k", "v", "indices")]


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    new = rows(len(where))
    yield "default", (rows(slots), rows(slots), where, new, new.clone()), {}
    yield "default", (rows(slots), None, where, new), {}
    yield "default", (rows(slots), rows(slots)[:, :1], where, new, new[:, :1].contiguous()), {}
