"""store_cache against PyTorch, with every byte around the caches accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, Buffer, make_buffer, out_of_range
from cache_layouts import BLOCKS, LAYOUTS, PAGE, paged_caches, slots_in_pages
from contract import Case, views
from mistakes import Mistake, zeros
from ref import ref_store
from stems import OpCheck, Rows
from tiny import SM_90
from torch import Tensor

import jitkern.ops.store
from jitkern import store_cache

SLOTS = 37
ROWS = 19


def ref_store_in(cache: Tensor, indices: Tensor, rows: Tensor, skip: int | None = None) -> None:
    """Store rows in the slots of a cache of rows or pages, but not in `skip`."""
    keep = (indices >= 0) & (indices != (-1 if skip is None else skip))
    new = rows[keep]
    cache[slots_in_pages(cache, indices[keep].long())] = new.view(len(new), *cache.shape[-2:])


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


# -- pages and skip --------------------------------------------------------------------------------

HEADS = [(8, 256), (4, 33), (3, 5), (1, 656), (1, 1), (2, 1024)]  # of so many bytes


def page_indices(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return slots in the first and the last page and any others, two of them padding."""
    generator = torch.Generator().manual_seed(5)
    indices = 1 + torch.randperm(BLOCKS * PAGE - 2, generator=generator)[:ROWS]
    indices[:4] = torch.tensor([0, -1, BLOCKS * PAGE - 1, -(2**31)])
    return indices.to(dtype).to(device)


def random_rows(heads: int, dim: int, device: torch.device, seed: int) -> Tensor:
    return make_buffer((ROWS, heads, dim), device=device, seed=seed, gap=heads * dim).view


def store_and_compare(
    caches: Sequence[Buffer], indices: Tensor, rows: Sequence[Tensor], skip: int | None = None
) -> None:
    """Store K and V, or one of them, and compare all bytes around the caches."""
    wholes = {cache.whole.data_ptr(): cache.whole.clone() for cache in caches}
    for cache, new in zip(caches, rows, strict=True):
        whole = wholes[cache.whole.data_ptr()]
        view = cache.view
        twin = whole.as_strided(view.shape, view.stride(), view.storage_offset())
        ref_store_in(twin, indices, new, skip)
    k_cache, v_cache = (*(cache.view for cache in caches), None)[:2]
    k, v = (*rows, None)[:2]
    assert store_cache(k_cache, v_cache, indices, k, v, skip=skip) is None
    for cache in caches:
        assert torch.equal(cache.whole, wholes[cache.whole.data_ptr()])


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(
    device: torch.device, layout: str, heads: int, dim: int, index_dtype: torch.dtype
) -> None:
    caches = paged_caches(layout, heads, dim, device)
    rows = [random_rows(heads, dim, device, seed) for seed in (1, 2)]
    indices = page_indices(device, index_dtype)
    store_and_compare(caches, indices, rows, skip=int(indices[5]))
    store_and_compare(caches[1:], indices, rows[1:])


@pytest.mark.parametrize("v_dim", [128, 20])
@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_with_rows_of_two_sizes(device: torch.device, heads_first: bool, v_dim: int) -> None:
    shape = (BLOCKS, 4, PAGE, 192 + v_dim) if heads_first else (BLOCKS, PAGE, 4, 192 + v_dim)
    buffer = make_buffer(shape, device=device)
    cache = buffer.view.transpose(1, 2) if heads_first else buffer.view
    caches = buffer.part(cache[..., :192]), buffer.part(cache[..., 192:])
    rows = random_rows(4, 192, device, 1), random_rows(4, v_dim, device, 2)
    store_and_compare(caches, page_indices(device), rows)


@pytest.mark.parametrize("v_dim", [64, 48])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_cache_of_pages_and_one_of_rows(device: torch.device, layout: str, v_dim: int) -> None:
    k_cache, _ = paged_caches(layout, 2, 64, device)
    v_cache = make_buffer((BLOCKS * PAGE, 2, v_dim), device=device, gap=8, seed=3)
    rows = random_rows(2, 64, device, 1), random_rows(2, v_dim, device, 2)
    for order in (1, -1):
        store_and_compare((k_cache, v_cache)[::order], page_indices(device), rows[::order])


