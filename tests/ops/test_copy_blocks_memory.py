"""Which memory copy_blocks takes: against sets of bytes, views as engines have them, megabytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_copy_blocks import LAYERS, block_buffer, ways
from torch import Tensor

from jitkern import copy_blocks


def bytes_of(view: Tensor) -> list[int]:
    """The bytes of each element, from the storage's first on; one that is there twice is twice."""
    strides, shape = view.stride(), view.shape
    places = itertools.product(*map(range, shape))
    return [
        view.storage_offset() + sum(i * s for i, s in zip(at, strides, strict=True))
        for at in places
    ]


@given(data=st.data())
def test_blocks_that_meet_are_refused(data: st.DataObject) -> None:
    """Whatever the strides: those of a destination with each other, and with those of a source."""
    draw = data.draw
    layers, piece = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    memory = torch.arange(256).to(torch.uint8)
    views = []
    for _ in range(2):
        shape = (layers, draw(st.integers(1, 5)), piece)
        strides = (draw(st.integers(0, 20)), draw(st.integers(0, 20)), 1)
        views.append(memory.as_strided(shape, strides, draw(st.integers(0, 60))))
    dst, src = views
    written, read = bytes_of(dst), bytes_of(src)
    before = memory.clone()
    pairs = torch.tensor([[src.shape[1] - 1, 0]])
    if len(set(written)) < len(written):
        with pytest.raises(ValueError, match=r"^copy_blocks: dst: blocks of .* that overlap"):
            copy_blocks(dst, src, pairs)
    elif written != read and set(written) & set(read):
        with pytest.raises(ValueError, match=r"^copy_blocks: dst: overlaps src"):
            copy_blocks(dst, src, pairs)
    else:
        last = src[:, -1].clone()
        copy_blocks(dst, src, pairs)
        before.as_strided(dst.shape, dst.stride(), dst.storage_offset())[:, 0] = last
    assert torch.equal(memory, before)


def test_k_and_v_of_one_tensor(device: torch.device) -> None:
    """Blocks of one side may lie between those of the other; what shares a byte is refused."""
    both = torch.randint(0, 256, (LAYERS, 9, 2, 64), dtype=torch.uint8, device=device)
    k, v = both[:, :, 0], both[:, :, 1]
    expected = k[:, 4].clone()
    pairs = torch.tensor([[4, 2]], device=device)
    copy_blocks(v, k, pairs)
    assert torch.equal(v[:, 2], expected)
    text = r"copy_blocks: dst: overlaps src, expected memory of its own"
    for dst, src in ((k[:, :5], k[:, 4:]), (k[:, :8], k), (k[:2], k[1:])):
        with pytest.raises(ValueError, match=text):
            copy_blocks(dst, src, pairs)
    copy_blocks(k[:, :4], k[:, 4:8], pairs - 4)


def test_within_one_cache(device: torch.device) -> None:
    """Copy on write: what other requests still read is left as it is."""
    cache = torch.randint(0, 256, (LAYERS, 9, 2, 64), dtype=torch.uint8, device=device)
    for one in (cache, cache[:, :, 1], cache[1:, :7, 0]):
        before = cache.clone()
        expected = cache.clone()
        expected.as_strided(one.shape, one.stride(), one.storage_offset())[:, [2, 6]] = one[
            :, [4, 0]
        ]
        pairs = torch.tensor([[4, 2], [-1, 3], [0, 6], [5, 5]])
        for pairs_on, method in ways(device):
            cache.copy_(before)
            copy_blocks(one, one, pairs.to(pairs_on), method=method)
            assert torch.equal(cache, expected)


def test_blocks_that_share_bytes() -> None:
    memory = torch.zeros(1000)
    src, pairs = torch.ones(3, 4, 8), torch.tensor([[0, 0]])
    for strides in ((0, 8, 1), (32, 0, 1), (32, 7, 1), (31, 8, 1), (8, 12, 1), (5, 24, 1)):
        with pytest.raises(ValueError, match="copy_blocks: dst: blocks of 32 bytes a layer that"):
            copy_blocks(memory.as_strided((3, 4, 8), strides), src, pairs)
    # Neither dimension lies between two of the other, and no byte is shared: 0, 12, 24; 8, 20, ..
    for strides in ((12, 20, 1), (32, 8, 1), (8, 24, 1), (8, 100, 1)):
        dst = memory.as_strided((3, 2, 4), strides)
        copy_blocks(dst, src[:, :2, :4].contiguous(), pairs)
        assert dst[:, 0].eq(1).all()


def test_megabytes_there_and_back(device: torch.device) -> None:
    """80 MB: several threads on the CPU, several rounds of every warp on CUDA."""
    blocks, layers, item = 400, 13, 16 * 1024
    host = block_buffer([blocks, layers], item, device, pinned=device.type == "cuda", seed=3).view
    cache = torch.zeros(layers, blocks, item, dtype=torch.uint8, device=device)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    there = torch.stack([order, torch.arange(blocks)], 1)
    back_to = torch.zeros(blocks, layers, item, dtype=torch.uint8)
    back_to = back_to.pin_memory() if device.type == "cuda" else back_to
    for pairs_on, method in ways(device):
        cache.zero_()
        back_to.zero_()
        pairs = there.to(torch.int32).to(pairs_on)
        copy_blocks(cache, host, pairs, src_block_dim=0, method=method)
        back = pairs.flip(1).contiguous()
        copy_blocks(back_to, cache, back, dst_block_dim=0, method=method)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(back_to, host)
        assert torch.equal(cache[:, 0].cpu(), host[order[0]])
