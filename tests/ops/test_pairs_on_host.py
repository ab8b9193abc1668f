"""h2d_gather and d2h_scatter of pairs on the CPU, whose rows are on a GPU: every way they can take.

On CPU tensors a way is checked and changes nothing. When rows are read and written on a GPU, and
what is refused there, is in test_pairs_on_host_cuda.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tvm_ffi
from buffers import INT_DTYPES, Buffer, make_buffer
from fuzzer import NUM_CORES
from ref import ref_h2d_gather
from test_aliases import Backwards
from torch import Tensor

import jitkern
from jitkern import d2h_scatter, h2d_gather
from jitkern.offload import PinnedPool

GATHERS = ["auto", "sm", "cpu", "both"]
SCATTERS = ["auto", "sm", "cpu"]
ROW_BYTES = [1, 3, 8, 256, 656, 657, 4096, 40_000]

each_gather = pytest.mark.parametrize("method", GATHERS)
each_index = pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
each_call = pytest.mark.parametrize(
    ("op", "method"),
    [*((h2d_gather, m) for m in GATHERS), *((d2h_scatter, m) for m in SCATTERS)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)


def pairs_of(
    count: int, sources: int, targets: int, dtype: torch.dtype = torch.int64, *, seed: int = 0
) -> Tensor:
    """Random pairs of distinct destinations, some sources repeated, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.empty(count, 2, dtype=dtype)
    pairs[:, 0] = torch.randint(0, sources, (count,), generator=generator)
    pairs[:, 1] = torch.randperm(targets, generator=generator)[:count]
    pairs[3::7, 0] = -1
    pairs[5::11, 1] = -(2**31)
    pairs[9::13] = torch.tensor([sources + 5, -1])  # padding counts before the bound
    return pairs


def host_memories(device: torch.device, method: str) -> list[bool]:
    """Whether the host's rows are pinned: on a GPU both, where the way allows it."""
    if device.type == "cpu":
        return [False]
    return [True, False] if method in ("auto", "cpu") else [True]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def move(op: Any, src: Buffer, dst: Buffer, pairs: Tensor, method: str) -> None:
    """Gather or scatter, and compare every byte around the rows."""
    src_twin, dst_twin, before = src.twin(), dst.twin(), pairs.clone()
    assert op(src.view, dst.view, pairs, method=method) is None
    if op is d2h_scatter and method != "cpu":  # what the CPU scatters is there by now
        synchronize(src.view.device)
    ref_h2d_gather(src_twin.view, dst_twin.view, pairs)
    assert dst.same(dst_twin)
    assert src.same(src_twin)
    assert torch.equal(pairs, before)


# Bytes between the host's rows and those of the GPU, and where the first ones begin.
PLACES = [(0, 0, 0), (16, 32, 0), (3, 5, 1)]


@each_index
@each_call
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_row_sizes(
    device: torch.device, row_bytes: int, op: Any, method: str, index_dtype: torch.dtype
) -> None:
    pairs = pairs_of(61, 43, 97, index_dtype)
    for pinned in host_memories(device, method):
        for host_gap, gpu_gap, offset in PLACES:
            of_host = {"gap": host_gap, "offset": offset, "pinned": pinned}
            of_gpu = {"gap": gpu_gap, "offset": 3 * offset, "device": device}
            of_src, of_dst = (of_host, of_gpu) if op is h2d_gather else (of_gpu, of_host)
            src = make_buffer((43, row_bytes), **of_src)
            move(op, src, make_buffer((97, row_bytes), seed=1, **of_dst), pairs, method)


