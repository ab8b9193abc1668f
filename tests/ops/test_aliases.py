"""Memory that a call writes: no two of its rows share a byte, and none does with what it reads."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import tvm_ffi
from buffers import bytes_of
from fake_gpu import dl_tensor
from torch import Tensor

from jitkern import copy_blocks, d2h_scatter, h2d_gather, indexing, store_cache


def looked_up(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    indexing(src, pairs[:, 0], output=dst[7:8])


def stored(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    store_cache(dst, None, pairs[:, 1].contiguous(), src[5:6])


@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter, looked_up, stored])
def test_a_call_between_the_rows_of_one_table(op: Callable[..., None]) -> None:
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


SIZES = [1, 2, 3, 5, 8]  # few: on a GPU each pair of them is a kernel


def any_rows(rng: random.Random, memory: Tensor, count: int, row_bytes: int, stride: int) -> Tensor:
    room = len(memory) - max(0, (count - 1) * stride + row_bytes)
    return memory.as_strided((count, row_bytes), (stride, 1), rng.randrange(room + 1))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_refused_to_the_byte(device: torch.device, seed: int) -> None:
    """Layouts at random, most of them nearly too close, against sets of addresses."""
    rng = random.Random(seed)
    memory = torch.full((160,), -1, dtype=torch.int8, device=device)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        slots, count = rng.randint(0, 6), rng.randint(0, 4)
        common = rng.randint(4, 24)  # K and V and what is stored often have one stride
        tables = {}
        for cache_name, rows_name in (("k_cache", "k"), ("v_cache", "v")):
            row_bytes = rng.choice(SIZES)
            stride = rng.choice([common, common, row_bytes, rng.randint(0, 24)])
            tables[cache_name] = any_rows(rng, memory, slots, row_bytes, stride)
            stride = rng.choice([common, 0, rng.randint(0, 24)])
            tables[rows_name] = any_rows(rng, memory, count, row_bytes, stride)
        begin = 4 * rng.randrange((len(memory) - 4 * count) // 4 + 1)
        indices = memory[begin : begin + 4 * count].view(torch.int32)  # -1: nothing is written
        if rng.random() < 0.5:
            indices = indices.clone()
        addresses = {name: bytes_of(rows) for name, rows in tables.items()}
        addresses["indices"] = bytes_of(indices.view(torch.int8))
        shared = any(
            len(set(addresses[name])) < len(addresses[name]) for name in ("k_cache", "v_cache")
        )
        shared |= any(
            not set(addresses[a]).isdisjoint(addresses[b])
            for a, b in itertools.combinations(addresses, 2)
            if {a, b} not in ({"k", "v"}, {"k", "indices"}, {"v", "indices"})
        )
        call = tables["k_cache"], tables["v_cache"], indices, tables["k"], tables["v"]
        outcomes[shared] += 1
        wrong = r"store_cache: ([kv](_cache)?|indices): (overlaps|rows of)"
        with pytest.raises(ValueError, match=wrong) if shared else nullcontext():
            store_cache(*call)
    assert min(outcomes.values()) > 40, outcomes
    assert memory.eq(-1).all()


class Backwards:
    """Rows of a tensor from the last to the first, as other libraries than PyTorch have them."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        capsule = self._rows.__dlpack__()
        tensor = dl_tensor(capsule)
        ctypes.c_int64.from_address(tensor).value = self._rows[-1].data_ptr()
        strides = ctypes.c_int64.from_address(tensor + 32).value  # data, device, ndim, dtype, shape
        ctypes.c_int64.from_address(strides).value *= -1
        return capsule


def test_rows_that_go_backwards() -> None:
    """Other frameworks have negative strides: they are refused."""
    kv = torch.zeros(4, 2, 8, dtype=torch.int8)
    backwards = tvm_ffi.from_dlpack(Backwards(kv[:, 0]))
    wrong = "stride -16 in dimension 0 of shape [4, 8], expected 0 or more"
    with pytest.raises(ValueError, match=f"^store_cache: k_cache: {re.escape(wrong)}$"):
        store_cache(backwards, None, torch.tensor([1]), kv[:1, 1])
    with pytest.raises(ValueError, match=f"^copy_blocks: src: {re.escape(wrong)}$"):
        copy_blocks(backwards, kv[:, 1], torch.tensor([[1, 1]]), src_block_dim=0, dst_block_dim=0)
