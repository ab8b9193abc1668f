"""store_cache with a single cache, and with K and V whose rows are of different sizes."""

from __future__ import annotations

import pytest
import torch
from buffers import INT_DTYPES, Buffer, distinct, make_buffer, to_index
from ref import ref_store
from tiny import SM_90
from torch import Tensor

import jitkern.ops.store
from jitkern import freeze, store_cache
from jitkern.errors import FrozenError

SLOTS, ROWS = 37, 19
# K and V: MLA's with and without a common vector, heads of 192 and 128, one of a few bytes, and of
# shapes of warps that differ: rows in parts, several rows to a group.
PAIRS = [(1536, 1024), (384, 256), (1024, 128), (656, 576), (657, 16), (8192, 3), (2, 1), (48, 40)]


def table(row_bytes: int, device: torch.device, seed: int, **how: int) -> tuple[Buffer, Buffer]:
    """A cache, and rows for it."""
    return (
        make_buffer((SLOTS, row_bytes), device=device, seed=seed, **how),
        make_buffer((ROWS, row_bytes), device=device, seed=seed + 1, **how),
    )


def slots(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    values = distinct(ROWS, SLOTS)
    values[3] = values[7] = -1
    return to_index(values, dtype, device)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("v_is_longer", [False, True])
@pytest.mark.parametrize("row_bytes", PAIRS, ids=str)
def test_rows_of_two_sizes(
    device: torch.device, row_bytes: tuple[int, int], v_is_longer: bool, index_dtype: torch.dtype
) -> None:
    k_bytes, v_bytes = row_bytes[::-1] if v_is_longer else row_bytes
    k_cache, k = table(k_bytes, device, 1)
    v_cache, v = table(v_bytes, device, 3, gap=5)
    twins, indices = (k_cache.twin(), v_cache.twin()), slots(device, index_dtype)
    store_cache(k_cache.view, v_cache.view, indices, k.view, v.view)
    ref_store(twins[0].view, twins[1].view, indices, k.view, v.view)
    assert k_cache.same(twins[0])
    assert v_cache.same(twins[1])


def test_both_in_one_slot_of_one_tensor(device: torch.device) -> None:
    """Heads of 192 and of 128 side by side: a slot is one row of memory."""
    cache = make_buffer((SLOTS, 2, 192 + 128), torch.bfloat16, device)
    new = make_buffer((ROWS, 2, 192 + 128), torch.bfloat16, device, seed=1).view
    twin, indices = cache.twin(), slots(device)
    sides = [
        [whole[:, head, start:end] for start, end in ((0, 192), (192, 320))]
        for whole, head in ((cache.view, 1), (new, 0), (twin.view, 1))
    ]
    (k_cache, v_cache), (k, v), (k_twin, v_twin) = sides
    store_cache(k_cache, v_cache, indices, k, v)
    ref_store(k_twin, v_twin, indices, k, v)
    assert cache.same(twin)


# -- compiled beforehand ---------------------------------------------------------------------------


def test_one_kernel_serves_both_caches_and_one() -> None:
    store = jitkern.ops.store
    assert store.specialisations(656) == [(656, 16, 4), (656, 16, 8)]
    for spec in store.specialisations(656):
        row_bytes = spec[0]
        of_a_call = store.kernel(*spec, first_row_bytes=row_bytes)  # as C++ asks for it
        assert of_a_call.key(SM_90) == store.kernel(*spec).key(SM_90)
        assert of_a_call.key(SM_90) != store.kernel(*spec, first_row_bytes=128).key(SM_90)


def test_a_frozen_miss_of_two_sizes_names_the_way_to_build_it() -> None:
    missing = jitkern.ops.store.kernel(4288, 16, 4, first_row_bytes=48)
    freeze()
    with pytest.raises(FrozenError, match=r"jitkern warm --replay FILE --arch 9\.0$"):
        missing.image(SM_90)
