"""Launches and copies of unpack on fake_driver.c; run by test_fake_driver.py."""

from __future__ import annotations

import ctypes
import struct

import torch
from fake_copies import (
    DEVICE,
    PAGEABLE,
    PINNED,
    SIZE,
    foreign,
    from_a_line,
    lines,
    main,
    on_a_stream,
    on_gpu,
)
from launch_fake import driver, log, params, refused

from jitkern import unpack
from jitkern.ops.unpack import CONFIG, OWN_SEGMENTS

OTHER = from_a_line(SIZE)
PARAMS = "=QQqqQQIiI??xx4IQ"  # of UnpackParams
THREADS = CONFIG.num_threads
for name in ("i64x3", "i64x6"):
    driver.fake_kernel(
        f"jitkern_unpack_v16_{name}".encode(), ctypes.c_uint64(struct.calcsize(PARAMS)), THREADS
    )


def launched() -> tuple[str, int, tuple[int, ...]]:
    """Return the last launch, its blocks and its parameters."""
    line = log().splitlines()[-1]
    grid = int(line.partition("grid ")[2].partition(",")[0])
    return line, grid, struct.unpack(PARAMS, params(line))


def check_the_launch() -> None:
    """The kernel of the format; copying blocks, and further blocks if there may be a rest."""
    count = torch.tensor([3], dtype=torch.int32)
    six = torch.zeros(9000, 6, dtype=torch.int64)
    unpack(on_gpu(OTHER), on_gpu(DEVICE), on_gpu(six), count=on_gpu(count))
    line, grid, told = launched()
    assert "jitkern_unpack_v16_i64x6 of" in line and f"block {THREADS},1,1" in line, line
    assert told[:4] == (DEVICE.data_ptr(), OTHER.data_ptr(), SIZE, SIZE)
    assert told[4:8] == (six.data_ptr(), count.data_ptr(), 9000, 4)
    copiers = told[8]  # two an SM
    assert grid == copiers + copiers // 2, line
    assert told[9:11] == (False, False)
    assert len(set(told[11:15])) == 4  # a site for each part

    # A whole MiB by the warps of one of so few.
    own = 1 + SIZE // (512 * OWN_SEGMENTS)
    rows = torch.zeros(copiers * (THREADS // 32) // own, 3, dtype=torch.int64)
    for num, dealers in ((len(rows), 0), (len(rows) + 1, copiers // 2)):
        unpack(on_gpu(OTHER), on_gpu(DEVICE), on_gpu(torch.zeros(num, 3, dtype=torch.int64)))
        line, grid, told = launched()
        assert "jitkern_unpack_v16_i64x3 of" in line, line
        assert told[5:9] == (0, num, 0, copiers) and grid == copiers + dealers, line
    # Few blocks for few bytes.
    unpack(on_gpu(OTHER), on_gpu(DEVICE[:1000]), on_gpu(torch.zeros(3, 3, dtype=torch.int64)))
    line, grid, told = launched()
    assert grid == 1 and told[8] == 1, line


def check_host_memory() -> None:
    """Few SMs; pageable memory is refused unless it is empty."""
    rows = torch.zeros(4000, 3, dtype=torch.int64)
    for dst, src in ((on_gpu(DEVICE), PINNED), (PINNED, on_gpu(DEVICE))):
        unpack(src, dst, on_gpu(rows))
        _, grid, told = launched()
        assert grid <= 64 and told[8] <= 32
        assert told[9:11] == (src is PINNED, dst is PINNED)
        assert sorted(told[:2]) == sorted((DEVICE.data_ptr(), PINNED.data_ptr()))
    for given in (on_gpu(rows), rows):
        text = "unpack: {}: pageable host memory, expected pinned host memory .*"
        refused(ValueError, text.format("src"), unpack, PAGEABLE, on_gpu(DEVICE), given)
        refused(ValueError, text.format("dst"), unpack, on_gpu(DEVICE), PAGEABLE, given)
    assert log() == ""
    unpack(torch.zeros(0), on_gpu(DEVICE), on_gpu(rows))
    assert launched()[2][3] == 0


def check_descriptors_of_the_host_are_uploaded() -> None:
    """As rows of six, in as few pieces as possible, at most `count`."""
    sides = (foreign(PINNED), on_gpu(DEVICE))
    rows = torch.tensor(
        [[7, 9, 5, 1, 0, 0], [0, 0, 0, 9, 9, 9], [1, 2, 8, 4, 8, 8], [0, 0, 4, 9, 5, 0], [-1] * 6]
    )
    unpack(*sides, foreign(rows), count=foreign(torch.tensor(4)))
    upload, copy, launch = lines()
    assert (upload, copy) == ("allocate 144", "h2d 144 on 0") and "i64x6 of" in launch
    told = struct.unpack(PARAMS, params(launch))
    assert told[5:7] == (0, 3)  # no count on the device
    listed = struct.unpack("18q", ctypes.string_at(told[4], 144))
    assert listed == (7, 9, 5, 1, 0, 0, 1, 2, 32, 1, 8, 8, 0, 0, 4, 1, 5, 0)
    many = torch.tensor([[7, 0, 3]]).repeat(200_000, 1)
    many[-1, 0] = 77
    unpack(*sides, foreign(many))
    *uploads, launch = lines()
    assert uploads == ["allocate 9600000", "h2d 8388576 on 0", "h2d 1211424 on 0"]
    told = struct.unpack(PARAMS, params(launch))
    last = struct.unpack("6q", ctypes.string_at(told[4] + 9_600_000 - 48, 48))
    assert last == (77, 0, 3, 1, 0, 0)
    unpack(*sides, foreign(many), count=foreign(torch.tensor(0)))
    unpack(*sides, foreign(rows[1:2]))
    assert log() == ""


def check_capture() -> None:
    rows = torch.tensor([[0, 0, 8]])
    driver.fake_capture(1)
    text = "unpack: descriptors: device cpu while a graph is captured, expected device cuda:0"
    with on_a_stream():
        refused(ValueError, text, unpack, PINNED, on_gpu(DEVICE), rows)
        unpack(PINNED, on_gpu(DEVICE), on_gpu(rows))
    assert "i64x3 of" in log()


if __name__ == "__main__":
    main(dict(globals()))
