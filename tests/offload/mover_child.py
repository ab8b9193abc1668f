"""What an OffloadEngine's calls have the driver do, on fake_driver.c; run by test_engine_driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import Fault, OnCuda, driver, log, params

from jitkern.jit.device import DeviceModule
from jitkern.offload import mover
from jitkern.offload.mover import BlockMover, Side

LAYERS, BLOCKS, SLOTS, TOKENS, TOKEN_BYTES = 3, 20, 9, 4, 32
PIECE = TOKENS * TOKEN_BYTES

PINNED, DEVICE = (torch.zeros(1 << 19, dtype=torch.uint8) for _ in range(2))
driver.fake_memory(ctypes.c_uint64(PINNED.data_ptr()), ctypes.c_uint64(len(PINNED)), 1, 0)

copy_blocks = mover.copy_blocks
PARAMS = "=QQqqqqQQqqqqqqiIIxxxxQ"  # of CopyBlocksParams
NAME = b"jitkern_copy_blocks_v16_i64_write"
driver.fake_kernel(NAME, ctypes.c_uint64(struct.calcsize(PARAMS)), 1024)


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


def fault_of_the_gpu() -> Fault:
    """Return the record that kernels are given."""
    one, pairs = on_gpu(part(DEVICE, 1, 2, 16)), torch.zeros(1, 2, dtype=torch.int64)
    copy_blocks(one, on_gpu(part(DEVICE, 1, 8, 16)[:, 4:]), tvm_ffi.from_dlpack(OnCuda(pairs)))
    (line,) = [line for line in asked() if "grid" in line]
    return Fault.from_address(struct.unpack(PARAMS, params(line))[-1])


class Steps:
    """Three of them, on a mover that takes itself for a GPU's."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self.queued = self.waited_for = self.tries = 0
        self.error: BaseException | None = None
        mover_ = mover_of(2, False)
        self.gpu = DEVICE[: mover_.gpu.tensor.numel()].view(6, SLOTS, PIECE)
        self.cpu = PINNED[: mover_.cpu.tensor.numel()].view(6, BLOCKS, PIECE)
        mover_._device = torch.device("cuda", 0)
        mover_._event = lambda: Event(self)  # type: ignore[method-assign]

        def copy(*args: torch.Tensor, **how: Any) -> None:
            self.tries += 1
            before(self.queued)
            copy_on_gpu(*args, **how)
            self.queued += 1

        kept, mover._STEP_BYTES = mover._STEP_BYTES, 4 * 6 * PIECE
        mover.copy_blocks = copy
        try:
            mover_.everything("c", False, 3, None)
        except BaseException as error:
            self.error = error
        finally:
            mover._STEP_BYTES, mover.copy_blocks = kept, copy_on_gpu


class Event:
    def __init__(self, steps: Steps) -> None:
        self.steps, self.number = steps, steps.queued

    def synchronize(self) -> None:
        self.steps.waited_for = max(self.steps.waited_for, self.number)


def check_a_fault_between_two_steps_is_raised_behind_the_last() -> None:
    fault = fault_of_the_gpu()

    def found(step: int) -> None:
        if step == 1 and positions:
            fault.be(2, 0, positions.pop(0), 900, 900)

    for count in (1, 3):  # each keeps one try from being made
        positions = list(range(7, 7 + count))
        steps = Steps(found)
        assert steps.tries == 3 + count and fault.state == 0
        assert steps.queued == steps.waited_for == 3
        assert torch.equal(steps.cpu[:, 3 : 3 + SLOTS], steps.gpu)
        assert isinstance(steps.error, IndexError), steps.error
        assert "index 900 at position 7," in str(steps.error), steps.error


def check_a_fault_in_front_of_all_leaves_nothing_queued() -> None:
    fault_of_the_gpu().be(2, 0, 7, 900, 900)
    steps = Steps(lambda _: None)
    assert isinstance(steps.error, IndexError) and steps.tries == 0
    steps = Steps(lambda _: None)
    assert steps.error is None and steps.queued == 3


def check_what_was_queued_before_a_failure_is_waited_for() -> None:
    for kind, tries in ((KeyboardInterrupt, 3), (RuntimeError, 3)):

        def fail(step: int, kind: type[BaseException] = kind) -> None:
            if step == 2:
                raise kind

        steps = Steps(fail)
        assert type(steps.error) is kind and steps.tries == tries
        assert steps.queued == steps.waited_for == 2


def main() -> None:
    DeviceModule.image = lambda self, arch: b"image"  # type: ignore[method-assign]
    mover.copy_blocks = copy_on_gpu
    report_checks(dict(globals()), clean)


if __name__ == "__main__":
    main()
