"""Where the source of h2d_gather lies: pageable memory, registered memory, parts of either."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from jitkern import h2d_gather

DST_ROWS = 29
SRC_ROWS = 43


@pytest.mark.cuda
def test_a_pageable_source_is_refused_with_the_cure() -> None:
    dst = torch.zeros(DST_ROWS, 8, device="cuda")
    src = torch.randn(SRC_ROWS, 8)
    with pytest.raises(ValueError, match="h2d_gather: src: pageable host memory") as caught:
        h2d_gather(src, dst, torch.tensor([[0, 0]], device="cuda"))
    assert "pin_memory" in str(caught.value)
    assert dst.eq(0).all()


@pytest.mark.cuda
def test_memory_registered_with_cuda_counts_as_pinned() -> None:
    src = torch.randn(SRC_ROWS, 656).contiguous()
    bytes_ = src.numel() * 4
    assert int(torch.cuda.cudart().cudaHostRegister(src.data_ptr(), bytes_, 0)) == 0
    try:
        dst = torch.zeros(DST_ROWS, 656, device="cuda")
        h2d_gather(src, dst, torch.tensor([[42, 28], [0, 0]], device="cuda"))
        torch.cuda.synchronize()
        assert torch.equal(dst[28].cpu(), src[42])
        assert torch.equal(dst[0].cpu(), src[0])
    finally:
        torch.cuda.cudart().cudaHostUnregister(src.data_ptr())


def registered(memory: Tensor) -> Iterator[Tensor]:
    """Pin `memory` in place while the generator lives."""
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    yield memory
    torch.cuda.synchronize()
    assert int(cudart.cudaHostUnregister(memory.data_ptr())) == 0


@pytest.fixture
def pages() -> Tensor:
    """Four pages of memory that CUDA does not know."""
    whole = torch.randint(0, 256, (64 << 10,), dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    return whole[start : start + 16384]


@pytest.mark.cuda
def test_a_source_only_partly_pinned_is_refused(pages: Tensor) -> None:
    begin = pages.data_ptr()
    text = (
        f"h2d_gather: src: rows at [{begin:#x}, {begin + 16384:#x}), of which [{begin:#x}, "
        f"{begin + 8192:#x}) is pinned, expected pinned host memory for all of them"
    )
    dst, pairs = torch.zeros(16, 1024, dtype=torch.uint8), torch.tensor([[0, 0]], device="cuda")
    for _ in registered(pages[:8192]):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            h2d_gather(pages.view(16, 1024), dst.cuda(), pairs)


@pytest.mark.cuda
def test_a_source_registered_in_pieces(pages: Tensor) -> None:
    """As pools of hundreds of GiB are."""
    src, dst = pages.view(16, 1024), torch.zeros(16, 1024, dtype=torch.uint8, device="cuda")
    for _ in registered(pages[:8192]):
        for _ in registered(pages[8192:]):
            h2d_gather(src, dst, torch.arange(16, device="cuda").repeat_interleave(2).view(16, 2))
            assert torch.equal(dst.cpu(), src)
