"""Offsets beyond 2^31 and 2^32 bytes and rows, where 32-bit arithmetic would wrap around."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from buffers import out_of_range, random_bytes
from torch import Tensor

from jitkern import BlockBuffers, copy_blocks, h2d_gather, indexing, store_cache

GIB = 1 << 30
# Just below and above each power of two at which some integer type ends, in rows and in bytes.
EDGES = [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1]


def sparse(size: int) -> Tensor:
    """Return zeroed bytes that take memory only where they are written."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which mmap names from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def far_rows(num_rows: int, row_bytes: int) -> list[int]:
    """Rows at both ends, around row 2^31 and 2^32, and those that hold byte 2^31 and 2^32."""
    rows = {0, 1, num_rows - 2, num_rows - 1}
    for edge in EDGES:
        rows |= {edge, edge // row_bytes, edge // row_bytes + 1}
    return sorted(row for row in rows if row < num_rows)


def aliases(rows: list[int], row_bytes: int, num_rows: int) -> list[int]:
    """Where those rows would land if their number or their offset were cut to 32 bits."""
    wrapped = {row % 2**32 for row in rows} | {row % 2**31 for row in rows}
    wrapped |= {row * row_bytes % 2**32 // row_bytes for row in rows}
    wrapped |= {row * row_bytes % 2**31 // row_bytes for row in rows}
    neighbours = {row + step for row in rows for step in (-1, 1)}
    return sorted(row for row in (wrapped | neighbours) - set(rows) if 0 <= row < num_rows)


def store_and_look(*caches: Tensor) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Write and read far rows of two caches of zeros; yield each, its new rows, their slots."""
    num_rows, row_bytes = caches[0].shape
    rows = far_rows(num_rows, row_bytes)
    slots = torch.tensor(rows, device=caches[0].device)
    new_rows = random_bytes(2 * len(rows) * row_bytes, 1).view(2, -1, row_bytes).clamp_(1)
    k, v = new_rows.to(slots.device)
    store_cache(*caches, slots, k, v)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(torch.stack([cache[row] for row in rows]), new)
        assert torch.equal(indexing(cache, slots), new)
        yield cache, new, rows


def zeros_on(device: torch.device, size: int) -> Tensor:
    if device.type == "cpu":
        return sparse(size)
    if torch.cuda.mem_get_info()[0] < 2 * size + GIB:
        pytest.skip(f"needs {2 * size >> 30} GiB of free GPU memory")
    return torch.zeros(size, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(("row_bytes", "total_bytes"), [(1, 5 * GIB), (656, 6 * GIB)])
def test_store_and_index_far_rows(device: torch.device, row_bytes: int, total_bytes: int) -> None:
    num_rows = total_bytes // row_bytes
    k_cache, v_cache = (
        zeros_on(device, total_bytes)[: num_rows * row_bytes].view(num_rows, row_bytes)
        for _ in "kv"
    )
    for cache, _, rows in store_and_look(k_cache, v_cache):
        for row in aliases(rows, row_bytes, num_rows):
            assert not cache[row].any(), f"row {row}"
    with out_of_range(device, f"index {num_rows} at position 0"):
        indexing(k_cache, torch.tensor([num_rows], device=device))


BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 6 * GIB // BLOCK_BYTES
# The far side, and its layers as [blocks, bytes] tensors.
FAR_SIDES: dict[str, Callable[[Tensor], tuple[Any, Sequence[Tensor]]]] = {
    "layers first": lambda far: (
        far.view(3, NUM_BLOCKS // 3, -1).transpose(0, 1),
        far.view(3, NUM_BLOCKS // 3, -1).unbind(0),
    ),
    "blocks first": lambda far: (
        far.view(NUM_BLOCKS, 4, -1),
        far.view(NUM_BLOCKS, 4, -1).unbind(1),
    ),
    "one layer": lambda far: (far.view(NUM_BLOCKS, 1, -1), [far.view(NUM_BLOCKS, -1)]),
    "list of parts": lambda far: (
        BlockBuffers([far.view(NUM_BLOCKS // 2, 2, -1)], num_block_dims=2),
        [far.view(NUM_BLOCKS, -1)],
    ),
}


@pytest.mark.parametrize("side", FAR_SIDES)
def test_blocks_beyond_4_gib(device: torch.device, side: str) -> None:
    far, layers = FAR_SIDES[side](zeros_on(device, 6 * GIB))
    blocks = far_rows(len(layers[0]), BLOCK_BYTES)
    shape = (len(blocks), len(layers), layers[0].shape[1])
    near = random_bytes(torch.Size(shape).numel(), 1).view(shape).clamp_(1).to(device)
    numbers = torch.arange(len(blocks))
    there = torch.stack([numbers, torch.tensor(blocks)], dim=1)
    is_list = isinstance(far, BlockBuffers)
    to_far: dict[str, int] = {} if is_list else {"dst_block_dim": 0}
    from_far: dict[str, int] = {} if is_list else {"src_block_dim": 0}
    for on in {torch.device("cpu"), device}:
        copy_blocks(near, far, there.to(on), src_block_dim=0, **to_far)
        for i, layer in enumerate(layers):
            assert torch.equal(torch.stack([layer[block] for block in blocks]), near[:, i])
            for block in aliases(blocks, BLOCK_BYTES, len(layer)):
                assert not layer[block].any(), block
        back = torch.zeros_like(near)
        copy_blocks(far, back, there.flip(1).to(on), dst_block_dim=0, **from_far)
        assert torch.equal(back, near)


def test_gather_to_and_from_far_rows() -> None:
    row_bytes = 656
    num_rows = 5 * GIB // row_bytes
    src, dst = (sparse(5 * GIB)[: num_rows * row_bytes].view(num_rows, row_bytes) for _ in "sd")
    rows = far_rows(num_rows, row_bytes)
    for i, row in enumerate(rows):
        src[row] = i + 1
    backwards = rows[::-1]
    h2d_gather(src, dst, torch.tensor([*zip(rows, backwards, strict=True)]))
    for i, row in enumerate(backwards):
        assert dst[row].eq(i + 1).all()
    for row in aliases(rows, row_bytes, num_rows):
        assert not dst[row].any()


CUDA_GB = 20


@pytest.fixture
def free_gpu() -> None:
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < (2 * CUDA_GB + 4) * 10**9:
        pytest.skip(f"needs {2 * CUDA_GB + 4} GB of free GPU memory")


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("row_bytes", [1, 2, 656, 8192])
@pytest.mark.usefixtures("free_gpu")
def test_caches_of_20_gb_on_the_gpu(row_bytes: int) -> None:
    num_rows = CUDA_GB * 10**9 // row_bytes
    caches = (torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device="cuda") for _ in "kv")
    for cache, new, _ in store_and_look(*caches):
        written = sum(int(part.count_nonzero()) for part in cache.view(-1).split(GIB))
        assert written == new.numel()  # and nothing else, anywhere


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.usefixtures("free_gpu")
def test_more_than_2_32_vectors_in_one_launch() -> None:
    """4.4e9 one-byte rows: flat vector numbers go beyond 32 bits."""
    count = 2**32 + 2**27
    table = torch.arange(251, dtype=torch.uint8, device="cuda").view(251, 1)
    indices = torch.empty(count, dtype=torch.int32, device="cuda")
    for start in range(0, count, GIB):
        part = indices[start : start + GIB]
        part.copy_(torch.arange(start, start + len(part), device="cuda") % 251)
    result = indexing(table, indices)
    for start in range(0, count, GIB):
        part = slice(start, start + GIB)
        assert torch.equal(result[part, 0].int(), indices[part])