@each_call
def test_rows_that_lie_backwards(device: torch.device, op: Any, method: str) -> None:
    pairs = pairs_of(900, 1000, 1000)
    for pinned in host_memories(device, method):
        host = make_buffer((1000, 40), gap=9, pinned=pinned)
        gpu = make_buffer((1000, 40), device=device, seed=1)
        host_twin, gpu_twin = host.twin(), gpu.twin()
        backwards = tvm_ffi.from_dlpack(Backwards(host.view))
        flipped = host_twin.view.flip(0)
        if op is h2d_gather:
            h2d_gather(backwards, gpu.view, pairs, method=method)
            ref_h2d_gather(flipped, gpu_twin.view, pairs)
        else:
            d2h_scatter(gpu.view, backwards, pairs, method=method)
            ref_h2d_gather(gpu_twin.view, flipped, pairs)
            host_twin.view.copy_(flipped.flip(0))
        synchronize(device)
        assert gpu.same(gpu_twin)
        assert host.same(host_twin)


def calls(device: torch.device, op: Any, method: str) -> Iterator[Callable[[Tensor], None]]:
    """The op on rows of 40 bytes, with each kind of memory."""
    for pinned in host_memories(device, method):
        host = make_buffer((97, 40), pinned=pinned)
        gpu = make_buffer((97, 40), device=device, seed=1)
        src, dst = (host, gpu) if op is h2d_gather else (gpu, host)
        yield lambda pairs, a=src, b=dst: move(op, a, b, pairs, method)  # type: ignore[misc]


