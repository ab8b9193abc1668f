"""memcpy_2d_async against a loop over rows, with every byte around them accounted for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from buffers import random_bytes, synchronize
from hypothesis import given
from hypothesis import strategies as st
from mistakes import Mistake, not_ints, not_tensors, not_words, overlap_text, read_only
from torch import Tensor

from jitkern import fast_compare_key, memcpy_2d_async
from jitkern.offload import PinnedPool

CPU = torch.device("cpu")
Sides = tuple[str, torch.device, torch.device]  # a direction, and where dst and src lie


def all_sides(device: torch.device) -> list[Sides]:
    if device.type == "cpu":
        return [("h2h", CPU, CPU)]
    return [("h2d", device, CPU), ("d2h", CPU, device), ("d2d", device, device)]


def memory(sides: Sides, side: str, num_bytes: int, seed: int) -> Tensor:
    kind, *where = sides
    made = random_bytes(num_bytes, seed).to(where[side == "src"])
    return made if kind == "h2h" or made.is_cuda else made.pin_memory()


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
    dst = memory(sides, "dst", offsets[0] + span * dpitch + width + 64, seed=1)
    src = memory(sides, "src", offsets[1] + span * spitch + width + 64, seed=2)
    expected, unchanged = dst.clone(), src.clone()
    to, source = dst[offsets[0] :], src[offsets[1] :]
    assert memcpy_2d_async(to, source, dpitch, spitch, width, height, sides[0]) is None
    synchronize(dst.device if dst.is_cuda else src.device)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_one_block_of_every_layer(device: torch.device, dtype: torch.dtype) -> None:
    """A view says where to begin; rows may lie beyond it, as far as its storage goes."""
    for sides in all_sides(device):
        layers, blocks, item = 4, 6, 2 * 24 * dtype.itemsize
        dst = (
            memory(sides, "dst", layers * blocks * item, 1).view(dtype).view(layers, blocks, 2, 24)
        )
        src = memory(sides, "src", layers * item, 2).view(dtype).view(layers, 2, 24)
        expected = dst.clone()
        expected[:, 5] = src.to(dst.device)
        for block in (dst[:, 5], dst[0, 5]):
            dst[:, 5] = 0
            memcpy_2d_async(block, src[:1, :1], blocks * item, item, item, layers, sides[0])
            synchronize(dst.device if dst.is_cuda else src.device)
            assert torch.equal(dst.view(torch.uint8), expected.view(torch.uint8))


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


@pytest.mark.parametrize("op", ["memcpy_2d_async", "fast_compare_key"])
def test_a_graph_of_torch_compile_names_the_op(op: str) -> None:
    good, keys = good_arguments(), (torch.arange(3), torch.arange(5))

    def step() -> Any:
        return memcpy_2d_async(**good) if op == "memcpy_2d_async" else fast_compare_key(*keys)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{op}: no operator of PyTorch"):
        torch.compile(step, backend="eager", fullgraph=True)()
    assert good["dst"].eq(0).all()
    torch.compile(step, backend="eager")()
    assert good["dst"].eq(1).all() == (op == "memcpy_2d_async")


def test_a_tracer_is_refused() -> None:
    """It would record a graph without the copy."""
    from torch.fx.experimental.proxy_tensor import make_fx

    good = good_arguments()
    with pytest.raises(RuntimeError, match=r"^memcpy_2d_async: cannot run inside"):
        make_fx(lambda x: memcpy_2d_async(**good) or x + 1)(torch.ones(1))
    assert good["dst"].eq(0).all()


@pytest.mark.cuda
def test_streams() -> None:
    """The current stream by default, or an argument; no other device's."""
    pool = torch.randint(0, 256, (64, 1 << 16), dtype=torch.uint8).pin_memory()
    got = torch.zeros(64, 1 << 12, dtype=torch.uint8, device="cuda")
    copy = (1 << 12, 1 << 16, 1 << 12, 64, "h2d")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    memcpy_2d_async(got, pool, *copy, side)
    side.synchronize()
    assert torch.equal(got.cpu(), pool[:, : 1 << 12])
    got.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        memcpy_2d_async(got, pool, *copy)
        twin = got.clone()
    side.synchronize()
    assert torch.equal(twin.cpu(), pool[:, : 1 << 12])
    cpu = torch.zeros(64, 1 << 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match="stream: a stream of cuda:0, expected None"):
        memcpy_2d_async(cpu, pool, *copy[:4], "h2h", side)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["h2d", "d2h", "d2d"])