def test_pages_of_rows_without_heads(device: torch.device) -> None:
    """MLA's cache among those of other layers; rows of any further dimensions, as in the cache."""
    for shape in ((576,), (3, 4, 48), (1, 576), (1, 1, 576)):
        buffer = make_buffer((BLOCKS, 2, PAGE, *shape), torch.uint8, device)
        cache, twin = buffer.view[:, 1], buffer.twin()
        rows = make_buffer((ROWS, 576), device=device, seed=1).view
        indices = page_indices(device)
        store_cache(cache, None, indices, rows.view(ROWS, *shape))
        ref_store_in(twin.view[:, 1].flatten(2)[:, :, None], indices, rows)
        assert buffer.same(twin)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_past_the_last_page(device: torch.device, layout: str) -> None:
    slots = BLOCKS * PAGE
    k_cache, v_cache = paged_caches(layout, 2, 16, device)
    before = k_cache.whole.clone()
    rows = random_rows(2, 16, device, 1)[:2]
    indices = torch.tensor([-1, slots], device=device)
    store_cache(k_cache.view, v_cache.view, indices, rows, rows, skip=slots)
    with out_of_range(device, f"store_cache: indices: index {slots} at position 1, expected below"):
        store_cache(k_cache.view, v_cache.view, indices, rows, rows, skip=0)
    assert torch.equal(k_cache.whole, before)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("skip", [0, 7, SLOTS, SLOTS + 5, 2**31 - 1, -1, -5, None])
def test_skip(device: torch.device, skip: int | None, index_dtype: torch.dtype) -> None:
    """An index past the end that is skipped is no fault; several rows may have it."""
    caches = [make_buffer((SLOTS, 1, row_bytes), device=device) for row_bytes in (64, 48)]
    rows = [random_rows(1, row_bytes, device, row_bytes) for row_bytes in (64, 48)]
    indices = CASES[0].indices(device, index_dtype)
    if skip is not None:
        indices[[2, 9, 11]] = skip
    store_and_compare(caches, indices, rows, skip)


# -- kernels ---------------------------------------------------------------------------------------


