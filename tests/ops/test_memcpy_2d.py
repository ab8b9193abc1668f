"""memcpy_2d_async against a loop over rows, with every byte around them accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from buffers import random_bytes
from hypothesis import given
from hypothesis import strategies as st
from mistakes import Mistake, not_ints, not_tensors, read_only
from torch import Tensor

from jitkern import memcpy_2d_async


@dataclass(frozen=True)
class Sides:
    """A direction that a device has: where the memory of each side lies."""

    kind: str
    dst: torch.device
    src: torch.device

    def memory(self, side: str, num_bytes: int, seed: int) -> Tensor:
        where = self.dst if side == "dst" else self.src
        made = random_bytes(num_bytes, seed)
        if where.type == "cuda":
            return made.to(where)
        return made.pin_memory() if self.kind != "h2h" else made

    def finish(self) -> None:
        if self.kind != "h2h":
            torch.cuda.synchronize()


def all_sides(device: torch.device) -> list[Sides]:
    cpu = torch.device("cpu")
    if device.type == "cpu":
        return [Sides("h2h", cpu, cpu)]
    return [Sides("h2d", device, cpu), Sides("d2h", cpu, device), Sides("d2d", device, device)]


def ref_memcpy_2d(
    dst: Tensor, src: Tensor, dpitch: int, spitch: int, width: int, height: int
) -> None:
    """The rows one by one; both are flat bytes from the first that is copied on."""
    for i in range(height):
        row = src[i * spitch : i * spitch + width]
        dst[i * dpitch : i * dpitch + width] = row.to(dst.device)


def run_and_compare(
    sides: Sides, dpitch: int, spitch: int, width: int, height: int, offsets: tuple[int, int]
) -> None:
    span = max(height - 1, 0)
    dst = sides.memory("dst", offsets[0] + span * dpitch + width + 64, seed=1)
    src = sides.memory("src", offsets[1] + span * spitch + width + 64, seed=2)
    expected, unchanged = dst.clone(), src.clone()
    to, source = dst[offsets[0] :], src[offsets[1] :]
    assert memcpy_2d_async(to, source, dpitch, spitch, width, height, sides.kind) is None
    sides.finish()
    ref_memcpy_2d(expected[offsets[0] :], src[offsets[1] :], dpitch, spitch, width, height)
    assert torch.equal(dst, expected)
    assert torch.equal(src, unchanged)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 3), (64, 16)], ids=str)
@pytest.mark.parametrize("height", [0, 1, 2, 33])
@pytest.mark.parametrize("gaps", [(0, 0), (0, 5), (7, 0), (48, 112)], ids=str)
@pytest.mark.parametrize("width", [0, 1, 3, 16, 656, 4104])
def test_widths_pitches_and_offsets(
    device: torch.device, width: int, gaps: tuple[int, int], height: int, offsets: tuple[int, int]
) -> None:
    for sides in all_sides(device):
        run_and_compare(sides, width + gaps[0], width + gaps[1], width, height, offsets)


@pytest.mark.parametrize(
    ("width", "height", "gap"),
    [(1 << 20, 9, 64), (3_000_001, 3, 1), (20_000_003, 1, 0), (4096, 4000, 0), (100, 70_000, 28)],
)
def test_megabytes(device: torch.device, width: int, height: int, gap: int) -> None:
    """By several threads on the CPU: rows that are shared out, and rows that are cut."""
    for sides in all_sides(device):
        run_and_compare(sides, width, width + gap, width, height, (0, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_one_block_of_every_layer(device: torch.device, dtype: torch.dtype) -> None:
    """A strided view says where to begin; no other block is touched."""
    for sides in all_sides(device):
        layers, blocks, item = 4, 6, 2 * 24 * dtype.itemsize
        dst = sides.memory("dst", layers * blocks * item, 1).view(dtype).view(layers, blocks, 2, 24)
        src = sides.memory("src", layers * item, 2).view(dtype).view(layers, 2, 24)
        expected = dst.clone()
        expected[:, 5] = src.to(dst.device)
        memcpy_2d_async(dst[:, 5], src, blocks * item, item, item, layers, sides.kind)
        sides.finish()
        assert torch.equal(dst.view(torch.uint8), expected.view(torch.uint8))


def test_rows_beyond_the_view_but_within_the_storage(device: torch.device) -> None:
    """`cache[0, b]` is where a block begins in its first layer."""
    for sides in all_sides(device):
        pool = sides.memory("src", 4 * 6 * 16, 2).view(4, 6, 16)
        got = sides.memory("dst", 4 * 16, 1).view(4, 16)
        memcpy_2d_async(got[:1, :1], pool[0, 5], 16, 6 * 16, 16, 4, sides.kind)
        sides.finish()
        assert torch.equal(got.cpu(), pool[:, 5].cpu())
        with pytest.raises(ValueError, match=r"src: 5 rows of 16 bytes, 96 bytes apart, which end"):
            memcpy_2d_async(torch.cat([got, got]), pool[0, 5], 16, 96, 16, 5, sides.kind)


# -- reach and overlap, against sets of bytes ------------------------------------------------------


def bytes_of(begin: int, pitch: int, width: int, height: int) -> set[int]:
    return {begin + i * pitch + j for i in range(height) for j in range(width)}


@given(data=st.data())
def test_any_call_within_one_storage(data: st.DataObject) -> None:
    draw = data.draw
    num_bytes = draw(st.integers(1, 60))
    memory = random_bytes(num_bytes, draw(st.integers(0, 9)))
    width, height = draw(st.integers(0, 8)), draw(st.integers(0, 6))
    begins = [draw(st.integers(0, num_bytes - 1)) for _ in range(2)]
    pitches = [draw(st.integers(0, 14)) for _ in range(2)]
    views = [memory[begin : begin + draw(st.integers(1, 40))] for begin in begins]
    touched = [
        bytes_of(begin, pitch, width, height) for begin, pitch in zip(begins, pitches, strict=True)
    ]
    if height > 1 and min(pitches) < width:
        expected = f"{'ds'[pitches[0] >= width]}pitch: "
    elif max(touched[0] | {0}) >= num_bytes:
        expected = "dst: "
    elif max(touched[1] | {0}) >= num_bytes:
        expected = "src: "
    else:
        expected = "dst: overlaps src" if touched[0] & touched[1] else ""
    before = memory.clone()
    arguments = (*views, *pitches, width, height, "h2h")
    if expected:
        with pytest.raises(ValueError, match=f"^memcpy_2d_async: {expected}"):
            memcpy_2d_async(*arguments)
    else:
        memcpy_2d_async(*arguments)
        source = before[begins[1] :]
        ref_memcpy_2d(before[begins[0] :], source.clone(), *pitches, width, height)
    assert torch.equal(memory, before)


# -- what PyTorch is told --------------------------------------------------------------------------


def test_a_tracer_is_refused() -> None:
    """It would record a graph without the copy."""
    from torch.fx.experimental.proxy_tensor import make_fx

    good = good_arguments()
    with pytest.raises(RuntimeError, match=r"^memcpy_2d_async: dst: .*tracer or a dispatch mode"):
        make_fx(lambda x: memcpy_2d_async(**good) or x + 1)(torch.ones(1))
    assert good["dst"].eq(0).all()


# -- for the tests that go over all ops ------------------------------------------------------------


def good_arguments() -> dict[str, Any]:
    return {
        "dst": torch.zeros(3, 8),
        "src": torch.ones(3, 8),
        "dpitch": 32,
        "spitch": 32,
        "width": 32,
        "height": 3,
        "kind": "h2h",
        "stream": None,
        "allow_pageable": False,
    }


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = not_tensors(good, "dst", "src") + read_only(good, "dst", "src")
    table += not_ints("dpitch", "spitch", "width", "height")
    for name in ("dpitch", "spitch", "width", "height"):
        table.append(({name: -1}, ValueError, f"{name}: -1, expected at least 0"))
    kinds = '"h2d", "d2h", "d2d" or "h2h"'
    memory = torch.zeros(40)

    def beyond(name: str, rows: int, width: int, pitch: int, end: int) -> str:
        return (
            f"{name}: {rows} rows of {width} bytes, {pitch} bytes apart, which end {end} bytes "
            "behind its first, expected at most 96, where its storage ends"
        )

    table += [
        ({"dpitch": 31}, ValueError, "dpitch: 31, expected at least 32, the width of its 3 rows"),
        ({"spitch": 0}, ValueError, "spitch: 0, expected at least 32, the width of its 3 rows"),
        ({"dpitch": 33}, ValueError, beyond("dst", 3, 32, 33, 98)),
        ({"spitch": 33}, ValueError, beyond("src", 3, 32, 33, 98)),
        ({"height": 4}, ValueError, beyond("dst", 4, 32, 32, 128)),
        ({"height": 1, "width": 97}, ValueError, beyond("dst", 1, 97, 97, 97)),
        ({"height": 2**62}, ValueError, beyond("dst", 2**62, 32, 32, 2**63 - 1)),
        ({"spitch": 2**62}, ValueError, beyond("src", 3, 32, 2**62, 2**63 - 1)),
        ({"dst": torch.zeros(24)[4:]}, ValueError,
         beyond("dst", 3, 32, 32, 96).replace("most 96", "most 80")),
        ({"dst": memory[:0]}, ValueError,
         beyond("dst", 3, 32, 32, 96).replace("most 96", "most 0")),
        ({"dst": memory[:24], "src": memory[16:]}, ValueError,
         "dst: overlaps src, expected memory of its own"),
        ({"kind": "h2d"}, ValueError, 'kind: "h2d" from cpu to cpu, expected "h2h"'),
        ({"kind": "d2d"}, ValueError, 'kind: "d2d" from cpu to cpu, expected "h2h"'),
        ({"kind": "H2H"}, ValueError, f'kind: "H2H", expected {kinds}'),
        ({"kind": ""}, ValueError, f'kind: "", expected {kinds}'),
        ({"kind": torch.ones(2, device="meta")}, TypeError, f"kind: Tensor, expected {kinds}"),
        ({"kind": 3}, TypeError, f"kind: int, expected {kinds}"),
        ({"kind": None}, TypeError, f"kind: None, expected {kinds}"),
        ({"kind": ["h2h"]}, TypeError, f"kind: list, expected {kinds}"),
        ({"stream": 0}, TypeError, "stream: int, expected a torch.cuda.Stream or None"),
        ({"stream": "default"}, TypeError, "stream: str, expected a torch.cuda.Stream or None"),
        ({"allow_pageable": 1}, TypeError, "allow_pageable: int, expected a bool"),
        ({"allow_pageable": None}, TypeError, "allow_pageable: None, expected a bool"),
    ]  # fmt: skip
    return table
