"""Memory that a call writes: no two of its rows share a byte, and none does with what it reads."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import tvm_ffi
from buffers import host_buffer, make_buffer
from torch import Tensor

from jitkern import d2h_scatter, h2d_gather, indexing, store_cache

Call = Callable[[], object]
OWN = "expected memory of its own"
TWICE = f"{OWN}; for a single cache give None as v_cache and v"


def apart(row_bytes: int, stride_bytes: int, shape: list[int]) -> str:
    return (
        f"rows of {row_bytes} bytes, {stride_bytes} bytes apart (shape {shape}), expected "
        f"{row_bytes} or more in a tensor that is written; .clone() one that was expanded"
    )


def aliases(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Calls that write a byte twice, or one that they read, and the errors of each."""
    cache = torch.zeros(64, 8, device=device)
    other, rows = cache.clone(), torch.ones(2, 8, device=device)
    kv = torch.zeros(64, 2, 8, device=device)
    slots = torch.tensor([7, 0], device=device)
    pairs = torch.tensor([[0, 1], [2, 3]], device=device)
    src = host_buffer((64, 8), torch.float32, device).view
    expanded, windows = cache[:1].expand(64, 8), cache.as_strided((64, 8), (4, 1))

    for name, bad in (("0", expanded), ("16", windows)):
        text = apart(32, int(name), [64, 8])
        yield (
            f"store_cache: k_cache: {text}",
            lambda c=bad: store_cache(c, kv[:, 0], slots, *[rows] * 2),
        )
        yield (
            f"store_cache: v_cache: {text}",
            lambda c=bad: store_cache(kv[:, 0], c, slots, *[rows] * 2),
        )
        yield f"store_cache: k_cache: {text}", lambda c=bad: store_cache(c, None, slots, rows)
        yield f"h2d_gather: dst: {text}", lambda c=bad: h2d_gather(src, c, pairs)
        output = apart(32, int(name), [2, 3, 8])
        out = bad.as_strided((2, 3, 8), (3 * bad.stride(0), bad.stride(0), 1))
        which = slots.view(2, 1).expand(2, 3).contiguous()
        yield (
            f"indexing: output: {output}",
            lambda o=out, w=which: indexing(other, w, output=o),
        )

    # The issue's own: the second row came out as the first.
    yield (
        f"indexing: output: overlaps weights, {OWN}",
        lambda: indexing(cache, slots, output=cache[:2]),
    )
    yield (
        f"indexing: output: overlaps weights, {OWN}",
        lambda: indexing(kv[:, 1], slots, output=kv[62:, 1]),
    )
    yield (
        f"indexing: output: overlaps weights, {OWN}",  # of other strides, in its last bytes
        lambda: indexing(kv[:, 1], slots, output=kv.view(-1)[1022 - 16 :][:16].view(2, 8)),
    )
    for name, call in (
        (
            f"v_cache: overlaps k_cache, {TWICE}",
            lambda: store_cache(cache, cache, slots, *[rows] * 2),
        ),
        (
            f"v_cache: overlaps k_cache, {TWICE}",
            lambda: store_cache(kv[:, 0], kv.view(64, 16)[:, 7:15], slots, *[rows] * 2),
        ),
        (f"k: overlaps k_cache, {OWN}", lambda: store_cache(cache, other, slots, cache[3:5], rows)),
        (f"k: overlaps v_cache, {OWN}", lambda: store_cache(cache, other, slots, other[3:5], rows)),
        (f"v: overlaps k_cache, {OWN}", lambda: store_cache(cache, other, slots, rows, cache[3:5])),
        (f"v: overlaps v_cache, {OWN}", lambda: store_cache(cache, other, slots, rows, other[3:5])),
        (f"k: overlaps k_cache, {OWN}", lambda: store_cache(cache, None, slots, cache[62:])),
        (
            f"k: overlaps k_cache, {OWN}",  # one row, again and again
            lambda: store_cache(cache, None, slots, cache[5:6].expand(2, 8)),
        ),
    ):
        yield f"store_cache: {name}", call
    # Indices in what the call writes.
    memory = torch.zeros(64, 16, dtype=torch.int64, device=device)
    far = host_buffer((64, 16), torch.int64, device).view
    items, apart_of_it, new = memory[5, :2], memory.clone(), memory[:2].clone()
    its_pairs, its_map = memory[5, 8:12].view(2, 2), memory[8:12].view(64)
    for where, call in (
        ("store_cache: indices: overlaps k_cache",
         lambda: store_cache(memory, apart_of_it, items, new, new)),
        ("store_cache: indices: overlaps v_cache",
         lambda: store_cache(apart_of_it, memory, items, new, new)),
        ("indexing: indices: overlaps output",
         lambda: indexing(apart_of_it, items, output=memory[4:6])),
        ("h2d_gather: pairs: overlaps dst", lambda: h2d_gather(far, memory, its_pairs)),
        ("h2d_gather: slot_map: overlaps dst",
         lambda: h2d_gather(far, memory, its_pairs.clone(), slot_map=its_map)),
        ("h2d_gather: pairs: overlaps slot_map",
         lambda: h2d_gather(far, apart_of_it, its_pairs, slot_map=memory[4:8].view(64))),
    ):  # fmt: skip
        yield f"{where}, {OWN}", call
    if device.type == "cuda":
        return  # where source and destination are in different memories
    text = f"d2h_scatter: pairs: overlaps dst, {OWN}"
    yield text, lambda: d2h_scatter(apart_of_it, memory, its_pairs)
    table = torch.zeros(64, 8)
    slot_map = table.view(torch.int64).view(-1)[:64]
    for op, call in (
        ("h2d_gather: dst", lambda: h2d_gather(table[:40], table[39:], pairs)),
        ("d2h_scatter: dst", lambda: d2h_scatter(table[:40], table[39:], pairs)),
        ("h2d_gather: slot_map", lambda: h2d_gather(table, other, pairs, slot_map=slot_map)),
    ):
        yield f"{op}: overlaps src, {OWN}", call
    yield (
        f"d2h_scatter: dst: {apart(32, 0, [64, 8])}",
        lambda: d2h_scatter(table, expanded, pairs),
    )