@each_call
def test_shapes_of_pairs(device: torch.device, op: Any, method: str) -> None:
    """None among them, in four shapes, and nothing but padding."""
    pairs = pairs_of(60, 97, 97)
    for call in calls(device, op, method):
        for shape in ((0, 2), (3, 0, 2), (2,), (1, 2), (5, 12, 2), (60, 1, 2)):
            call(pairs[: torch.Size(shape).numel() // 2].reshape(shape))
        for dtype in INT_DTYPES:
            call(torch.full((70_000, 2), -1, dtype=dtype))


@each_call
def test_no_rows_and_rows_of_no_bytes(device: torch.device, op: Any, method: str) -> None:
    none = torch.full((4, 2), -1)
    for src, dst in (((0, 8), (9, 8)), ((9, 8), (0, 8)), ((9, 0), (9, 0)), ((0, 8), (0, 8))):
        ends = [torch.zeros(src), torch.zeros(dst)]
        of_gpu = 1 if op is h2d_gather else 0
        ends[of_gpu] = ends[of_gpu].to(device)
        if device.type == "cuda" and method in ("sm", "both"):
            ends[1 - of_gpu] = ends[1 - of_gpu].pin_memory()
        op(*ends, none, method=method)
        synchronize(device)
        assert not ends[1].any()


@each_gather
@pytest.mark.parametrize("map_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("row_bytes", [1, 656, 40_000])
def test_slot_map(
    device: torch.device, row_bytes: int, map_dtype: torch.dtype, method: str
) -> None:
    """Of distinct rows, so that there is one answer; entries of the others keep their value."""
    num_rows = 20_000 if row_bytes == 1 else 700
    pairs = pairs_of(num_rows, num_rows, num_rows, torch.int32)
    pairs[:, 0] = torch.where(pairs[:, 0] < 0, -1, torch.randperm(num_rows, dtype=torch.int32))
    for pinned in host_memories(device, method):
        src = make_buffer((num_rows, row_bytes), gap=1, pinned=pinned)
        dst = make_buffer((num_rows, row_bytes), device=device, seed=1, gap=2)
        slot_map = make_buffer((num_rows,), map_dtype, device, seed=2)
        dst_twin, map_twin = dst.twin(), slot_map.twin()
        h2d_gather(src.view, dst.view, pairs, slot_map=slot_map.view, method=method)
        ref_h2d_gather(src.view, dst_twin.view, pairs, map_twin.view)
        assert dst.same(dst_twin)
        assert slot_map.same(map_twin)


@each_gather
@pytest.mark.parametrize("dedup", [True, False])
def test_repeated_sources(device: torch.device, dedup: bool, method: str) -> None:
    """26 MB, each row eight times: more than the chunks hold, and enough to look for repeats."""
    count, num_src = 40_000, 5_000
    src = make_buffer((num_src, 656), gap=16, pinned=device.type == "cuda")
    dst = make_buffer((count + 9, 656), device=device, seed=1)
    slot_map = make_buffer((num_src,), torch.int32, device, seed=2)
    slot_map.view.fill_(-1)
    pairs = pairs_of(count, num_src - 7, count + 9, torch.int32)
    dst_twin, map_twin = dst.twin(), slot_map.twin()
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map.view, dedup=dedup, method=method)
    ref_h2d_gather(src.view, dst_twin.view, pairs)
    assert dst.same(dst_twin)
    asked = pairs[(pairs >= 0).all(dim=1), 0].long().unique()
    found = slot_map.view.cpu().long()
    assert torch.equal((found >= 0).nonzero().flatten(), asked)
    assert torch.equal(dst.view[found[asked].to(device)].cpu(), src.view[asked])
    map_twin.view.copy_(slot_map.view)
    assert slot_map.same(map_twin)  # and nothing around it


@pytest.mark.parametrize("map_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("count", [300, 40_000])
@pytest.mark.parametrize("method", ["auto", "sm"])
def test_resident_rows(
    device: torch.device, method: str, count: int, map_dtype: torch.dtype
) -> None:
    """They come from the destination: their copies in the source are others."""
    src = make_buffer((1000, 24), pinned=device.type == "cuda")
    dst = make_buffer((count + 1000, 24), device=device, seed=1)
    slot_map = torch.full((1000,), -1, dtype=map_dtype)
    slot_map[::3] = torch.arange(count, count + 334, dtype=map_dtype)
    slot_map = slot_map.to(device)
    pairs = pairs_of(count, 1000, count, torch.int64)
    twin = dst.twin()
    known = src.view.clone()
    known[::3] = dst.view[count : count + 334].cpu()
    h2d_gather(src.view, dst.view, pairs, slot_map=slot_map, reuse_resident=True, method=method)
    ref_h2d_gather(known, twin.view, pairs)
    assert dst.same(twin)


@each_call
def test_rows_of_a_pool(device: torch.device, op: Any, method: str) -> None:
    """On a GPU it is pinned, but not by PyTorch."""
    pairs = pairs_of(800, 1000, 1000)
    with PinnedPool(1000 * 656 + 4096) as pool:
        pool.tensor(1000)  # rows do not begin where the pool does
        host = pool.tensor([1000, 656], torch.uint8).random_()
        gpu = make_buffer((1000, 656), device=device, seed=1)
        gpu_twin, expected = gpu.twin(), host.clone()
        if op is h2d_gather:
            h2d_gather(host, gpu.view, pairs, method=method)
            ref_h2d_gather(host, gpu_twin.view, pairs)
        else:
            d2h_scatter(gpu.view, host, pairs, method=method)
            ref_h2d_gather(gpu.view, expected, pairs)
        synchronize(device)
        assert gpu.same(gpu_twin)
        assert torch.equal(host, expected)


@each_call
@each_index
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("count", [37, 60_000])
def test_out_of_range_at_once(
    device: torch.device, count: int, column: int, index_dtype: torch.dtype, op: Any, method: str
) -> None:
    """IndexError from the call itself: nothing is written, and no later call hears of it."""
    pairs = pairs_of(count, 70_000, 65_000, index_dtype)
    bound = (70_000, 65_000)[column]
    value = 2**31 - 1 if index_dtype == torch.int32 else 2**40
    pairs[count - 5] = 1
    pairs[count - 5, column] = bound
    pairs[count - 4] = 1
    pairs[count - 4, column] = value
    for pinned in host_memories(device, method):
        of_host = {"device": "cpu", "pinned": pinned}
        where = [of_host, {"device": device}] if op is h2d_gather else [{"device": device}, of_host]
        src = make_buffer((70_000, 24), **where[0])
        dst = make_buffer((65_000, 24), seed=1, **where[1])
        slot_map = make_buffer((70_000,), torch.int64, device, seed=2)
        dst_twin, map_twin = dst.twin(), slot_map.twin()
        how = {"slot_map": slot_map.view} if op is h2d_gather else {}
        text = (
            f"{op.__name__}: pairs[..., {column}]: index {bound} at position {count - 5}, expected "
            f"below {bound}; nothing was written"
        )
        with pytest.raises(IndexError, match=f"^{re.escape(text)}$"):
            op(src.view, dst.view, pairs, method=method, **how)
        synchronize(device)
        jitkern.check(device)
        assert dst.same(dst_twin)
        assert slot_map.same(map_twin)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("method", ["auto", "cpu"])
def test_compiled(device: torch.device, method: str, backend: str) -> None:
    """In one graph with what makes its source and reads its result."""

    def step(host: Tensor, gpu: Tensor, pairs: Tensor, back: Tensor) -> Tensor:
        h2d_gather(host + 1, gpu, pairs, method=method, num_threads=1)
        d2h_scatter(gpu * 2, host, back, method=method)
        return gpu + 1

    torch.compiler.reset()
    host, gpu = torch.randn(50, 8), torch.randn(40, 8, device=device)
    pairs, back = pairs_of(30, 50, 40), pairs_of(30, 40, 50, seed=1)
    wanted_host, wanted = host.clone(), gpu.clone()
    ref_h2d_gather(host + 1, wanted, pairs)
    ref_h2d_gather(wanted * 2, wanted_host, back)
    result = torch.compile(step, fullgraph=True, backend=backend)(host, gpu, pairs, back)
    assert torch.equal(result, wanted + 1)
    assert torch.equal(gpu, wanted)
    assert torch.equal(host, wanted_host)


@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_the_operator_of_pytorch(device: torch.device, op: Any) -> None:
    """Its way is said by name, and by default that of the function."""
    import jitkern.torch_ops  # noqa: F401 - nothing has called an op yet

    operator = getattr(torch.ops.jitkern, op.__name__).default
    defaults = {argument.name: argument.default_value for argument in operator._schema.arguments}
    assert (defaults["method"], defaults["num_threads"]) == ("auto", None)
    ends = [torch.randn(50, 8), torch.randn(40, 8)]
    of_gpu = 1 if op is h2d_gather else 0
    ends[of_gpu] = ends[of_gpu].to(device)
    pairs, wanted = pairs_of(30, 50, 40), ends[1].clone()
    ref_h2d_gather(ends[0], wanted, pairs)
    operator(*ends, pairs, method="cpu", num_threads=1)
    assert torch.equal(ends[1], wanted)
    with pytest.raises(ValueError, match=f'^{op.__name__}: method: "tpu", expected "auto", "sm"'):
        operator(*ends, pairs, method="tpu")
    with pytest.raises(ValueError, match=f"^{op.__name__}: num_threads: 0, expected 1 to "):
        operator(*ends, pairs, num_threads=0)


# -- several chunks of rows, several blocks of pairs -----------------------------------------------


CHUNK_BYTES = 4 << 20  # of which six are on their way
BLOCK_PAIRS = 512 << 10  # that are copied at a time


@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_many_chunks(device: torch.device, op: Any) -> None:
    """60 MB through six chunks of 4, whatever the way and the number of threads."""
    count = 92_000
    host = make_buffer((count + 11, 656), gap=16, pinned=device.type == "cuda")
    gpu = make_buffer((count + 11, 656), device=device, seed=1, gap=16)
    assert count * 656 > 2 * 6 * CHUNK_BYTES
    pairs = pairs_of(count, count + 11, count + 11)
    src, dst = (host, gpu) if op is h2d_gather else (gpu, host)
    expected, old = dst.twin(), dst.whole.clone()
    ref_h2d_gather(src.view, expected.view, pairs)
    for method in GATHERS if op is h2d_gather else SCATTERS:
        for num_threads in (None, 1, min(2, NUM_CORES), NUM_CORES):
            dst.whole.copy_(old)
            op(src.view, dst.view, pairs, method=method, num_threads=num_threads)
            synchronize(device)
            assert dst.same(expected), (method, num_threads)


@each_index
@pytest.mark.parametrize("op", [h2d_gather, d2h_scatter])
def test_many_blocks_of_pairs(device: torch.device, op: Any, index_dtype: torch.dtype) -> None:
    """Three blocks of short rows, the last one small; a fault in it is found in front of them."""
    count = 2 * BLOCK_PAIRS + 5000
    host = make_buffer((count, 8), pinned=device.type == "cuda")
    gpu = make_buffer((count, 8), device=device, seed=1)
    pairs = pairs_of(count, count, count, index_dtype)
    src, dst = (host, gpu) if op is h2d_gather else (gpu, host)
    expected, old = dst.twin(), dst.twin()
    ref_h2d_gather(src.view, expected.view, pairs)
    bad = pairs.clone()
    bad[count - 2] = torch.tensor([0, count])
    text = f"{op.__name__}: pairs[..., 1]: index {count} at position {count - 2}, expected below "
    for method in GATHERS if op is h2d_gather else SCATTERS:
        dst.whole.copy_(old.whole)
        with pytest.raises(IndexError, match=re.escape(text)):
            op(src.view, dst.view, bad, method=method)
        synchronize(device)
        assert dst.same(old), method
        op(src.view, dst.view, pairs, method=method)
        synchronize(device)
        assert dst.same(expected), method


def test_slot_map_of_many_blocks(device: torch.device) -> None:
    count = BLOCK_PAIRS + 70_000
    src = make_buffer((count, 4), pinned=device.type == "cuda")
    dst = make_buffer((count, 4), device=device, seed=1)
    slot_map = make_buffer((count,), torch.int64, device, seed=2)
    pairs = torch.stack([torch.randperm(count), torch.randperm(count)], dim=1)
    pairs[::9, 0] = -4
    dst_twin, map_twin = dst.twin(), slot_map.twin()
    ref_h2d_gather(src.view, dst_twin.view, pairs, map_twin.view)
    old_dst, old_map = dst.whole.clone(), slot_map.whole.clone()
    for method in GATHERS:
        dst.whole.copy_(old_dst)
        slot_map.whole.copy_(old_map)
        h2d_gather(src.view, dst.view, pairs, slot_map=slot_map.view, method=method)
        assert dst.same(dst_twin), method
        assert slot_map.same(map_twin), method


@pytest.mark.parametrize("method", ["auto", "cpu"])
def test_more_rows_than_int32_can_count(device: torch.device, method: str) -> None:
    """Their numbers travel as int64."""
    num_rows = 2**31 + 9
    host = torch.empty(num_rows, 1, dtype=torch.uint8)  # touched at both ends, of 2 GiB
    for row in (0, 1, 2, 9, 2**31 - 1, 2**31, num_rows - 1):
        host[row] = row % 97 + 1
    gpu = make_buffer((50, 1), device=device)
    twin = gpu.twin()
    pairs = torch.tensor([[2**31, 3], [9, 7], [num_rows - 1, 49], [-1, 5], [2**31 - 1, 0]])
    h2d_gather(host, gpu.view, pairs, method=method)
    for row, slot in ((2**31, 3), (9, 7), (num_rows - 1, 49), (2**31 - 1, 0)):
        twin.view[slot] = row % 97 + 1
    assert gpu.same(twin)
    back = torch.tensor([[3, 1], [49, 2**31 - 1], [7, num_rows - 2], [0, 2**31]])
    d2h_scatter(gpu.view, host, back, method=method)
    at = [0, 1, 2, 2**31 - 1, 2**31, num_rows - 2, num_rows - 1]
    wanted = [1, 2**31 % 97 + 1, 3, int(twin.view[49]), (2**31 - 1) % 97 + 1, 10]
    wanted.append((num_rows - 1) % 97 + 1)
    assert host[at].flatten().tolist() == wanted
