"""Blocks, copies and runs for the tests of SlotPipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from jitkern.offload import SlotPipeline

SHAPE = (3, 5)


def pipeline_of(device: torch.device, depth: int = 3, **how: Any) -> SlotPipeline:
    options = {"num_slots": depth, "slot_shape": SHAPE, "dtype": torch.float32, "device": device}
    return SlotPipeline(**{**options, **how})


def host_blocks(count: int, device: torch.device, fill: bool = True) -> list[Tensor]:
    pinned = device.type == "cuda"
    blocks = [torch.zeros(SHAPE, pin_memory=pinned) for _ in range(count)]
    for number, block in enumerate(blocks):
        block.fill_(number + 1 if fill else 0)
    return blocks


def bring(tensor: Tensor, block: Tensor) -> None:
    tensor.copy_(block, non_blocking=True)


def take(tensor: Tensor, block: Tensor) -> None:
    block.copy_(tensor, non_blocking=True)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_is_ready(pipeline: SlotPipeline) -> None:
    """Check that the caller's stream is current, no slot is missing, and the next run works."""
    device = pipeline.device
    assert device.type == "cpu" or torch.cuda.current_stream() == torch.cuda.default_stream()
    assert len(pipeline._free) == pipeline.num_slots
    blocks = host_blocks(9, device)
    for slot in pipeline.update(blocks, load=bring, store=take):
        slot.tensor.add_(1)
    sync(device)
    assert [block[1, 2].item() for block in blocks] == list(range(2, 11))


def runs(pipeline: SlotPipeline, blocks: Iterable[Tensor]) -> list[Any]:
    return [
        pipeline.load(blocks, copy=bring),
        pipeline.store(blocks, copy=take),
        pipeline.update(blocks, load=bring, store=take),
    ]
