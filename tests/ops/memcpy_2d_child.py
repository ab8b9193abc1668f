"""What memcpy_2d_async has a driver do, that of fake_driver.c; run by test_fake_driver.py."""

from __future__ import annotations

import torch
from fake_copies import DEVICE, HALF, PAGEABLE, PINNED, main, on_gpu
from launch_fake import log, refused

from jitkern import memcpy_2d_async


def rows(
    memory_: torch.Tensor, pitch: int, width: int, height: int, begin: int = 0
) -> torch.Tensor:
    return memory_[begin:].as_strided((height, width), (pitch, 1))


def check_each_kind_is_one_strided_copy() -> None:
    there, back = rows(DEVICE, 100, 16, 4), rows(PINNED, 40, 16, 4, 2000)
    twin, source = rows(DEVICE, 60, 16, 4, 1000), rows(PINNED, 160, 16, 4)
    for dst, src, dpitch, spitch, kind in (
        (there, source, 100, 160, "h2d"),
        (back, there, 40, 100, "d2h"),
        (twin, there, 60, 100, "d2d"),
    ):
        ends = (dst if dst is back else on_gpu(dst)), (src if src is source else on_gpu(src))
        memcpy_2d_async(*ends, dpitch, spitch, 16, 4, kind)
        assert log() == f"copy 4 x 16, pitches {dpitch} {spitch}, types 4 4, on 0\n"
        assert torch.equal(dst, src)
    assert DEVICE[16:100].eq(0).all()


def check_what_is_one_piece_is_no_strided_copy() -> None:
    whole = on_gpu(DEVICE)
    memcpy_2d_async(whole, PINNED, 16, 16, 16, 4, "h2d")
    assert log() == "h2d 64 on 0\n"
    memcpy_2d_async(PINNED, whole, 5, 0, 16, 1, "d2h")  # one row has no pitch
    assert log() == "d2h 16 on 0\n"
    memcpy_2d_async(whole, on_gpu(DEVICE[1024:]), 16, 16, 16, 4, "d2d")
    assert log() == "copy 64 on 0\n"
    for width, height in ((0, 4), (16, 0)):
        memcpy_2d_async(whole, PINNED, 16, 16, width, height, "h2d")
    assert log() == ""


def check_pageable_memory() -> None:
    whole, copy = on_gpu(DEVICE), (16, 160, 16, 4)
    text = r"memcpy_2d_async: src: pageable host memory, expected pinned .*"
    refused(ValueError, text, memcpy_2d_async, whole, PAGEABLE, *copy, "h2d")
    refused(ValueError, text.replace("src", "dst"), memcpy_2d_async, PAGEABLE, whole, *copy, "d2h")


def check_no_copy_spans_two_registrations() -> None:
    """Then rows go one by one; one that lies in both in two parts."""
    source = rows(PINNED, 100, 64, 6, HALF - 250)  # the third row crosses
    memcpy_2d_async(on_gpu(DEVICE), source, 80, 100, 64, 6, "h2d")
    sizes = (64, 64, 50, 14, 64, 64, 64)
    assert log().splitlines() == [f"h2d {size} on 0" for size in sizes]
    assert torch.equal(rows(DEVICE, 80, 64, 6), source)
    memcpy_2d_async(source, on_gpu(DEVICE), 100, 80, 64, 6, "d2h")
    assert log().splitlines() == [f"d2h {size} on 0" for size in sizes]
    memcpy_2d_async(on_gpu(DEVICE), PINNED[HALF - 1024 :], 512, 512, 512, 4, "h2d")  # one piece
    assert log().splitlines() == ["h2d 1024 on 0", "h2d 1024 on 0"]
    assert torch.equal(DEVICE[:2048], PINNED[HALF - 1024 : HALF + 1024])


def narrow_pitches_beyond_the_limit_go_row_by_row() -> None:
    """The largest pitch is 256 here."""
    memcpy_2d_async(on_gpu(DEVICE), PINNED, 256, 200, 16, 3, "h2d")
    assert log() == "copy 3 x 16, pitches 256 200, types 4 4, on 0\n"
    for dpitch, spitch in ((257, 16), (16, 257)):
        memcpy_2d_async(on_gpu(DEVICE), PINNED, dpitch, spitch, 16, 3, "h2d")
        assert log() == 3 * "h2d 16 on 0\n"
        assert torch.equal(rows(DEVICE, dpitch, 16, 3), rows(PINNED, spitch, 16, 3))
    memcpy_2d_async(on_gpu(DEVICE), PINNED, 300, 300, 300, 3, "h2d")
    assert log() == "h2d 900 on 0\n"


if __name__ == "__main__":
    main(dict(globals()))
