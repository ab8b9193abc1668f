"""What copy_blocks has the driver do, on that of fake_driver.c; run by test_fake_driver.py."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from fake_copies import (
    DEVICE,
    HALF,
    PAGEABLE,
    PINNED,
    foreign,
    lines,
    main,
    on_a_stream,
    on_gpu,
    view,
)
from launch_fake import driver, log, params, refused

from jitkern import copy_blocks

SIDE = "Q8xQqqqqqqI4x"
SIDE_NAMES = (
    "table base block_bytes part_bytes piece_bytes layer_bytes row_stride num_blocks num_parts"
)
PARAMS = f"={SIDE}{SIDE}QQQIIIIqiII4xQQQII"  # CopyBlocksParams
NAMES = [
    *(f"{side}_{name}" for side in ("dst", "src") for name in SIDE_NAMES.split()),
    *["pairs", "dst_blocks", "count", "num_pairs", "num_layers", "num_rows", "num_segments"],
    *["row_bytes", "count_bytes", "src_site", "dst_site", "fault"],
    *["flags", "num_past", "value", "num_flags"],
]
INLINE = 8 * 448  # bytes of the pairs behind them
for kind in ("i64_read", "i64_write", "i32_read", "i32_write", "inline_read", "inline_write"):
    size = struct.calcsize(PARAMS) + (INLINE if "inline" in kind else 0)
    driver.fake_kernel(f"jitkern_copy_blocks_v16_{kind}".encode(), ctypes.c_uint64(size), 1024)


def told(line: str, names: str) -> list[Any]:
    """Return these parameters of a launch."""
    values = struct.unpack(PARAMS, params(line)[: struct.calcsize(PARAMS)])
    by_name = dict(zip(NAMES, values, strict=True))
    return [by_name[name] for name in names.split()]


def by_engine(
    dst: torch.Tensor, src: torch.Tensor, pairs: list[tuple[int, int]], to_gpu: bool, **dims: int
) -> list[str]:
    """Copy, compare with a loop, and return what the driver was asked for."""
    expected = dst.clone()
    to = expected if dims.get("dst_block_dim", 1) else expected.transpose(0, 1)
    source = src if dims.get("src_block_dim", 1) else src.transpose(0, 1)
    for a, b in pairs:
        if a >= 0 and b >= 0:
            to[:, b] = source[:, a]
    sides = (src, on_gpu(dst)) if to_gpu else (on_gpu(src), dst)
    copy_blocks(*sides, torch.tensor(pairs), method="engine", **dims)
    assert torch.equal(dst, expected)
    return log().splitlines()


def check_one_strided_copy_for_each_block() -> None:
    gpu, pool = view(DEVICE, 3, 9, 80), view(PINNED, 3, 20, 80)
    pairs = [(7, 0), (-1, 4), (2, 8), (5, -3), (19, 3)]
    wanted = 3 * ["copy 3 x 80, pitches 720 1600, types 4 4, on 0"]
    assert by_engine(gpu, pool, pairs, True) == wanted
    wanted = 3 * ["copy 3 x 80, pitches 1600 720, types 4 4, on 0"]
    assert by_engine(pool, gpu, [(b, a) for a, b in pairs], False) == wanted


def check_runs_are_one_copy() -> None:
    """Where blocks touch on both sides; a pair that is padding ends no run."""
    gpu, pool = view(DEVICE, 3, 9, 80), view(PINNED, 3, 20, 80)
    pairs = [(7, 0), (8, 1), (-1, -1), (9, 2), (11, 3), (12, 5), (13, 6), (5, 7), (4, 8)]
    assert by_engine(gpu, pool, pairs, True) == [
        f"copy 3 x {80 * blocks}, pitches 720 1600, types 4 4, on 0" for blocks in (3, 1, 2, 1, 1)
    ]
    gap = view(DEVICE, 3, 9, 100)[:, :, :80]  # blocks that do not touch
    assert len(by_engine(gap, pool, pairs, True)) == 8
    whole = [(i, i) for i in range(20)]
    twin = view(DEVICE, 3, 20, 80)
    assert by_engine(twin, pool, whole, True) == ["h2d 4800 on 0"]


def check_blocks_of_one_piece() -> None:
    """Block-first on both sides: a run is one piece, or one strided copy of whole blocks."""
    dims = {"dst_block_dim": 0, "src_block_dim": 0}
    gpu, pool = view(DEVICE, 9, 3, 80), view(PINNED, 20, 3, 80)
    pairs = [(7, 0), (8, 1), (9, 2), (3, 5), (1, 3)]
    assert by_engine(gpu, pool, pairs, True, **dims) == [
        f"h2d {240 * blocks} on 0" for blocks in (3, 1, 1)
    ]
    apart = view(DEVICE, 9, 4, 80)[:, :3]
    assert by_engine(apart, pool, pairs, True, **dims) == [
        "copy 3 x 240, pitches 320 240, types 4 4, on 0",
        *(2 * ["h2d 240 on 0"]),
    ]


def check_nothing_is_queued_where_a_pair_is_wrong() -> None:
    gpu, pool = on_gpu(view(DEVICE, 3, 9, 80)), view(PINNED, 3, 20, 80)
    for method in ("engine", "sm", "auto"):
        for column, bad in ((0, [20, 0]), (1, [0, 9])):
            text = rf"copy_blocks: pairs\[\.\.\., {column}\]: index {bad[column]} at position 1.*"
            pairs = torch.tensor([[7, 0], bad])
            refused(IndexError, text, copy_blocks, pool, gpu, pairs, method=method)
            assert log() == ""
    text = r"copy_blocks: src: pageable host memory, expected pinned host memory .*"
    pageable, pairs = view(PAGEABLE, 3, 20, 80), torch.tensor([[7, 0]])
    for method in ("engine", "sm", "auto"):
        refused(ValueError, text, copy_blocks, pageable, gpu, pairs, method=method)
    refused(ValueError, text, copy_blocks, pageable, gpu, on_gpu(pairs))
    assert log() == ""
    copy_blocks(pageable, gpu, pairs[:0])  # an empty call takes any memory


def check_the_engine_takes_long_rows_together() -> None:
    """Rows of 64 KiB or more: of all runs, cut where a registration ends."""
    piece = 64 << 10
    gpu, pool = view(DEVICE, 2, 4, piece), view(PINNED, 2, 8, piece)
    pairs = [(0, 1), (1, 2), (5, 0), (-1, 3)]
    with on_a_stream():
        assert by_engine(gpu, pool, pairs, True) == [
            "batch 131072 131072 65536 65536 on 4711"  # a row of each of two layers, of each run
        ]
        whole = view(PINNED, 1, 1 << 20)[:, 16:][:, : 1 << 19]  # over the end of the first half
        one = view(DEVICE, 1, 1 << 19)
        assert by_engine(one.unsqueeze(0), whole.unsqueeze(0), [(0, 0)], True) == [
            "batch 524272 16 on 4711"
        ]
        short = [view(memory, 2, 4, piece - 16) for memory in (DEVICE, PINNED)]
        assert by_engine(*short, [(3, 1)], True)[0].startswith("copy 2 x 65520,")
        # The driver was seen to hang with more than 50,000 in a batch.
        batches = by_engine(gpu[:1], pool[:1], 10_000 * [(5, 0)], True)
        assert [len(line.split()) - 3 for line in batches] == [4096, 4096, 1808]
        driver.fake_capture(1)
        assert by_engine(gpu, pool, pairs[2:], True) == 2 * ["h2d 65536 on 4711"]


def check_auto_takes_the_engine_for_long_pieces() -> None:
    """64 KiB and longer, on a stream that takes a batch."""
    piece = 64 << 10
    gpu, pool = on_gpu(view(DEVICE, 2, 4, piece)), foreign(view(PINNED, 2, 4, piece))
    pairs = foreign(torch.tensor([[0, 1]]))
    for dst, src in ((gpu, pool), (pool, gpu)):
        with on_a_stream():
            copy_blocks(src, dst, pairs)
            assert log() == "batch 65536 65536 on 4711\n"
            for how in ({"num_sms": 3}, {"method": "sm"}):
                copy_blocks(src, dst, pairs, **how)
                assert "jitkern_copy_blocks_v16_inline" in log()
        copy_blocks(src, dst, pairs)  # on the default stream
        assert "jitkern_copy_blocks_v16_inline" in log()


def check_capture() -> None:
    gpu, pool = on_gpu(view(DEVICE, 3, 9, 80)), view(PINNED, 3, 20, 80)
    pairs = torch.tensor([[7, 0]])
    driver.fake_capture(1)
    text = "copy_blocks: pairs: device cpu while a graph is captured, expected device cuda:0, or .*"
    with on_a_stream():
        for method in ("auto", "sm"):
            refused(ValueError, text, copy_blocks, pool, gpu, pairs, method=method)
        copy_blocks(pool, gpu, pairs, method="engine")
    assert log().startswith("copy 3 x 80,")


def check_pairs_of_the_host_go_with_the_launch() -> None:
    """Up to 448 int32 pairs without padding, no more than count; more are uploaded."""
    gpu, pool = on_gpu(view(DEVICE, 3, 9, 4096)), foreign(view(PINNED, 3, 20, 4096))
    pairs = torch.tensor([[7, 0], [-9, 4], [2, -(2**60)], [19, 8], [99, 99]])
    copy_blocks(pool, gpu, foreign(pairs), method="sm", count=foreign(torch.tensor(4)))
    (launch,) = lines()
    assert "v16_inline_read of" in launch and "grid 1,1,1" in launch, launch
    size = struct.calcsize(PARAMS)
    assert told(launch, "count num_pairs") == [0, 2]  # no count on the device, two pairs
    assert struct.unpack("4i", params(launch)[size : size + 16]) == (7, 0, 19, 8)
    many = torch.tensor([[7, 0]]).repeat(1_500_000, 1)  # 12 MB of int32, in two uploads
    many[-1] = torch.tensor([3, 5])
    copy_blocks(pool, gpu, foreign(many[-448:]), method="sm")
    assert "v16_inline_read of" in log()
    copy_blocks(pool, gpu, foreign(many[-449:]), method="sm")
    assert "allocate 3592\nh2d 3592 on 0\n" in log()
    copy_blocks(pool, gpu, foreign(many), method="sm")
    *uploads, launch = lines()
    assert uploads == ["allocate 12000000", "h2d 8388608 on 0", "h2d 3611392 on 0"]
    (begin,) = told(launch, "pairs")
    listed = struct.unpack("4i", ctypes.string_at(begin + 12_000_000 - 16, 16))
    assert listed == (7, 0, 3, 5)
    copy_blocks(pool, gpu, foreign(many), method="sm", count=foreign(torch.tensor(0)))
    assert log() == ""


def launched(*ends: Any, **how: Any) -> str:
    copy_blocks(*ends, **how)
    return log().splitlines()[-1]


def check_the_launch() -> None:
    """One block beside compute; by "sm" four for 4 KB pieces, more for short ones."""
    gpu, pool = on_gpu(view(DEVICE, 8, 16, 4096)), view(PINNED, 8, 16, 4096)
    pairs = on_gpu(torch.zeros(16, 2, dtype=torch.int64))
    for how, blocks in (({}, 1), ({"method": "sm"}, 4), ({"num_sms": 2}, 2)):
        line = launched(gpu, pool, pairs, **how)
        assert "v16_i64_write of" in line and f"grid {blocks},1,1 block 1024,1,1" in line, line
    line = launched(pool, gpu, pairs)
    assert "v16_i64_read of" in line and "grid 1,1,1" in line, line
    names = "dst_base src_base dst_layer_bytes dst_block_bytes src_layer_bytes src_block_bytes"
    wanted = [DEVICE.data_ptr(), PINNED.data_ptr(), 65536, 4096, 65536, 4096]
    assert told(line, names) == wanted
    names = "count num_pairs src_num_blocks dst_num_blocks num_layers row_bytes num_segments"
    assert told(line, f"{names} count_bytes flags") == [0, 16, 16, 16, 8, 4096, 8, 0, 0]
    count = on_gpu(torch.tensor([3], dtype=torch.int32))
    line = launched(pool, gpu, pairs, count=count, num_sms=10_000)
    assert "grid 4,1,1" in line and told(line, "count_bytes") == [4], (
        line
    )  # one batch for each of 128 warps
    near = on_gpu(view(DEVICE, 8, 8, 4096)), on_gpu(view(DEVICE, 8, 8, 4096, at=HALF))
    assert "v16_i64_write of" in (line := launched(*near, pairs)) and "grid 4,1,1" in line, line


if __name__ == "__main__":
    main(dict(globals()))
