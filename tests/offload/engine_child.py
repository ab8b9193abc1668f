"""What an OffloadEngine has the driver do, on fake_driver.c; see ../test_fake_driver.py."""

from __future__ import annotations

from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import OnCuda, log, pinned

from jitkern.jit.device import DeviceModule
from jitkern.offload import OffloadEngine
from jitkern.offload import engine as module

LAYERS, BLOCKS, SLOTS, TOKENS, TOKEN_BYTES = 3, 20, 9, 4, 32
PIECE = TOKENS * TOKEN_BYTES
PITCHES = f"pitches {SLOTS * PIECE} {BLOCKS * PIECE}, types 2 1, on 0"

PINNED, DEVICE = (torch.zeros(1 << 19, dtype=torch.uint8) for _ in range(2))
pinned(PINNED)

copy_blocks = module.copy_blocks


def on_gpu(tensor: torch.Tensor) -> Any:
    """Return the slots as the GPU's memory that they stand for."""
    begin = DEVICE.data_ptr()
    is_there = begin <= tensor.data_ptr() < begin + len(DEVICE)
    return tvm_ffi.from_dlpack(OnCuda(tensor)) if is_there else tensor


def copy_on_gpu(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor, **how: Any) -> None:
    copy_blocks(on_gpu(src), on_gpu(dst), pairs, **how)


def part(memory: torch.Tensor, *shape: int) -> torch.Tensor:
    return memory[: torch.Size(shape).numel()].view(shape)


def engine_of(parts: int, is_block_first: bool) -> OffloadEngine:
    """Return one whose caches are in that memory."""
    made, tail = OffloadEngine.__new__(OffloadEngine), (TOKENS, TOKEN_BYTES)
    shape = (BLOCKS, parts, LAYERS) if is_block_first else (parts, LAYERS, BLOCKS)
    made.num_layers, made.num_cpu_blocks, made.num_slots = LAYERS, BLOCKS, SLOTS
    made.block_size, made.device, made._is_open = TOKENS, torch.device("cpu"), True
    made._block_dim, made._views = 0 if is_block_first else 1, {}
    made._cpu = part(PINNED, *shape, *tail)
    made._gpu = part(DEVICE, parts, LAYERS, SLOTS, *tail)
    made._method = "engine"
    return made


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
            engine = engine_of(parts, is_block_first)
            engine.load(4, 7)
            assert asked() == [f"copy {rows} x {PIECE}, pitches {slots} {pitch}, types 2 1, on 0"]
            engine.store(4, 7)
            assert asked() == [f"copy {rows} x {PIECE}, pitches {pitch} {slots}, types 1 2, on 0"]


def check_the_first_tokens_are_one_copy() -> None:
    engine = engine_of(2, False)
    engine.store(4, 7, num_tokens=3)
    wide, slots, blocks = 3 * TOKEN_BYTES, SLOTS * PIECE, BLOCKS * PIECE
    assert asked() == [f"copy 6 x {wide}, pitches {blocks} {slots}, types 1 2, on 0"]
    engine.load(4, 7, layer=1, num_tokens=3)  # K and V of a layer
    slots, blocks = LAYERS * slots, LAYERS * blocks
    assert asked() == [f"copy 2 x {wide}, pitches {slots} {blocks}, types 2 1, on 0"]


def check_a_batch_is_one_copy_for_each_run() -> None:
    engine_of(2, False).load([0, 1, 2, 5], [8, 9, 10, 3])
    assert asked() == [f"copy 6 x {3 * PIECE}, {PITCHES}", f"copy 6 x {PIECE}, {PITCHES}"]


def check_all_slots_are_one_copy_a_step() -> None:
    engine = engine_of(2, False)
    engine.load_all(11)
    assert asked() == [f"copy 6 x {SLOTS * PIECE}, {PITCHES}"]
    whole, module._STEP_BYTES = module._STEP_BYTES, 4 * 6 * PIECE
    try:
        engine.load_all()
    finally:
        module._STEP_BYTES = whole
    assert asked() == [f"copy 6 x {count * PIECE}, {PITCHES}" for count in (4, 4, 1)]
    assert torch.equal(engine._gpu, engine._cpu[:, :, :SLOTS])


if __name__ == "__main__":
    DeviceModule.image = lambda self, arch: b"image"  # type: ignore[method-assign]
    module.copy_blocks = copy_on_gpu
    report_checks(dict(globals()), clean)