def test_one_kernel_serves_both_caches_and_one() -> None:
    store = jitkern.ops.store
    assert store.kernels(656) == [store.kernel(656, 16, index_bytes) for index_bytes in (4, 8)]
    for spec in ((656, 16, 4), (656, 16, 8)):
        requested = store.kernel(*spec, first_row_bytes=656)  # C++ requests it
        assert requested._key(SM_90) == store.kernel(*spec)._key(SM_90)
        assert requested._key(SM_90) != store.kernel(*spec, first_row_bytes=128)._key(SM_90)


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
    return {**caches, "indices": torch.arange(3), "k": zeros(3, 8), "v": zeros(3, 8), "skip": 0}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = common.not_tensors(good, "k_cache", "indices", "k")
    table += common.read_only(good, *good.keys() - {"skip"})
    table += common.not_ints("skip", optional=True)
    for argument in ("v_cache", "v"):
        table += common.not_tensors(good, argument, optional=argument)
    for change, kind, text in common.bad_indices("indices", good["indices"]):
        is_order = kind is TypeError and "int16" not in text
        table.append((change, kind, text + ORDER if is_order else text))
    cache, memory = zeros(50, 8), torch.zeros(50, 4, dtype=torch.int64)
    packed = zeros(5, 10, 2, 8)
    heads = {"k": zeros(3, 2, 4), "v": zeros(3, 2, 4)}
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
            *common.not_rows(argument, [3, 8], like="k_cache", cure=common.COPY_FOR_READS),
            ({argument: zeros(3, 7)}, ValueError,
             common.bytes_text(argument, 28, [3, 7], f"{argument}_cache")),
            *(({argument: zeros(n, 8)}, ValueError, common.count_text(argument, n, [n, 8], 3))
              for n in (0, 4)),
            ({argument: zeros(3, 1).expand(3, 8)}, ValueError,
             common.stride_text(argument, 0, 1, [3, 8], 1, common.COPY_FOR_READS)),
            ({argument: zeros(3, 4, 3)[:, :, :2]}, ValueError,
             common.stride_text(argument, 3, 1, [3, 4, 2], 2, common.COPY_FOR_READS)),
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
        # pages
        ({"k_cache": zeros(5, 10, 2, 5)}, ValueError,
         "k: rows of 32 bytes (shape [3, 8]), expected 400 bytes as in k_cache (shape "
         "[5, 10, 2, 5])"),
        ({"k_cache": zeros(5, 2, 10, 4), "k": zeros(3, 2, 4)}, ValueError,
         "k: rows of 32 bytes (shape [3, 2, 4]), expected 320 bytes as in k_cache (shape "
         "[5, 2, 10, 4]); for [blocks, heads, page, dim] pass .transpose(1, 2)"),
        *(({"k_cache": cache.view(5, 10, 2, 4), "k": zeros(*shape)}, ValueError,
           f"k: rows of 32 bytes (shape {shape}), expected 320 bytes as in k_cache "
           "(shape [5, 10, 2, 4]); for [blocks, page, ...] pass shape [3, 2, 4]")
          for shape in ([3, 8], [3, 4, 2], [3, 1, 2, 4])),
        ({"k_cache": zeros(5, 10, 4, 4), "k": zeros(3, 2, 4)}, ValueError,
         "k: rows of 32 bytes (shape [3, 2, 4]), expected 640 bytes as in k_cache (shape "
         "[5, 10, 4, 4]); read as pages, a slot of k_cache is [4, 4]"),
        ({"k_cache": zeros(5, 10, 9)}, ValueError,
         "k: rows of 32 bytes (shape [3, 8]), expected 360 bytes as in k_cache (shape "
         "[5, 10, 9]); read as pages, a slot of k_cache is [9]"),
        # one head into [slots, 4 heads, dim], whose heads have as many bytes
        *(({"k_cache": zeros(50, 4, 2), "v_cache": zeros(50, 4, 2), **new}, ValueError,
           f"{argument}: rows of 8 bytes (shape [3, 1, 2]), expected 32 bytes as in "
           f"{argument}_cache (shape [50, 4, 2])")
          for argument, new in (("k", {"k": zeros(3, 1, 2)}), ("v", {"v": zeros(3, 1, 2)}),
                                ("k", {"k": zeros(3, 1, 2), "v": zeros(3, 1, 2)}))),
        ({"v_cache": zeros(50, 4, 8)}, ValueError,
         "v_cache: 200 rows (shape [50, 4, 8]), expected 50 rows as in k_cache"),
        ({**heads, "k_cache": zeros(5, 10, 2, 8)[..., ::2]}, ValueError,
         common.stride_text("k_cache", 2, 3, [5, 10, 2, 4], 1)),
        ({"k_cache": zeros(1, 1, 8).expand(2**16, 2**15, 8)}, ValueError,
         "k_cache: 2147483648 slots in pages, expected less than 2^31"),
        *(({**heads, argument: cache.view(5, 10, 2, 4)[
            tuple(slice(1 if d == dim else None) for d in range(4))].expand(5, 10, 2, 4)},
           ValueError, f"{argument}: rows of 32 bytes that overlap (shape [5, 10, 2, 4]), expected "
           "rows apart in a tensor that is written, as those of one that was expanded are not")
          for argument in ("k_cache", "v_cache") for dim in (0, 1, 2)),
        *(({**heads, "k_cache": pages[:, 0], "v_cache": pages[:, 0]}, ValueError,
           common.overlap_text("v_cache", "k_cache")
           + "; for a single cache give None as v_cache and v")
          for pages in (zeros(5, 2, 10, 2, 4), zeros(5, 2, 2, 10, 4).transpose(2, 3))),
        ({**heads, "k_cache": packed[..., :4], "v_cache": packed[..., 3:7]}, ValueError,
         common.overlap_text("v_cache", "k_cache")
         + "; for a single cache give None as v_cache and v"),
        ({"k_cache": packed[..., :4], "k": packed[0, :3, 0].view(3, 2, 4)}, ValueError,
         common.overlap_text("k", "k_cache")),
        *(({"indices": torch.zeros(shape, dtype=torch.int64)}, ValueError,
           f"indices: shape {shape}, expected 1 dimension") for shape in ([3, 1], [])),
        ({"indices": torch.arange(4)}, ValueError, common.count_text("k", 3, [3, 8], 4)),
        ({"indices": torch.tensor([4, 50, 51])}, IndexError,
         common.index_text("indices", 50, 1, 50)),
    ]  # fmt: skip
    return table


MIXED_DEVICES = [(name, "cuda:0 as in k_cache") for name in ("v_cache", "k", "v", "indices")]


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    new = rows(len(where))
    yield "default", (rows(slots), rows(slots), where, new, new.clone()), {}
    yield "default", (rows(slots), None, where, new), {}
    yield "default", (rows(slots), rows(slots)[:, :1], where, new, new[:, :1].contiguous()), {}
