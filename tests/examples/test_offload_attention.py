"""The example of attention over an offloaded cache, and its tuning, at a small size."""

from __future__ import annotations

from collections.abc import Iterator

import offload_attention as example
import offload_tuning as tuning
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads wait for each other where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(device: torch.device, chunk: int) -> example.Case:
    device = torch.empty(0, device=device).device  # with its index
    return example.Case(device, 3, 208, 4, 2, 16, block_size=8, chunk=chunk, unit_blocks=2)


@pytest.mark.parametrize("chunk", [8, 24, 32])
@pytest.mark.parametrize("way", [example.Prefill, tuning.OneStream])
def test_it_is_full_attention(device: torch.device, way: type[example.Prefill], chunk: int) -> None:
    """Chunks that divide the tokens and others, units that are full and not."""
    case = small(device, chunk)
    prefill = way(case)
    for _ in range(2):  # the second run writes over the blocks of the first
        assert 0 < example.rms_error(case, prefill.run()) < example.MAX_ERROR
