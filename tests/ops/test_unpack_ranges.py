"""unpack of descriptors that reach out of their memory, just do not, or lie over each other."""

from __future__ import annotations

import pytest
import torch
from buffers import out_of_range
from test_unpack import CPU, LEAST, MOST, buffers, places, ref_unpack, rows_of, run_and_compare

from jitkern import unpack

# (one of six numbers, what it becomes, the part and how far it reaches) of 1,000 bytes to 900
OUTSIDE = [
    ({0: 990}, "src: bytes up to 1010 in descriptor 2, expected at most 1000"),
    ({0: -1}, "src: bytes from -1 on in descriptor 2, expected from 0 on"),
    ({0: LEAST}, f"src: bytes from {LEAST} on in descriptor 2, expected from 0 on"),
    ({0: MOST}, f"src: bytes up to {MOST} in descriptor 2, expected at most 1000"),
    ({0: MOST - 19}, f"src: bytes up to {MOST} in descriptor 2, expected at most 1000"),
    ({1: 881}, "dst: bytes up to 901 in descriptor 2, expected at most 900"),
    ({1: -7}, "dst: bytes from -7 on in descriptor 2, expected from 0 on"),
    ({1: MOST}, f"dst: bytes up to {MOST} in descriptor 2, expected at most 900"),
    ({2: 901}, "src: bytes up to 1001 in descriptor 2, expected at most 1000"),
    ({0: 0, 2: 901}, "dst: bytes up to 951 in descriptor 2, expected at most 900"),
    ({2: MOST}, f"src: bytes up to {MOST} in descriptor 2, expected at most 1000"),
    ({2: -1}, "descriptors[:, 2]: -1 in descriptor 2, expected 0 or more"),
    ({2: LEAST}, f"descriptors[:, 2]: {LEAST} in descriptor 2, expected 0 or more"),
]
OUTSIDE_STRIDED = [
    ({3: -1}, "descriptors[:, 3]: -1 in descriptor 2, expected 0 or more"),
    ({2: 0, 3: LEAST}, f"descriptors[:, 3]: {LEAST} in descriptor 2, expected 0 or more"),
    ({3: 10, 4: 98}, "src: bytes up to 1002 in descriptor 2, expected at most 1000"),
    ({3: 10, 4: -12}, "src: bytes from -8 on in descriptor 2, expected from 0 on"),
    ({3: 10, 5: 93}, "dst: bytes up to 907 in descriptor 2, expected at most 900"),
    ({3: 10, 5: -6}, "dst: bytes from -4 on in descriptor 2, expected from 0 on"),
    ({3: MOST, 4: 1}, f"src: bytes up to {MOST} in descriptor 2, expected at most 1000"),
    ({3: MOST, 4: MOST}, f"src: bytes up to {MOST} in descriptor 2, expected at most 1000"),
    ({3: MOST, 4: LEAST}, f"src: bytes from {100 - MOST} on in descriptor 2, expected from 0 on"),
    ({3: 2, 4: LEAST}, f"src: bytes from {100 - MOST} on in descriptor 2, expected from 0 on"),
    ({3: 2**33, 5: 2**31}, f"dst: bytes up to {MOST} in descriptor 2, expected at most 900"),
    ({3: 2**33, 5: 2**30}, f"dst: bytes up to {(2**33 - 1) * 2**30 + 70} in descriptor 2, expected"
     " at most 900"),
    ({3: 2**63 - 1, 4: 0, 5: -1}, "dst: bytes from -9223372036854775756 on in descriptor 2, "
     "expected from 0 on"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), [*OUTSIDE, *OUTSIDE_STRIDED])
def test_out_of_range(device: torch.device, change: dict[int, int], text: str) -> None:
    """On the CPU nothing is written, on a GPU all but that descriptor."""
    widths = (6,) if max(change) > 2 else (3, 6)
    for where, width in ((p, w) for p in places(device) for w in widths):
        dst, src = buffers(device, 1000, 900)
        rows = [[0, 0, 50], [10, 880, 20], [100, 50, 20], [7, 200, 600]]
        descriptors = rows_of(rows, CPU, width)
        for column, value in change.items():
            descriptors[2, column] = value
        descriptors = descriptors.to(where)
        twin = dst.twin()
        with out_of_range(where, f"unpack: {text}"):
            unpack(dst.view, src.view, descriptors)
        if where.type == "cuda":
            ref_unpack(twin.view, src.view, descriptors[[0, 1, 3]])
        elif device.type == "cuda":
            torch.cuda.synchronize()
        assert dst.same(twin)


def test_the_very_last_bytes(device: torch.device) -> None:
    """What reaches to the ends is right."""
    dst, src = buffers(device, 1000, 900, src_offset=3, dst_offset=5)
    rows = [(999, 899, 1), (0, 0, 5), (998, 7, 2), (900, 100, 100)]
    run_and_compare(dst, src, rows_of(rows, device))
    for row in ((990, 8, 10, 10, -110, 98), (0, 899, 1, 9, 124, -100)):
        run_and_compare(dst, src, rows_of([row], device, 6))


@pytest.mark.parametrize("stride", [0, 1, 5, -3])
def test_overlapping_pieces_stay_in_their_places(device: torch.device, stride: int) -> None:
    """What they leave there is undefined, what lies around is not."""
    dst, src = buffers(device, 2000, 2000)
    twin = dst.twin()
    begin, end = (500, 500 + 20 + 99 * stride) if stride >= 0 else (500 + 99 * stride, 520)
    unpack(dst.view, src.view, rows_of([(3, 500, 20, 100, 7, stride)], device, 6))
    for buffer in (dst, twin):
        buffer.view[begin:end] = 0
    assert dst.same(twin)
