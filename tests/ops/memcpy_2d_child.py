"""What memcpy_2d_async has a driver do, that of fake_driver.c; for test_fake_gpu.py."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from fake_copies import on_gpu
from fake_gpu import report_checks
from launch_fake import driver, log, refused

from jitkern import memcpy_2d_async
from jitkern.offload import memory

KIB = 1024
# Pinned memory in two registrations that follow each other, and some that nobody has pinned.
PINNED = torch.randint(0, 256, (8 * KIB,), dtype=torch.uint8)
PAGEABLE = torch.randint(0, 256, (8 * KIB,), dtype=torch.uint8)
for begin in (0, 4 * KIB):
    driver.fake_memory(ctypes.c_uint64(PINNED.data_ptr() + begin), ctypes.c_uint64(4 * KIB), 1, 0)
DEVICE = torch.zeros(8 * KIB, dtype=torch.uint8)


@dataclass
class Stream:
    cuda_stream: int
    device_index: int


def rows(
    memory_: torch.Tensor, pitch: int, width: int, height: int, begin: int = 0
) -> torch.Tensor:
    return memory_[begin:].as_strided((height, width), (pitch, 1))


def clean() -> None:
    DEVICE.zero_()
    driver.fake_capture(0)
    log()


def check_each_kind_is_one_strided_copy() -> None:
    there = rows(DEVICE, 100, 16, 4)
    memcpy_2d_async(on_gpu(there), rows(PINNED, 160, 16, 4), 100, 160, 16, 4, "h2d")
    assert log() == "copy 4 x 16, pitches 100 160, types 2 1, on 0\n"
    assert torch.equal(there, rows(PINNED, 160, 16, 4))
    assert DEVICE[16:100].eq(0).all()
    back = rows(PINNED, 40, 16, 4, 2000)
    memcpy_2d_async(back, on_gpu(there), 40, 100, 16, 4, "d2h")
    assert log() == "copy 4 x 16, pitches 40 100, types 1 2, on 0\n"
    assert torch.equal(back, there)
    twin = rows(DEVICE, 60, 16, 4, 1000)
    memcpy_2d_async(on_gpu(twin), on_gpu(there), 60, 100, 16, 4, "d2d")
    assert log() == "copy 4 x 16, pitches 60 100, types 4 4, on 0\n"
    assert torch.equal(twin, there)


def check_what_is_one_piece_is_no_strided_copy() -> None:
    whole = on_gpu(DEVICE)
    memcpy_2d_async(whole, PINNED, 16, 16, 16, 4, "h2d")
    assert log() == "h2d 64 on 0\n"
    memcpy_2d_async(PINNED, whole, 5, 0, 16, 1, "d2h")  # of one row pitches mean nothing
    assert log() == "d2h 16 on 0\n"
    memcpy_2d_async(whole, on_gpu(DEVICE[KIB:]), 16, 16, 16, 4, "d2d")
    assert log() == "copy 64 on 0\n"
    for width, height in ((0, 4), (16, 0)):
        memcpy_2d_async(whole, PINNED, 16, 16, width, height, "h2d")
    assert log() == ""


def check_streams() -> None:
    first, second = on_gpu(DEVICE), on_gpu(DEVICE[KIB:], 1)
    copy = (16, 160, 16, 4)
    memcpy_2d_async(second, PINNED, *copy, "h2d", Stream(4711, 1))
    assert log() == "copy 4 x 16, pitches 16 160, types 2 1, on 4711\n"
    text = "memcpy_2d_async: stream: a stream of cuda:0, expected one of cuda:1, as dst"
    refused(ValueError, text, memcpy_2d_async, second, PINNED, *copy, "h2d", Stream(4711, 0))
    for number in (0, 1):  # between two GPUs
        memcpy_2d_async(second, first, *copy, "d2d", Stream(7, number))
        assert log() == "copy 4 x 16, pitches 16 160, types 4 4, on 7\n"
    text = "memcpy_2d_async: stream: a stream of cuda:2, expected one of cuda:1, as dst"
    refused(ValueError, text, memcpy_2d_async, second, first, *copy, "d2d", Stream(7, 2))


def check_pageable_memory() -> None:
    whole, copy = on_gpu(DEVICE), (16, 160, 16, 4)
    text = r"memcpy_2d_async: src: pageable host memory, expected pinned .* allow_pageable=True .*"
    refused(ValueError, text, memcpy_2d_async, whole, PAGEABLE, *copy, "h2d")
    text = text.replace("src", "dst")
    refused(ValueError, text, memcpy_2d_async, PAGEABLE, whole, *copy, "d2h")
    memcpy_2d_async(whole, PAGEABLE, *copy, "h2d", allow_pageable=True)
    assert log() == "copy 4 x 16, pitches 16 160, types 2 1, on 0\n"
    assert torch.equal(rows(DEVICE, 16, 16, 4), rows(PAGEABLE, 160, 16, 4))
    driver.fake_capture(1)
    memcpy_2d_async(whole, PINNED, *copy, "h2d", allow_pageable=True)
    assert log() != ""
    text = "memcpy_2d_async: src: pageable host memory while a graph is captured, expected .*"
    late = (*copy, "h2d", Stream(4711, 0))
    refused(ValueError, text, memcpy_2d_async, whole, PAGEABLE, *late, allow_pageable=True)


def check_no_copy_spans_two_registrations() -> None:
    """Rows of one registration go together; one that lies in both in two parts."""
    begin = 4 * KIB - 250  # the third row crosses
    source = rows(PINNED, 100, 64, 6, begin)
    memcpy_2d_async(on_gpu(DEVICE), source, 80, 100, 64, 6, "h2d")
    assert log().splitlines() == [
        "copy 2 x 64, pitches 80 100, types 2 1, on 0",
        "h2d 50 on 0",
        "h2d 14 on 0",
        "copy 3 x 64, pitches 80 100, types 2 1, on 0",
    ]
    assert torch.equal(rows(DEVICE, 80, 64, 6), source)
    memcpy_2d_async(source, on_gpu(DEVICE), 100, 80, 64, 6, "d2h")
    assert log().splitlines()[1:3] == ["d2h 50 on 0", "d2h 14 on 0"]
    memcpy_2d_async(on_gpu(DEVICE), PINNED[3 * KIB :], 512, 512, 512, 4, "h2d")  # one piece
    assert log().splitlines() == ["h2d 1024 on 0", "h2d 1024 on 0"]
    assert torch.equal(DEVICE[: 2 * KIB], PINNED[3 * KIB : 5 * KIB])


def check_rows_of_a_pool() -> None:
    pool = memory.PinnedMemory(8 * KIB)
    pool._register(0)
    log()
    memcpy_2d_async(on_gpu(DEVICE), pool.tensor[4 * KIB - 40 :], 64, 128, 64, 2, "h2d")
    assert log() == "copy 2 x 64, pitches 64 128, types 2 1, on 0\n"
    pool.close()
    text = "memcpy_2d_async: src: memory of a PinnedPool that was closed, expected an open pool.*"
    refused(ValueError, text, memcpy_2d_async, on_gpu(DEVICE), pool.tensor, 64, 128, 64, 2, "h2d")


def narrow_pitches_beyond_the_limit_go_row_by_row() -> None:
    """The largest pitch is 256 here."""
    memcpy_2d_async(on_gpu(DEVICE), PINNED, 256, 200, 16, 3, "h2d")
    assert log() == "copy 3 x 16, pitches 256 200, types 2 1, on 0\n"
    for dpitch, spitch in ((257, 16), (16, 257)):
        memcpy_2d_async(on_gpu(DEVICE), PINNED, dpitch, spitch, 16, 3, "h2d")
        assert log() == 3 * "h2d 16 on 0\n"
        assert torch.equal(rows(DEVICE, dpitch, 16, 3), rows(PINNED, spitch, 16, 3))
    memcpy_2d_async(on_gpu(DEVICE), PINNED, 300, 300, 300, 3, "h2d")
    assert log() == "h2d 900 on 0\n"


if __name__ == "__main__":
    report_checks(dict(globals()), clean)