@pytest.mark.parametrize("number", range(32))
def test_aliases_are_refused_by_name(device: torch.device, number: int) -> None:
    calls = list(aliases(device))
    assert len(calls) == (32 if device.type == "cpu" else 27)
    if number >= len(calls):
        pytest.skip("needs both in host memory")
    text, call = calls[number]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()


def neighbours(device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """K and V caches, new rows and an output for lookups: side by side, and apart to the byte."""
    rows = torch.randn(5, 8, device=device)
    kv = torch.zeros(64, 2, 8, device=device)
    yield kv[:, 0], kv[:, 1], rows, rows, kv.new_empty(3, 8)
    yield kv[:, 1], kv[:, 0], rows, rows, kv.new_empty(3, 8)
    halves = torch.zeros(2, 64, 8, device=device)
    yield *halves, rows, rows, kv.new_empty(3, 8)
    # A slot of K, V, what is stored into others, and what is read out: four in one, of any rows.
    all_in_one = torch.randn(64, 4, 8, device=device)
    k_cache, v_cache, new, out = all_in_one.unbind(1)
    yield k_cache, v_cache, new[:5], new[2:7], out[:3]
    # What is between the rows of a cache has a stride of its own, or is a single row.
    wide = torch.randn(64, 24, device=device)
    odd = wide.as_strided((2, 8), (48, 1), 8)
    yield (
        wide[:, :8],
        wide[:, 16:],
        odd[:1].expand(5, 8),
        rows,
        wide.as_strided((3, 8), (72, 1), 32),
    )


@pytest.mark.parametrize("number", range(5))
def test_neighbours_are_no_aliases(device: torch.device, number: int) -> None:
    k_cache, v_cache, k, v, output = list(neighbours(device))[number]
    expected = k.clone(), v.clone()
    slots = torch.tensor([9, 3, 60, 11, 0], device=device)
    store_cache(k_cache, v_cache, slots, k, v)
    assert torch.equal(k_cache[slots], expected[0])
    assert torch.equal(v_cache[slots], expected[1])
    for cache, rows in ((k_cache, expected[0]), (v_cache, expected[1])):
        assert torch.equal(indexing(cache, slots[:3], output=output), rows[:3])


def test_lookups_between_the_rows_of_the_table(device: torch.device) -> None:
    kv = torch.randn(64, 2, 8, device=device)
    slots = torch.tensor([9, 3, 60], device=device)
    expected = kv[slots, 0].clone()
    assert torch.equal(indexing(kv[:, 0], slots, output=kv[:3, 1]), expected)


@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_pairs_between_the_rows_of_one_table(op: Callable[..., None]) -> None:
    table = torch.randn(64, 2, 8)
    expected = table[5, 0].clone()
    slot_map = {"slot_map": torch.full((64,), -1)} if op is h2d_gather else {}
    op(table[:, 0], table[:, 1], torch.tensor([[5, 7]]), **slot_map)
    assert torch.equal(table[7, 1], expected)


def test_a_million_slots_of_k_and_v_side_by_side(device: torch.device) -> None:
    kv = torch.zeros(1 << 20, 2, 16, dtype=torch.int8, device=device)
    rows = torch.ones(1, 16, dtype=torch.int8, device=device)
    last = torch.tensor([(1 << 20) - 1], device=device)
    store_cache(kv[:, 0], kv[:, 1], last, rows, rows)
    assert kv.sum().item() == 32
    with pytest.raises(ValueError, match=r"^store_cache: v_cache: overlaps k_cache, "):
        store_cache(kv[1:, 0], kv[:-1, 0], last, rows, rows)


@pytest.mark.parametrize("shape", [(0, 8), (64, 0), (0, 0)], ids=str)
def test_what_is_empty_overlaps_nothing(device: torch.device, shape: tuple[int, int]) -> None:
    memory = torch.zeros(64, 8, device=device)
    none = memory[5:].as_strided(shape, (0, 1))
    nowhere = torch.full((shape[0],), -1, device=device)
    store_cache(none, none, nowhere, none, none)
    assert indexing(memory[:, : shape[1]], nowhere, output=none) is none
    assert memory.eq(0).all()


# -- every byte of small memories ------------------------------------------------------------------

SIZES = [1, 2, 3, 5, 8]  # few: on a GPU each pair of them is a kernel


def any_rows(rng: random.Random, memory: Tensor, count: int, row_bytes: int, stride: int) -> Tensor:
    room = len(memory) - max(0, (count - 1) * stride + row_bytes)
    return memory.as_strided((count, row_bytes), (stride, 1), rng.randrange(room + 1))


def bytes_of(rows: Tensor) -> list[int]:
    """The addresses of all bytes, those of several rows once for each."""
    count, row_bytes = rows.shape
    starts = [rows.data_ptr() + row * rows.stride(0) for row in range(count)]
    return [start + i for start in starts for i in range(row_bytes)]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_refused_to_the_byte(device: torch.device, seed: int) -> None:
    """Layouts at random, most of them nearly too close, against sets of addresses."""
    rng = random.Random(seed)
    memory = torch.zeros(160, dtype=torch.int8, device=device)
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        slots, count = rng.randint(0, 6), rng.randint(0, 4)
        common = rng.randint(4, 24)  # K and V and what is stored often have one stride
        tables = {}
        for cache_name, rows_name in (("k_cache", "k"), ("v_cache", "v")):
            row_bytes = rng.choice(SIZES)
            stride = rng.choice([common, common, row_bytes, rng.randint(0, 24)])
            tables[cache_name] = any_rows(rng, memory, slots, row_bytes, stride)
            stride = rng.choice([common, 0, rng.randint(0, 24)])
            tables[rows_name] = any_rows(rng, memory, count, row_bytes, stride)
        addresses = {name: bytes_of(rows) for name, rows in tables.items()}
        shared = any(
            len(set(addresses[name])) < len(addresses[name]) for name in ("k_cache", "v_cache")
        )
        shared |= any(
            not set(addresses[a]).isdisjoint(addresses[b])
            for a, b in itertools.combinations(tables, 2)
            if {a, b} != {"k", "v"}
        )
        nowhere = torch.full((count,), -1, device=device)
        call = tables["k_cache"], tables["v_cache"], nowhere, tables["k"], tables["v"]
        outcomes[shared] += 1
        if shared:
            with pytest.raises(ValueError, match=r"store_cache: [kv](_cache)?: (overlaps|rows of)"):
                store_cache(*call)
        else:
            store_cache(*call)
    assert min(outcomes.values()) > 200, outcomes
    assert memory.eq(0).all()


class Backwards:
    """Rows of a tensor from the last to the first, as other libraries than PyTorch have them."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        capsule = self._rows.__dlpack__()
        tensor = get_pointer(capsule, b"dltensor")
        ctypes.c_int64.from_address(tensor).value = self._rows[-1].data_ptr()
        strides = ctypes.c_int64.from_address(tensor + 32).value  # data, device, ndim, dtype, shape
        ctypes.c_int64.from_address(strides).value *= -1
        return capsule


def test_rows_that_go_backwards() -> None:
    """They are as far apart, and in memory ahead of the first."""
    kv = torch.zeros(4, 2, 8, dtype=torch.int8)
    rows = torch.arange(8, dtype=torch.int8).view(1, 8)
    slot = torch.tensor([1])
    backwards = tvm_ffi.from_dlpack(Backwards(kv[:, 0]))
    store_cache(backwards, kv[:, 1], slot, rows, rows)
    assert torch.equal(kv[2, 0], rows[0])
    assert torch.equal(kv[1, 1], rows[0])
    for cache in (kv[:, 0], kv.view(4, 16)[:, 7:15], kv[0, 0].expand(4, 8)):
        with pytest.raises(
            ValueError, match=r"^store_cache: v_cache: (overlaps k_cache|rows of 8)"
        ):
            store_cache(backwards, cache, slot, rows, rows)
    with pytest.raises(ValueError, match=r"^store_cache: indices: overlaps k_cache"):
        store_cache(backwards, None, kv[0, 0].view(torch.int64), rows)
    tight = tvm_ffi.from_dlpack(Backwards(kv.view(-1).as_strided((4, 8), (7, 1))))
    text = f"store_cache: k_cache: {apart(8, 7, [4, 8])}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        store_cache(tight, None, slot, rows)


def test_a_copy_that_is_refused_writes_nothing(device: torch.device) -> None:
    cache = make_buffer((10, 8), device=device)
    twin = cache.twin()
    with pytest.raises(ValueError, match="output: overlaps weights"):
        indexing(cache.view, torch.tensor([7, 0], device=device), output=cache.view[:2])
    assert cache.same(twin)
