"""What an OffloadEngine's calls have the driver do, on fake_driver.c; run by test_engine_driver."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import OnCuda, driver, log

from jitkern.offload import mover
from jitkern.offload.mover import BlockMover, Side

LAYERS, BLOCKS, SLOTS, TOKENS, TOKEN_BYTES = 3, 20, 9, 4, 32
PIECE = TOKENS * TOKEN_BYTES

PINNED, DEVICE = (torch.zeros(1 << 19, dtype=torch.uint8) for _ in range(2))
driver.fake_memory(ctypes.c_uint64(PINNED.data_ptr()), ctypes.c_uint64(len(PINNED)), 1, 0)

copy_blocks = mover.copy_blocks


def on_gpu(tensor: torch.Tensor) -> Any:
    """Return the slots as the GPU's memory that they stand for."""
    begin = DEVICE.data_ptr()
    is_there = begin <= tensor.data_ptr() < begin + len(DEVICE)
    return tvm_ffi.from_dlpack(OnCuda(tensor)) if is_there else tensor


def copy_on_gpu(dst: torch.Tensor, src: torch.Tensor, pairs: torch.Tensor, **how: Any) -> None:
    copy_blocks(on_gpu(dst), on_gpu(src), pairs, **how)


def part(memory: torch.Tensor, *shape: int) -> torch.Tensor:
    return memory[: torch.Size(shape).numel()].view(shape)


def mover_of(parts: int, is_block_first: bool) -> BlockMover:
    tail = (TOKENS, TOKEN_BYTES)
    shape = (BLOCKS, parts, LAYERS) if is_block_first else (parts, LAYERS, BLOCKS)
    cpu = Side(part(PINNED, *shape, *tail), 0 if is_block_first else 1)
    gpu = Side(part(DEVICE, parts, LAYERS, SLOTS, *tail), 1)
    return BlockMover(gpu, cpu, "engine", None)


def clean() -> None:
    PINNED.copy_(torch.randint(0, 256, PINNED.shape, dtype=torch.uint8))
    DEVICE.copy_(torch.randint(0, 256, DEVICE.shape, dtype=torch.uint8))
    log()


def asked() -> list[str]:
    return log().splitlines()


def check_a_block_is_one_copy() -> None:
    """K and V are twice the layers, for both kinds and layouts."""
    for parts in (1, 2):
        rows, slots = parts * LAYERS, SLOTS * PIECE
        for is_block_first, pitch in ((False, BLOCKS * PIECE), (True, PIECE)):
            mover = mover_of(parts, is_block_first)
            mover.one("c", True, 4, 7, None)
            assert asked() == [f"copy {rows} x {PIECE}, pitches {slots} {pitch}, types 2 1, on 0"]
            mover.one("c", False, 4, 7, None)
            assert asked() == [f"copy {rows} x {PIECE}, pitches {pitch} {slots}, types 1 2, on 0"]


def check_the_first_tokens_are_one_copy() -> None:
    mover = mover_of(2, False)
    mover.one("c", False, 4, 7, None, None, 3)
    wide, slots, blocks = 3 * TOKEN_BYTES, SLOTS * PIECE, BLOCKS * PIECE
    assert asked() == [f"copy 6 x {wide}, pitches {blocks} {slots}, types 1 2, on 0"]
    mover.one("c", True, 4, 7, None, 1, 3)  # K and V of a layer
    slots, blocks = LAYERS * slots, LAYERS * blocks
    assert asked() == [f"copy 2 x {wide}, pitches {slots} {blocks}, types 2 1, on 0"]


def check_a_batch_is_one_copy_for_each_run() -> None:
    mover = mover_of(2, False)
    mover.many("c", True, [0, 1, 2, 5], [8, 9, 10, 3], None)
    pitches = f"pitches {SLOTS * PIECE} {BLOCKS * PIECE}, types 2 1, on 0"
    assert asked() == [f"copy 6 x {3 * PIECE}, {pitches}", f"copy 6 x {PIECE}, {pitches}"]


def check_all_slots_are_one_copy_a_step() -> None:
    mover_ = mover_of(2, False)
    pitches = f"pitches {SLOTS * PIECE} {BLOCKS * PIECE}, types 2 1, on 0"
    mover_.everything("c", True, 11, None)
    assert asked() == [f"copy 6 x {SLOTS * PIECE}, {pitches}"]
    whole, mover._STEP_BYTES = mover._STEP_BYTES, 4 * 6 * PIECE
    try:
        mover_.everything("c", True, 0, None)
    finally:
        mover._STEP_BYTES = whole
    assert asked() == [f"copy 6 x {count * PIECE}, {pitches}" for count in (4, 4, 1)]
    gpu = DEVICE[: mover_.gpu.tensor.numel()].view(6, SLOTS, PIECE)
    cpu = PINNED[: mover_.cpu.tensor.numel()].view(6, BLOCKS, PIECE)
    assert torch.equal(gpu, cpu[:, :SLOTS])


def main() -> None:
    mover.copy_blocks = copy_on_gpu
    report_checks(dict(globals()), clean)


if __name__ == "__main__":
    main()