def test_in_a_cuda_graph(kind: str) -> None:
    sides = next(one for one in all_sides(torch.device("cuda")) if one[0] == kind)
    src, dst = memory(sides, "src", 40 * 700, 1), memory(sides, "dst", 40 * 656, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memcpy_2d_async(dst, src, 656, 700, 656, 40, kind)
        memcpy_2d_async(dst[100:], src, 656, 656, 1, 1, kind)
    for seed in (3, 4):
        src.copy_(random_bytes(len(src), seed))
        graph.replay()
        torch.cuda.synchronize()
        expected = src.view(40, 700)[:, :656].cpu().reshape(-1)
        expected[100] = src[0]
        assert torch.equal(dst.cpu(), expected)


@pytest.mark.multigpu
def test_between_two_gpus() -> None:
    src = random_bytes(40 * 700).to("cuda:0")
    dst = torch.zeros(40 * 656, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    for stream in (None, torch.cuda.Stream(0), torch.cuda.Stream(1)):
        dst.zero_()
        torch.cuda.synchronize(1)
        memcpy_2d_async(dst, src, 656, 700, 656, 40, "d2d", stream)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert torch.equal(dst.cpu().view(40, 656), src.cpu().view(40, 700)[:, :656])
    pinned = random_bytes(64).pin_memory()
    with pytest.raises(ValueError, match="stream: a stream of cuda:0, expected one of cuda:1"):
        memcpy_2d_async(dst, pinned, 8, 8, 8, 8, "h2d", torch.cuda.Stream(0))


@pytest.mark.cuda
def test_a_pool_and_a_pitch_of_more_than_2_gib() -> None:
    with PinnedPool(5 << 30) as pool:
        rows = pool.tensor((5 << 30,), torch.uint8)
        pitch = (2 << 30) + 4096
        for row in range(2):
            rows[row * pitch : row * pitch + 100] = row + 1
        got = torch.zeros(2, 100, dtype=torch.uint8, device="cuda")
        memcpy_2d_async(got, rows, 100, pitch, 100, 2, "h2d")
        torch.cuda.synchronize()
        assert got[0].eq(1).all() and got[1].eq(2).all()


def good_arguments() -> dict[str, Any]:
    sizes = {"dpitch": 32, "spitch": 32, "width": 32, "height": 3}
    how = {"kind": "h2h", "stream": None}
    return {"dst": torch.zeros(3, 8), "src": torch.ones(3, 8), **sizes, **how}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = not_tensors(good, "dst", "src") + read_only(good, "dst", "src")
    numbers = ("dpitch", "spitch", "width", "height")
    table += not_ints(*numbers)
    table += [({name: -1}, ValueError, f"{name}: -1, expected at least 0") for name in numbers]
    kinds = "'h2d', 'd2h', 'd2d' or 'h2h'"
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
         overlap_text("dst", "src")),
        ({"kind": "h2d"}, ValueError, "kind: 'h2d' from cpu to cpu, expected 'h2h'"),
        ({"kind": "d2d"}, ValueError, "kind: 'd2d' from cpu to cpu, expected 'h2h'"),
        *not_words("kind", kinds, "H2H", optional=True),
        *(({"stream": value}, TypeError,
           f"stream: {type(value).__name__}, expected a torch.cuda.Stream or None")
          for value in (0, "default")),
    ]  # fmt: skip
    return table
