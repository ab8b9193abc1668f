"""K and V caches of pages, as engines lay them out in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from buffers import Buffer, make_buffer
from torch import Tensor

BLOCKS, PAGE = 5, 8
SLOTS = BLOCKS * PAGE

# name: the shape of the tensor, and [blocks, page, heads, dim] of K and V in it.
_Views = Callable[[Tensor], tuple[Tensor, Tensor]]
LAYOUTS: dict[str, tuple[Callable[[int, int], Sequence[int]], _Views]] = {
    "contiguous": (lambda h, d: (2, BLOCKS, PAGE, h, d), lambda kv: (kv[0], kv[1])),
    # FlashInfer and vLLM, NHD and HND
    "blocks of K and V": (lambda h, d: (BLOCKS, 2, PAGE, h, d), lambda kv: (kv[:, 0], kv[:, 1])),
    "HND": (
        lambda h, d: (2, BLOCKS, h, PAGE, d),
        lambda kv: (kv[0].transpose(1, 2), kv[1].transpose(1, 2)),
    ),
    "HND, blocks of K and V": (
        lambda h, d: (BLOCKS, 2, h, PAGE, d),
        lambda kv: (kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)),
    ),
    # K and V side by side in a head
    "packed": (
        lambda h, d: (BLOCKS, PAGE, h, 2 * d),
        lambda kv: tuple(kv.chunk(2, dim=-1)),  # type: ignore[return-value]
    ),
    "HND, packed": (
        lambda h, d: (BLOCKS, h, PAGE, 2 * d),
        lambda kv: tuple(kv.transpose(1, 2).chunk(2, dim=-1)),  # type: ignore[return-value]
    ),
    # other layers between the blocks, and slots that are not used
    "distances": (
        lambda h, d: (BLOCKS, 3, PAGE + 1, h, d),
        lambda kv: (kv[:, 0, :PAGE], kv[:, 2, 1:]),
    ),
}


def paged_caches(
    layout: str, heads: int, dim: int, device: torch.device | str, seed: int = 0
) -> tuple[Buffer, Buffer]:
    """Return K and V, random bytes in one buffer."""
    shape, views = LAYOUTS[layout]
    buffer = make_buffer(shape(heads, dim), device=device, seed=seed)
    k, v = views(buffer.view)
    return buffer.part(k), buffer.part(v)


def slots_in_pages(cache: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    """Return what indexes the slots of a cache of pages, or of rows."""
    if cache.dim() < 4:
        return (indices,)
    return indices // cache.shape[1], indices % cache.shape[1]
